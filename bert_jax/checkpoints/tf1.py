# SPDX-License-Identifier: Apache-2.0
"""Google's directories, as its TensorFlow 1 code makes them, read without TensorFlow.

A directory has bert_config.json, vocab.txt and a checkpoint, such as bert_model.ckpt.index and
bert_model.ckpt.data-00000-of-00001. What Google's configuration has no key for (erf, another epsilon, the names of
classes) is kept under the key "bert_jax", which Google's code does not read.
Source: google-research/bert modeling.py (BertConfig, get_activation) and tokenization.py
(validate_case_matches_checkpoint).
"""

import re
from pathlib import Path

from bert_jax.checkpoints.bundle import Bundle, index_path
from bert_jax.checkpoints.families import SETTINGS
from bert_jax.checkpoints.names import Imported, check_vocabulary, find_not_finite, to_params
from bert_jax.errors import InputError, shown
from bert_jax.model.heads.table import head_of
from bert_jax.model.objective import parts_of
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.rules import from_dict
from bert_jax.storage import files
from bert_jax.storage.files import JsonObject
from bert_jax.text.tokenizer import Tokenizer, load_tokenizer

_CONFIG_NAME = "bert_config.json"
_VOCAB_NAME, _STATE_NAME = "vocab.txt", "checkpoint"
_OURS = "bert_jax"  # the key for settings that Google's format lacks; versions up to 0.3 wrote such directories

# Ours -> Google's names, which transformers took over. Missing settings are as in `ModelConfig`, but for types.
_SETTINGS = {ours: theirs for ours, theirs in SETTINGS.items() if ours != "layer_norm_epsilon"}
_USUAL_TYPES = 16
# In Google's files, and read by nobody.
_IDLE = r"directionality|pooler_(fc_size|num_attention_heads|num_fc_layers|size_per_head|type)"
_LOWER, _CASED = re.compile(r"uncased|(chinese|multilingual)_L-\d"), re.compile("cased")


def load_tf1(path: Path) -> Imported:
    """Returns the BERT of a directory of Google's, or of a checkpoint in one: DIR/bert_model.ckpt, DIR/model.ckpt-20.

    Of several checkpoints in a directory, the one named in its file `checkpoint` is taken. Whether text is lower-cased
    is decided by tokenizer_config.json, or else by a directory called cased, uncased, chinese_L-... or
    multilingual_L-... as Google's are, or else by whether the vocabulary holds capital letters.

    Raises: InputError if a file is missing or damaged, or if the model is not one that can be computed here.
    """
    prefix = find_checkpoint(path) if path.is_dir() else path
    where = prefix.parent / _CONFIG_NAME
    settings = _read_settings(where)
    config, notes = _model_config(settings, where)
    tokenizer, casing = _load_tokenizer(prefix.parent)
    check_vocabulary(tokenizer, config.vocab_size, where)
    bundle = Bundle(prefix)
    if "_CHECKPOINTABLE_OBJECT_GRAPH" in bundle.entries:
        raise InputError(
            f"{index_path(prefix)} is a checkpoint of TensorFlow 2's objects, whose tensors have other names; give one"
            " of Google's TensorFlow 1 code, or the model in Hugging Face's format"
        )
    shapes = {name: entry.shape for name, entry in bundle.entries.items()}
    params = to_params(bundle.read, shapes, "tf1", config, index_path(prefix))
    notes += find_not_finite(params, index_path(prefix))
    ours, present = settings.get(_OURS, {}), parts_of(params)
    task = head_of(str(ours.get("task", "")), present).name
    labels = tuple(map(str, ours.get("labels", ())))
    if labels and len(labels) != len(params.get("classifier", {}).get("bias", ())):
        raise InputError(f"{where} names {len(labels)} classes, and the classifier has another number; remove labels")
    return Imported(config, params, tokenizer, task, labels, (*notes, *casing))


