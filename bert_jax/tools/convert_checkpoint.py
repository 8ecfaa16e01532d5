# SPDX-License-Identifier: Apache-2.0
r"""Converts a BERT between formats: ours, Hugging Face's, Google's TensorFlow 1.

    python -m bert_jax.tools.convert_checkpoint --input=PATH --output=DIR --to=bert_jax|hf|tf1 [--verify]

PATH is a work directory of train.py or a model exported from one; a directory as transformers writes it, or
hf://ORG/NAME; a directory with Google's bert_config.json, vocab.txt and bert_model.ckpt.*, or the checkpoint in it.
The format is recognised from the files. Neither PyTorch nor TensorFlow is needed.

    python -m bert_jax.tools.convert_checkpoint --input=hf://google-bert/bert-base-uncased --output=base --to=bert_jax
    python -m bert_jax.tools.convert_checkpoint --input=uncased_L-12_H-768_A-12 --output=base --to=bert_jax
    python -m bert_jax.tools.convert_checkpoint --input=runs/base --output=for_transformers --to=hf --verify
"""

import dataclasses
import sys

from absl import flags

from bert_jax.errors import InputError
from bert_jax.storage.places import is_taken, to_place
from bert_jax.tools import cli

_INPUT = flags.DEFINE_string("input", None, "The model to convert; its format is recognised.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Directory to make; must not exist.", required=True)
_TO = flags.DEFINE_enum("to", None, ["bert_jax", "hf", "tf1"], "The format of the output.", required=True)
_VERIFY = flags.DEFINE_boolean("verify", False, "Read the output again and compare what the two compute.")
_ACTIVATION = flags.DEFINE_enum(
    "activation", "", ["", "gelu_exact", "gelu_tanh"],
    "The GELU that the model was trained with, where the source is wrong about it: Google's configurations say gelu "
    "both for erf (before 2019-02-07) and for the tanh form.",
)  # fmt: skip

MOST = 1e-5  # larger differences are not from rounding


def main() -> None:
    """Writes the output, whole or not at all, and says what was read, left out and found."""
    output = to_place(_OUTPUT.value)
    if is_taken(output):
        raise InputError(f"output {output} exists; give a directory that does not")
    from bert_jax.checkpoints.compare import differences
    from bert_jax.checkpoints.hf import save_hf
    from bert_jax.checkpoints.pretrained import load_pretrained, recognise, save_pretrained
    from bert_jax.checkpoints.tf1 import save_tf1
    from bert_jax.model.objective import count_parameters

    bert = load_pretrained(_INPUT.value)
    if _ACTIVATION.value:
        bert = dataclasses.replace(bert, config=dataclasses.replace(bert.config, activation=_ACTIVATION.value))
    notes = list(bert.notes)
    if _TO.value == "bert_jax":
        save_pretrained(bert, output, replace=False)
    else:
        save = save_hf if _TO.value == "hf" else save_tf1
        notes += save(output, bert.config, bert.params, bert.tokenizer, bert.task, bert.labels)
    if _VERIFY.value:
        notes += _without_checksums(recognise(_INPUT.value), _TO.value)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(
        f"{output}: {bert.task}, {bert.config.num_layers} layers, hidden {bert.config.hidden_size}, "
        f"{bert.config.activation}, {count_parameters(bert.params):,} parameters, from {recognise(_INPUT.value)} to "
        f"{_TO.value}"
    )
    if _VERIFY.value:
        found = differences(bert, load_pretrained(output))
        for name, difference in found.items():
            print(f"largest difference of {name}: {difference:.3g}")
        left_out = [name for name, difference in found.items() if not difference <= MOST]
        if left_out:
            raise InputError(
                f"{output} does not compute the same {', '.join(left_out)} as {_INPUT.value}; see the notes"
            )


def _without_checksums(source: str, target: str) -> list[str]:
    """Returns notes about damage that a comparison cannot find, since Hugging Face's tensors have no checksums."""
    notes = []
    if source == "hf":
        sealed = {"bert_jax": "; the output is sealed by checksums from now on", "tf1": "; the output has checksums"}
        notes.append(
            f"{_INPUT.value}: Hugging Face's files carry no checksum, so a tensor that was damaged looks like "
            f"any other{sealed.get(target, '')}"
        )
    if target == "hf":
        notes.append(f"{_OUTPUT.value}: Hugging Face's files carry no checksum; keep a sha256 beside them")
    return notes


if __name__ == "__main__":
    cli.run(main)
