# SPDX-License-Identifier: Apache-2.0
r"""Converts a BERT between the formats of bert_jax and Hugging Face, and from Google's (TensorFlow 1).

    bert_jax convert_checkpoint --input=PATH --output=DIR --to=FORMAT [--verify]

PATH is a work directory, or a model exported from one; a directory written by transformers, or
hf://ORG/NAME; or a directory with Google's bert_config.json, vocab.txt and bert_model.ckpt.*, or the checkpoint in it.
The format is recognised from the files. Neither PyTorch nor TensorFlow is needed. FORMAT is bert_jax, hf,
sentence_transformers, which has the pooling, normalization, prompts and length of embeddings too, or pylate, of
models with a vector for each token.

    bert_jax convert_checkpoint --input=hf://google-bert/bert-base-uncased --output=base --to=bert_jax
    bert_jax convert_checkpoint --input=uncased_L-12_H-768_A-12 --output=base --to=bert_jax
    bert_jax convert_checkpoint --input=runs/base --output=for_transformers --to=hf --verify

--output=hf://ORG/NAME uploads to the Hugging Face hub, to the branch --revision=BRANCH if given. The access token is
that of `hf auth login`, or HF_TOKEN. The model card, README.md, is made from the records of the run.

    bert_jax convert_checkpoint --input=runs/base@20000 --output=hf://ORG/NAME --revision=step20000
"""

import dataclasses
import functools
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from bert_jax.errors import InputError
from bert_jax.storage.places import Place, is_taken, to_place
from bert_jax.storage.resolve import HUB, is_hub, resolve
from bert_jax.tools import cli

# outputs, and the parts that they are of
_PART_OF = {
    "pooled": "pooler",
    "next_sentence": "next_sentence",
}
_INPUT = flags.DEFINE_string(
    "input", None, "The model to convert; its format is recognised.", required=True
)
_OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "Directory to create; it must not exist. hf://ORG/NAME uploads to the hub.",
    required=True,
)
_TO = flags.DEFINE_enum(
    "to", None, ["bert_jax", "hf", "sentence_transformers", "pylate"],
    "The format of the output; the hub takes all but bert_jax.")  # fmt: skip
_REVISION = flags.DEFINE_string(
    "revision", "", "Branch of the hub's repository, created if missing; empty means main."
)
_PRIVATE = flags.DEFINE_boolean(
    "private", True, "Whether a repository that is created on the hub is private."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", "float32", ["float32", "float16"], "Of what --to=hf writes; float16 takes half."
)
_VERIFY = flags.DEFINE_boolean(
    "verify", False, "Load the output and compare its results with the input's."
)
_ACTIVATION = flags.DEFINE_enum(
    "activation", "", ["", "gelu_exact", "gelu_tanh"],
    "The GELU that the model was trained with, if the source names the wrong one: Google's configurations say gelu "
    "both for the erf form (before 2019-02-07) and for the tanh form.",
)  # fmt: skip

if TYPE_CHECKING:
    from bert_jax.checkpoints.pretrained import Pretrained

_OF_HUB = ("hf", "sentence_transformers", "pylate")
_LIBRARIES = {
    "hf": "transformers",
    "sentence_transformers": "sentence-transformers",
    "pylate": "PyLate",
}
MOST = 1e-5  # larger differences are not from rounding in computing


def main() -> None:
    """Writes the output, whole or not at all, and reports what was read, what was left out and any differences."""
    url = _OUTPUT.value if is_hub(_OUTPUT.value) else ""
    _check_flags(url)
    if not url:
        output = to_place(_OUTPUT.value)
        _convert(output, str(output))
        return

    from bert_jax.checkpoints.hub import upload_model

    with tempfile.TemporaryDirectory(prefix="bert_jax_hub_") as temporary:
        directory = Path(temporary) / "model"
        step = _convert(directory, url).trained.get("step")
        message = f"Upload by bert_jax{f', step {step}' if step is not None else ''}"
        print(
            f"uploaded to {upload_model(directory, url, _REVISION.value, message, _PRIVATE.value)}"
        )


def _check_flags(url: str) -> None:
    """Raises: InputError if the flags do not fit each other or the output exists; `url` is the hub's or ""."""
    if url:
        from bert_jax.checkpoints.hub import check_upload

        if _TO.value not in (None, *_OF_HUB):
            raise InputError(
                f"--to={_TO.value} cannot be uploaded; use --to=hf or --to=sentence_transformers"
            )
        check_upload(url, _REVISION.value)
        return
    if _TO.value is None:
        raise InputError("--to is needed: bert_jax, hf, sentence_transformers or pylate")
    if _DTYPE.value != "float32" and _TO.value not in _OF_HUB:
        raise InputError(f"--dtype={_DTYPE.value} is of --to=hf; {_TO.value} is written as float32")
    if _REVISION.value:
        raise InputError(
            f"--revision={_REVISION.value} is of a repository of the hub; give --output=hf://ORG/NAME"
        )
    if is_taken(to_place(_OUTPUT.value)):
        raise InputError(f"output {_OUTPUT.value} exists; give a directory that does not")


