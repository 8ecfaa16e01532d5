# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's model directories, read and written without transformers. The only home of huggingface_hub.

A directory has config.json, tensors (`hf_weights`) and a tokenizer (`hf_tokenizer`).
Source: transformers' configuration_bert.py and modeling_bert.py for what the options mean.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from bert_jax.checkpoints.hf_extras import ADAPTER, EXTRAS, check_prefix, check_whole, find_extras
from bert_jax.checkpoints.hf_tokenizer import load_hf_tokenizer, save_hf_tokenizer
from bert_jax.checkpoints.hf_weights import INDEX, PICKLE, WEIGHTS, import_torch, open_weights, write_weights
from bert_jax.checkpoints.names import Imported, check_vocabulary, find_not_finite, from_params, to_params
from bert_jax.checkpoints.sentence_transformers import read_pipeline
from bert_jax.errors import InputError, shown
from bert_jax.model.heads.base import Head
from bert_jax.model.heads.embedding import EMBEDDINGS
from bert_jax.model.heads.encoder import ENCODER
from bert_jax.model.heads.table import HEADS, has_parts, head_of, infer_head
from bert_jax.model.objective import Params, parts_of
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.rules import from_dict, to_dict
from bert_jax.storage import files, writing
from bert_jax.storage.files import JsonObject
from bert_jax.storage.places import AnyPath
from bert_jax.text.tokenizer import Tokenizer

_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")

# Hugging Face's "gelu" is erf, where Google's is tanh.
_ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_python": "gelu_exact",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ACTIVATION_NAMES = {"gelu_exact": "gelu", "gelu_tanh": "gelu_new"}

# Our name -> theirs, for settings with the same meaning and the same defaults.
_SETTINGS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "type_vocab_size": "type_vocab_size",
    "hidden_dropout_rate": "hidden_dropout_prob",
    "attention_dropout_rate": "attention_probs_dropout_prob",
    "initializer_stddev": "initializer_range",
    "layer_norm_epsilon": "layer_norm_eps",
}

_FILES = ["config.json", "model*.safetensors", INDEX, "vocab.txt", "spiece.model", "tokenizer.json",
          "tokenizer_config.json", "added_tokens.json", *EXTRAS]  # fmt: skip


def load_hf(directory: Path) -> Imported:
    """Returns the BERT in a directory of Hugging Face's.

    Raises: InputError if a file is missing or damaged, or if the model is not one that can be computed here.
    """
    where = directory / "config.json"
    check_whole(directory)
    if not where.exists():
        raise InputError(f"{directory} has no config.json, which says what its tensors mean; copy it as well")
    files.check_fetched(directory)
    settings = files.read_json(where)
    if not isinstance(settings, dict):
        raise InputError(f"{where} is not a JSON object, so it describes no model; copy it again")
    config = model_config(settings, where)
    tokenizer, notes = load_hf_tokenizer(directory)
    check_vocabulary(tokenizer, config.vocab_size, where)
    notes += find_extras(directory)
    with open_weights(directory) as (name, shapes, read):
        check_prefix(shapes, name)
        params = to_params(read, shapes, "hf", config, name)
    if pipeline := read_pipeline(directory, config):
        notes += [*pipeline.notes, *find_not_finite(params, name)]
        whole, settings = params | pipeline.params, to_dict(pipeline.settings)
        return Imported(config, whole, tokenizer, EMBEDDINGS.name, (), tuple(notes), task_settings=settings)
    present = parts_of(params)
    architectures = settings.get("architectures")
    known = architectures if isinstance(architectures, list) else []
    declared = next((head for head in HEADS.values() if head.architecture in known), None)
    missing = [part for part in (declared.parts if declared else ()) if part not in present]
    notes += [f"{name} has no {part}, which its architecture asks for" for part in missing]
    notes += find_not_finite(params, name)
    head = declared if declared and not missing else infer_head(present)
    alike = (each for each in HEADS.values() if each.architecture == head.architecture)
    head = next((each for each in alike if settings.get("problem_type") in each.problem_types), head)
    if settings.get("classifier_dropout") not in (None, config.hidden_dropout_rate):
        notes.append(
            f"classifier_dropout {shown(settings['classifier_dropout'])} is not kept; dropout before a classifier is "
            f"hidden_dropout_rate {config.hidden_dropout_rate} here"
        )
    if "auto_map" in settings:
        notes.append(f"{where} names code of the model's own (auto_map), which is not run: it is computed as a BERT")
    problem = _problem(settings, head, params) if head.problem_types else ""
    if problem:
        notes.append(
            f"problem_type {problem} is kept; there are no predictions of it here, where classes exclude others"
        )
    labels = _labels(settings, params, where) if head.has_labels else ()
    return Imported(config, params, tokenizer, head.name, labels, tuple(notes), problem)


