# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's directories, read and written without its library. The only home of safetensors and huggingface_hub.

A directory has config.json, model.safetensors (or shards of it and model.safetensors.index.json) and a tokenizer.
Source: transformers' configuration_bert.py and modeling_bert.py for what the options mean.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from bert_jax import storage
from bert_jax.config import ModelConfig
from bert_jax.convert.hf_tokenizer import load_hf_tokenizer, save_hf_tokenizer
from bert_jax.convert.names import (
    Arrays,
    Imported,
    canonical_names,
    check_vocabulary,
    from_params,
    infer_task,
    to_params,
)
from bert_jax.errors import InputError
from bert_jax.model.heads import TASK_PARTS
from bert_jax.model.objective import Params, parts_of
from bert_jax.settings import from_dict
from bert_jax.text.tokenizer import Tokenizer

ARCHITECTURES = {
    "encoder": "BertModel",
    "pretraining": "BertForPreTraining",
    "masked_lm": "BertForMaskedLM",
    "next_sentence": "BertForNextSentencePrediction",
    "sequence_classification": "BertForSequenceClassification",
    "token_classification": "BertForTokenClassification",
    "multiple_choice": "BertForMultipleChoice",
    "question_answering": "BertForQuestionAnswering",
}
_TASKS = {architecture: task for task, architecture in ARCHITECTURES.items()}
_LABELLED = ("sequence_classification", "token_classification")

# Hugging Face's "gelu" is erf, where Google's is tanh.
_ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_python": "gelu_exact",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ACTIVATION_NAMES = {"gelu_exact": "gelu", "gelu_tanh": "gelu_new"}

# Ours -> theirs, of the settings that both have with the same meaning. Ours have the same defaults, but where noted.
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

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLE = "pytorch_model.bin"
_FILES = ["config.json", "model*.safetensors", _INDEX, "vocab.txt", "spiece.model", "tokenizer.json",
          "tokenizer_config.json", "added_tokens.json"]  # fmt: skip


def load_hf(path: str | Path) -> Imported:
    """Returns the BERT in a directory of Hugging Face's, or at hf://ORG/NAME or hf://ORG/NAME@REVISION.

    Raises: InputError if a file is missing or damaged, or if the model is not one that can be computed here.
    """
    directory = fetch(str(path)) if str(path).startswith("hf://") else Path(path)
    where = directory / "config.json"
    if not where.exists():
        raise InputError(f"{directory} has no config.json, which says what its tensors mean; copy it as well")
    settings = storage.read_json(where)
    if not isinstance(settings, dict):
        raise InputError(f"{where} is not a JSON object, so it describes no model; copy it again")
    config = model_config(settings, where)
    tokenizer = load_hf_tokenizer(directory)
    check_vocabulary(tokenizer, config.vocab_size, where)
    with _open_weights(directory) as (name, shapes, read):
        params = to_params(read, shapes, "hf", config, name)
    present = parts_of(params)
    declared = _TASKS.get(next(iter(settings.get("architectures") or []), ""), "")
    missing = [part for part in TASK_PARTS.get(declared, ()) if part not in present]
    notes = [f"{name} has no {part}, which its architecture asks for" for part in missing]
    task = declared if declared and not missing else infer_task(present)
    if settings.get("classifier_dropout") not in (None, config.hidden_dropout_rate):
        notes.append(
            f"classifier_dropout {settings['classifier_dropout']} is not kept; dropout before a classifier is "
            f"hidden_dropout_rate {config.hidden_dropout_rate} here"
        )
    labels = _labels(settings, params, where) if task in _LABELLED else ()
    return Imported(config, params, tokenizer, task, labels, tuple(notes))