def _convert(output: Place, shown: str) -> "Pretrained":
    """Writes the model to a directory, which messages call `shown`, and returns it."""
    to = _TO.value or "hf"
    from bert_jax.checkpoints.hf import left_out, save_hf
    from bert_jax.checkpoints.model_card import gather_records, model_card
    from bert_jax.checkpoints.multi_vector import check_pylate, write_multi_vector, write_pylate
    from bert_jax.checkpoints.pretrained import read_pretrained, save_pretrained
    from bert_jax.checkpoints.sentence_transformers import check_prompts, write_pipeline
    from bert_jax.checkpoints.sparse_encoder import write_sparse
    from bert_jax.inference.compare import differences, rounded
    from bert_jax.inference.late_interaction import is_of_tokens
    from bert_jax.model.heads.sparse import QUERY_TABLE
    from bert_jax.model.heads.table import HEADS
    from bert_jax.model.objective import count_parameters
    from bert_jax.settings.finetuning import TaskConfig
    from bert_jax.settings.rules import to_dict

    source = resolve(_INPUT.value)
    bert = read_pretrained(source)
    if _ACTIVATION.value:
        bert = dataclasses.replace(
            bert, config=dataclasses.replace(bert.config, activation=_ACTIVATION.value)
        )
    notes = list(bert.notes)
    lost = []
    if to == "bert_jax":
        save_pretrained(bert, output, replace=False)
    else:
        records = (
            to_dict(bert.config),
            bert.task,
            count_parameters(bert.params),
            bert.labels,
            bert.trained,
        )
        lost = left_out(bert.config, bert.params, bert.task)
        if to != "hf":  # a pipeline of vectors has no head but the projection, or a table
            kept = {"encoder", "mlm", "next_sentence", "projection", QUERY_TABLE}
            lost = sorted(bert.params.keys() - kept)
        title = shown.removeprefix(HUB).rpartition("/")[2]
        card = model_card(gather_records(source, *records), title, _LIBRARIES[to], lost)
        options: dict[str, Any] = {"card": card, "problem": bert.problem, "dtype": _DTYPE.value}
        options |= {name: bert.task_settings.get(name, "") for name in ("thresholds", "activation")}
        options["max_seq_length"] = bert.task_settings.get("max_seq_length", 0)
        params = bert.params
        if to != "hf":
            settings = bert.embedding or TaskConfig(
                name="embeddings", max_seq_length=bert.config.max_positions
            )
            if bert.embedding is None:
                notes.append(
                    "this model has no way of its own to make vectors of texts: they are the mean of its tokens'"
                )
            check_prompts(settings, bert.tokenizer, _INPUT.value)
            parts = {"encoder"}
            write: Any = write_multi_vector if is_of_tokens(bert) else write_pipeline
            if settings.embedding.kind == "sparse":
                parts.add("mlm")
                write = functools.partial(write_sparse, vocab_size=bert.config.vocab_size)
            if to == "pylate":
                check_pylate(bert.embedding, bert.tokenizer)
                write = functools.partial(write_pylate, tokenizer=bert.tokenizer)
            options["write_more"] = lambda folder: write(folder, settings, bert.params)
            params = {name: part for name, part in params.items() if name in parts}
        notes += save_hf(
            output, bert.config, params, bert.tokenizer, bert.task, bert.labels, **options
        )
    if _VERIFY.value:
        notes += _without_checksums(source.format, to)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(
        f"{shown}: {bert.task}, {bert.config.num_layers} layers, hidden {bert.config.hidden_size}, "
        f"{bert.config.activation}, {count_parameters(bert.params):,} parameters, from {source.format} to {to}"
        + (f", without its {', '.join(lost)}: there is no class for it" if lost else "")
    )
    if _VERIFY.value:
        again = read_pretrained(resolve(output))
        # as far as float16 holds them: what that changes depends on the model, and is told
        written = dataclasses.replace(bert, params=rounded(bert.params, _DTYPE.value))
        largest = differences(written, again)
        if to == "hf":  # whose class may lack these, as a note has said
            for name, part in _PART_OF.items():
                if part not in HEADS[again.task].parts_in(again.config):
                    largest.pop(name, None)
        for name, difference in largest.items():
            print(f"largest difference of {name}: {difference:.3g}")
        left_out = [name for name, difference in largest.items() if not difference <= MOST]
        if left_out:
            raise InputError(
                f"{shown} does not compute the same {', '.join(left_out)} as {_INPUT.value}"
            )
        if _DTYPE.value == "float16":
            changed = differences(bert, written)
            told = ", ".join(f"{name} {changed[name]:.3g}" for name in largest)
            print(f"float16 changes at most: {told}")
    return bert


def _without_checksums(source: str, target: str) -> list[str]:
    """Returns notes about damage that a comparison cannot find, since Hugging Face's tensors have no checksums."""
    notes = []
    if source == "hf":
        sealed = "; the output is sealed by checksums from now on" if target == "bert_jax" else ""
        notes.append(
            f"{_INPUT.value}: Hugging Face's files carry no checksum, so a tensor that was damaged looks like "
            f"any other{sealed}"
        )
    if target in _OF_HUB:
        notes.append(
            f"{_OUTPUT.value}: Hugging Face's files carry no checksum; keep a sha256 beside them"
        )
    return notes


if __name__ == "__main__":
    cli.run(main)