def save_hf(
    directory: AnyPath,
    config: ModelConfig,
    params: Params,
    tokenizer: Tokenizer,
    task: str,
    labels: tuple[str, ...],
    max_shard_bytes: int = 5_000_000_000,
    card: str = "",
    problem: str = "",
    dtype: str = "float32",
    write_more: Callable[[Path], object] = lambda directory: None,
) -> list[str]:
    """Writes a directory that transformers loads whole, and returns lines that the user should see.

    Parts that the task's architecture lacks are left out, with a note. Tensors of more than `max_shard_bytes` in total
    are divided into shards. `card` is its README.md, if not empty. `problem` is that of `Imported`. `dtype` float16
    takes half the space; numbers beyond 65,504 do not fit. `write_more` writes into the directory before it is there.

    Raises: InputError, with nothing written, if the model cannot be expressed or the directory exists.
    """
    if config.causal:
        raise InputError("a left-to-right model (causal) has no counterpart among Hugging Face's BERTs; it stays here")
    present = parts_of(params)
    known = present if task in HEADS else set(present) & {"pooler"}  # nothing is known of a user's own head
    head = head_of(task, known)
    head = head if head.own_parts else ENCODER  # what has no part of its own is written as the bare encoder
    left_out = [part for part in present if part not in head.parts]
    notes = [f"{part} is left out: {head.architecture} has none" for part in left_out]
    if not has_parts(head, known):
        notes.append("there is no pooler: load it with BertModel.from_pretrained(..., add_pooling_layer=False)")
    arrays = from_params(_only(params, head.parts), "hf", config)
    if dtype != "float32":
        with np.errstate(over="ignore"):  # it is refused below
            arrays = {name: array.astype(dtype) for name, array in arrays.items()}
        if wide := [name for name, array in arrays.items() if not np.isfinite(array).all()]:
            raise InputError(f"{wide[0]} has numbers that {dtype} does not hold; write float32")
    if not head.own_parts:  # the bare encoder's names begin further on
        arrays = {name.removeprefix("bert."): array for name, array in arrays.items()}
    settings = (
        {theirs: getattr(config, ours) for ours, theirs in _SETTINGS.items()}
        | {
            "architectures": [head.architecture],
            "model_type": "bert",
            "hidden_act": _ACTIVATION_NAMES[config.activation],
            "pad_token_id": tokenizer.pad_id,
            "tie_word_embeddings": True,
        }
        | ({} if dtype == "float32" else {"dtype": dtype, "torch_dtype": dtype})
    )  # what newer and older versions read
    if head.has_labels:
        names = labels or tuple(f"LABEL_{index}" for index in range(params["classifier"]["bias"].shape[0]))
        settings["id2label"] = {str(index): label for index, label in enumerate(names)}
        settings["label2id"] = {label: index for index, label in enumerate(names)}
        if head.problem_types:
            settings["problem_type"] = problem or _usual_problem(head, params)
    with writing.new_directory(directory) as temporary:
        write_weights(temporary, arrays, max_shard_bytes)
        writing.write_json(temporary / "config.json", settings)
        notes += save_hf_tokenizer(temporary, tokenizer, config.max_positions)
        if card:
            (temporary / "README.md").write_text(card, encoding="utf-8")
        write_more(temporary)
    return notes