def save_hf(
    directory: str | Path, config: ModelConfig, params: Params, tokenizer: Tokenizer, task: str, labels: tuple[str, ...]
) -> list[str]:
    """Writes a directory that transformers loads whole, and returns lines that the user should see.

    What the task's architecture has no place for is left out and said so. Raises: InputError, with nothing written,
    if the model cannot be expressed or the directory exists.
    """
    if config.causal:
        raise InputError("a left-to-right model (causal) has no counterpart among Hugging Face's BERTs; it stays here")
    present = parts_of(params)
    task = task if set(TASK_PARTS[task]) <= set(present) else infer_task(present)
    left_out = [part for part in present if part not in TASK_PARTS[task]]
    notes = [f"{part} is left out: {ARCHITECTURES[task]} has none" for part in left_out]
    if task == "encoder" and "pooler" not in present:
        notes.append("there is no pooler: load it with BertModel.from_pretrained(..., add_pooling_layer=False)")
    arrays = from_params(_only(params, TASK_PARTS[task]), "hf", config)
    if task == "encoder":  # the bare encoder's names begin further on
        arrays = {name.removeprefix("bert."): array for name, array in arrays.items()}
    settings = {theirs: getattr(config, ours) for ours, theirs in _SETTINGS.items()} | {
        "architectures": [ARCHITECTURES[task]],
        "model_type": "bert",
        "hidden_act": _ACTIVATION_NAMES[config.activation],
        "pad_token_id": tokenizer.pad_id,
        "tie_word_embeddings": True,
    }
    if task in _LABELLED:
        names = labels or tuple(f"LABEL_{index}" for index in range(params["classifier"]["bias"].shape[0]))
        settings["id2label"] = {str(index): label for index, label in enumerate(names)}
        settings["label2id"] = {label: index for index, label in enumerate(names)}
    with storage.new_directory(directory) as temporary:
        safetensors.numpy.save_file(arrays, temporary / _WEIGHTS, metadata={"format": "pt"})
        storage.write_json(temporary / "config.json", settings)
        notes += save_hf_tokenizer(temporary, tokenizer, config.max_positions)
    return notes


def model_config(settings: dict[str, Any], where: Path) -> ModelConfig:
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
                f"{where}: {option} is {settings[option]!r}, which this BERT cannot compute; "
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
        if not any((directory / file).exists() for file in (_WEIGHTS, _INDEX)):
            _import_torch(url)
            patterns = [*_FILES, "pytorch_model*.bin", f"{_PICKLE}.index.json"]
            directory = Path(
                huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns)
            )
    except InputError:
        raise
    except (OSError, ValueError) as error:  # its errors are one or the other
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"cannot get {url}: {reason}; check the name and the network") from None
    return directory


@contextlib.contextmanager
def _open_weights(
    directory: Path,
) -> Iterator[tuple[Path, dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]]:
    """Yields the file to name in messages, {name: shape} of all tensors, and what reads one."""
    whole, index = directory / _WEIGHTS, directory / _INDEX
    strays = sorted(path.name for path in directory.glob("model-*-of-*.safetensors"))
    if whole.exists() and (index.exists() or strays):
        raise InputError(
            f"{directory} has both {_WEIGHTS} and shards ({index.name if index.exists() else strays[0]}), which may be "
            "of two models; remove one of them"
        )
    if strays and not index.exists():
        raise InputError(f"{directory} has shards such as {strays[0]} and no {_INDEX} that lists them; copy it as well")
    with contextlib.ExitStack() as stack:
        if index.exists():
            name, files = index, _open_shards(directory, stack)
        elif whole.exists():
            name, files = whole, {whole: _open(whole, stack)}
        else:
            name, arrays = _load_pickles(directory)
            yield (
                name,
                *_without_ties({key: tuple(array.shape) for key, array in arrays.items()}, arrays.__getitem__, name),
            )
            return
        homes = {tensor: stream for stream in files.values() for tensor in stream.keys()}
        shapes = {tensor: tuple(stream.get_slice(tensor).get_shape()) for tensor, stream in homes.items()}

        def read(tensor: str) -> np.ndarray:
            try:
                return homes[tensor].get_tensor(tensor)
            except (safetensors.SafetensorError, AttributeError, TypeError) as error:
                kind = homes[tensor].get_slice(tensor).get_dtype()
                raise InputError(f"{name}: cannot read {tensor} of type {kind} ({error}); save it as float32") from None

        yield name, *_without_ties(shapes, read, name)


def _open(path: Path, stack: contextlib.ExitStack) -> Any:
    try:
        return stack.enter_context(safetensors.safe_open(path, framework="np"))
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(f"{path} is truncated or damaged ({error}); copy it again") from None