def find_checkpoint(path: Path) -> Path:
    """Returns the prefix of the checkpoint in a directory. Raises: InputError if it is not clear which is meant."""
    prefixes = sorted(index.with_suffix("") for index in path.glob("*.index"))
    names = [prefix.name for prefix in prefixes]
    if len(prefixes) == 1:
        return prefixes[0]
    state = path / _STATE_NAME
    if not state.is_file():
        raise InputError(f"{path} has {len(prefixes)} checkpoints; give one of {', '.join(map(str, prefixes))}")
    with files.reading(str(state)):
        named = re.search(r'^model_checkpoint_path: "(.*)"', state.read_text(errors="replace"), re.MULTILINE)
    newest = Path(named[1]).name if named else ""
    if newest not in names:
        raise InputError(f"{state} names {newest!r}, which is not there; give one of {', '.join(map(str, prefixes))}")
    return path / newest


def _read_settings(where: Path) -> JsonObject:
    if not where.is_file():
        raise InputError(
            f"{where} does not exist; copy the {_CONFIG_NAME} and {_VOCAB_NAME} that the model was trained with there"
        )
    settings = files.read_json(where)
    ours = settings.get(_OURS, {}) if isinstance(settings, dict) else None
    if not isinstance(ours, dict) or not isinstance(ours.get("labels", []), list):
        raise InputError(f"{where} does not hold the settings of a BERT; copy the one that the model was trained with")
    return settings


def _model_config(settings: JsonObject, where: Path) -> tuple[ModelConfig, list[str]]:
    """Returns the model that a configuration of Google's describes, and lines that the user should see.

    Raises: InputError, with the name of the setting, if it is not a BERT as it is computed here.
    """
    values: JsonObject = {"type_vocab_size": _USUAL_TYPES}
    values |= {name: settings[theirs] for name, theirs in _SETTINGS.items() if theirs in settings}
    if values.get("vocab_size") is None:
        raise InputError(f"{where} has no vocab_size; it is no {_CONFIG_NAME} of a BERT")
    given, ours, notes = settings.get("hidden_act", "gelu"), settings.get(_OURS, {}), []
    if not isinstance(given, str) or given.lower() != "gelu":
        raise InputError(f"{where}: hidden_act is {shown(given)}, which this BERT cannot compute; it can with gelu")
    if "activation" not in ours:
        notes.append(
            f"{where.name}: gelu is the tanh form, as in Google's code since 2019-02-07; of a model trained with older"
            ' code, which has erf, add "bert_jax": {"activation": "gelu_exact"} to the file'
        )
    values["activation"] = ours.get("activation", "gelu_tanh")
    if "layer_norm_epsilon" in ours:
        values["layer_norm_epsilon"] = ours["layer_norm_epsilon"]
    known = {*_SETTINGS.values(), "hidden_act", _OURS}
    unknown = [key for key in settings if key not in known and not re.fullmatch(_IDLE, key)]
    if unknown:
        notes.append(f"{where.name}: {', '.join(unknown)} is nothing that Google's BERT reads, and is not used")
    try:
        config = from_dict(ModelConfig, values, "model")
        config.validate()
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return config, notes


def _load_tokenizer(directory: Path) -> tuple[Tokenizer, list[str]]:
    """Returns the tokenizer of a directory, and lines that the user should see."""
    if not (directory / _VOCAB_NAME).is_file():
        raise InputError(f"{directory} has no {_VOCAB_NAME}; copy the one that the model was trained with there")
    if (directory / "tokenizer_config.json").exists():
        return load_tokenizer(directory), []
    name = directory.resolve().name
    named = True if _LOWER.search(name) else False if _CASED.search(name) else None
    tokenizer = load_tokenizer(directory / _VOCAB_NAME, lowercase=named)
    reason = f"as {name} says by its name" if named is not None else "to judge by the capitals of its vocabulary"
    casing = "lower-cased" if tokenizer.lowercase else "not lower-cased"
    return tokenizer, [f"text is {casing}, {reason}; a tokenizer_config.json with do_lower_case can say otherwise"]