def model_config(settings: JsonObject, where: Path) -> ModelConfig:
    """Returns the model that a config.json describes.

    Raises: InputError, with the name of the option, if it is not a BERT as it is computed here.
    """
    for option, allowed in (
        ("model_type", (None, "bert")),
        ("position_embedding_type", (None, "absolute")),
        ("hidden_act", (None, *_ACTIVATIONS)),
        ("is_decoder", (None, False)),
        ("add_cross_attention", (None, False)),
        ("is_encoder_decoder", (None, False)),
        ("pruned_heads", (None, {}, [])),
        ("quantization_config", (None,)),
    ):
        if settings.get(option) not in allowed:
            most = ", ".join(str(value) for value in allowed if value)
            raise InputError(
                f"{where}: {option} is {shown(settings[option])}, which this BERT cannot compute; "
                + (f"it can with {most}" if most else "a model without it can be used")
            )
    values = {ours: settings[theirs] for ours, theirs in _SETTINGS.items() if theirs in settings}
    if "hidden_size" not in values or "vocab_size" not in values:
        raise InputError(f"{where} has no hidden_size or no vocab_size; it is no config.json of a BERT")
    values["activation"] = _ACTIVATIONS[settings.get("hidden_act") or "gelu"]
    try:
        config = from_dict(ModelConfig, values, "model")
        config.validate()
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return config


def fetch(url: str) -> Path:
    """Returns a local copy of what a model at hf://ORG/NAME or hf://ORG/NAME@REVISION needs.

    Raises: InputError if huggingface_hub is not installed, or if it cannot get the files.
    """
    name, _, revision = url.removeprefix("hf://").partition("@")
    try:
        import huggingface_hub
    except ImportError:
        raise InputError(
            f"{url} needs huggingface_hub; pip install 'bert_jax[hub]', or download it and give the directory"
        ) from None
    try:
        directory = Path(huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=_FILES))
        if not any((directory / file).exists() for file in (WEIGHTS, INDEX)):
            if (directory / ADAPTER).exists():
                check_whole(directory)
            import_torch(url)
            patterns = [*_FILES, "pytorch_model*.bin", f"{PICKLE}.index.json"]
            directory = Path(
                huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns)
            )
    except InputError:
        raise
    except (OSError, ValueError) as error:  # its errors are one or the other
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"cannot get {url}: {reason}; check the name and the network") from None
    return directory


def _problem(settings: Mapping[str, object], head: Head, params: Params) -> str:
    """Returns the declared problem_type if it is not the usual one, and one that transformers knows; "" otherwise."""
    problem = settings.get("problem_type")
    return str(problem) if problem in _PROBLEMS and problem != _usual_problem(head, params) else ""


def _usual_problem(head: Head, params: Params) -> str:
    """Returns the problem_type that follows from head and number of outputs, as in transformers: one is a score."""
    return head.problem_types[0 if params["classifier"]["bias"].shape[0] == 1 else -1]


def _labels(settings: Mapping[str, object], params: Params, where: Path) -> tuple[str, ...]:
    """Returns the names of the classes in their order; () if they are only numbers."""
    num_classes = params["classifier"]["bias"].shape[0]
    names = settings.get("id2label")
    if not names:
        return ()
    if not isinstance(names, dict) or sorted(map(str, names)) != sorted(map(str, range(num_classes))):
        raise InputError(
            f"{where}: id2label does not name the {num_classes} classes of the classifier as 0 to {num_classes - 1}; "
            "correct it, or remove it to use numbers as names"
        )
    labels = tuple(str(names[key]) for key in sorted(names, key=int))
    if len(set(labels)) < len(labels):
        raise InputError(
            f"{where}: id2label has two classes of one name, {', '.join(labels)[:80]}; name them differently, or "
            "remove it to use numbers as names"
        )
    return () if labels == tuple(f"LABEL_{index}" for index in range(num_classes)) else labels


def _only(params: Params, parts: tuple[str, ...]) -> Params:
    """Returns the embeddings and layers, and the named parts."""
    encoder = {name: value for name, value in params["encoder"].items() if name != "pooler" or "pooler" in parts}
    return {name: value for name, value in params.items() if name in parts} | {"encoder": encoder}