def _open_shards(directory: Path, stack: contextlib.ExitStack) -> dict[Path, Any]:
    """Returns the open shards. Raises: InputError if one is missing, or holds other tensors than the index says."""
    index = directory / _INDEX
    content = storage.read_json(index)
    homes = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(homes, dict) or not homes:
        raise InputError(f"{index} has no weight_map, so nothing says which file holds which tensor; copy it again")
    files = {}
    for name in sorted(set(homes.values())):
        path = directory / name
        if path.parent != directory or not path.exists():
            raise InputError(f"{index} names a shard {name} that is not in the directory; copy it as well")
        files[path] = _open(path, stack)
        expected = {tensor for tensor, home in homes.items() if home == name}
        different = sorted(expected ^ set(files[path].keys()))
        if different:
            raise InputError(
                f"{path} and {index.name} differ about {different[0]} and {len(different) - 1} other tensors; they are "
                "of two models or of two ways to divide one, so copy all shards and the index from one place"
            )
    return files


def _load_pickles(directory: Path) -> tuple[Path, Arrays]:
    """Returns the tensors of pytorch_model.bin, through torch's loader that runs no code."""
    path, index = directory / _PICKLE, directory / f"{_PICKLE}.index.json"
    if not path.exists() and not index.exists():
        raise InputError(f"{directory} has no {_WEIGHTS}, no {_INDEX} and no {_PICKLE}; copy the one that it came with")
    torch = _import_torch(path)
    names = sorted(set(storage.read_json(index)["weight_map"].values())) if index.exists() else [path.name]
    arrays: Arrays = {}
    for name in names:
        try:
            tensors = torch.load(directory / name, map_location="cpu", weights_only=True)
            arrays |= {key: tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()
                       for key, tensor in tensors.items()}  # fmt: skip
        except Exception as error:  # noqa: BLE001 - a damaged pickle fails in any way
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise InputError(
                f"{directory / name} is damaged or holds more than tensors ({reason}); copy it again"
            ) from None
    return path, arrays


def _import_torch(path: Any) -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise InputError(
            f"{path} is a pickle, which could run any code, and torch, whose loader is safe, is not installed; where "
            "transformers is, AutoModel.from_pretrained(DIR).save_pretrained(DIR) writes model.safetensors: "
            "use the model's own class in place of AutoModel to keep its head"
        ) from None


def _without_ties(
    shapes: dict[str, tuple[int, ...]], read: Callable[[str], np.ndarray], where: Path
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """Returns shapes and reader without the output table and bias that repeat others.

    Raises: InputError if they do not repeat them.
    """
    names = canonical_names(shapes, "hf", where)
    aliases = {}
    for copy, original in (
        ("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ):
        if copy in names and original not in names:
            aliases[original] = names[copy]
        elif copy in names and not np.array_equal(read(names[copy]), read(names[original])):
            raise InputError(
                f"{where}: {names[copy]} differs from {names[original]}; here, as in the paper, the output shares the "
                "table of words, so this model cannot be computed"
            )
    shapes = shapes | {original: shapes[copy] for original, copy in aliases.items()}
    return shapes, lambda name: read(aliases.get(name, name))


def _labels(settings: dict[str, Any], params: Params, where: Path) -> tuple[str, ...]:
    """Returns the names of the classes in their order; () if they are no more than numbers."""
    num_classes = params["classifier"]["bias"].shape[0]
    names = settings.get("id2label")
    if not names:
        return ()
    if not isinstance(names, dict) or sorted(map(str, names)) != sorted(map(str, range(num_classes))):
        raise InputError(
            f"{where}: id2label does not name the {num_classes} classes of the classifier as 0 to {num_classes - 1}; "
            "mend it, or remove it to have numbers for names"
        )
    labels = tuple(str(names[key]) for key in sorted(names, key=int))
    return () if labels == tuple(f"LABEL_{index}" for index in range(num_classes)) else labels


def _only(params: Params, parts: tuple[str, ...]) -> Params:
    """Returns the embeddings and layers, and the named parts."""
    encoder = {name: value for name, value in params["encoder"].items() if name != "pooler" or "pooler" in parts}
    return {name: value for name, value in params.items() if name in parts} | {"encoder": encoder}
