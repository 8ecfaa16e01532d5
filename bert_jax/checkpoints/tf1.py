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
from bert_jax.storage.folder import Folder
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tokenizing import read_tokenizer, read_vocabulary

_CONFIG_NAME = "bert_config.json"
_VOCAB_NAME = "vocab.txt"
_STATE_NAME = "checkpoint"
# the key for settings that Google's format lacks; versions up to 0.3 wrote such directories
_OURS = "bert_jax"

# Ours -> Google's names, which transformers took over. Missing settings are as in `ModelConfig`, but for types.
_SETTINGS = {ours: theirs for ours, theirs in SETTINGS.items() if ours != "layer_norm_epsilon"}
_USUAL_TYPES = 16
# In Google's files, and read by nobody.
_IDLE = r"directionality|pooler_(fc_size|num_attention_heads|num_fc_layers|size_per_head|type)"
_LOWER = re.compile(r"uncased|(chinese|multilingual)_L-\d")
_CASED = re.compile("cased")


def load_tf1(folder: Folder, checkpoint: str = "") -> Imported:
    """Returns the BERT of a directory of Google's, or of one of its checkpoints: "bert_model.ckpt", "model.ckpt-20".

    Of several checkpoints in a directory, the one named in its file `checkpoint` is taken. Whether text is lower-cased
    is decided by tokenizer_config.json, or else by a directory called cased, uncased, chinese_L-... or
    multilingual_L-... as Google's are, or else by whether the vocabulary holds capital letters.

    Raises: InputError if a file is missing or damaged, or if the model is not one that can be computed here.
    """
    prefix = folder / (checkpoint or find_checkpoint(folder))
    where = folder / _CONFIG_NAME
    with files.reading(str(where)):
        settings = folder.json(_CONFIG_NAME)
        config, notes = _model_config(settings, where)
    tokenizer, casing = _load_tokenizer(folder)
    check_vocabulary(tokenizer, config.vocab_size, where)
    # in a clone it may be a pointer of Git LFS
    folder.large(index_path(prefix).name)
    bundle = Bundle(prefix)
    shapes = {name: entry.shape for name, entry in bundle.entries.items()}
    params = to_params(bundle.read, shapes, "tf1", config, index_path(prefix))
    notes += find_not_finite(params, index_path(prefix))
    with files.reading(str(where)):
        ours = settings.get(_OURS, {})
        present = parts_of(params)
        task = head_of(str(ours.get("task", "")), present).name
        labels = tuple(map(str, ours.get("labels", ())))
    if labels and len(labels) != len(params.get("classifier", {}).get("bias", ())):
        raise InputError(
            f"{where}: labels are {len(labels)}, and the classifier has others; remove labels"
        )
    return Imported(config, params, tokenizer, task, labels, (*notes, *casing))


def find_checkpoint(folder: Folder) -> str:
    """Returns the name of the checkpoint in a directory. Raises: InputError if it is not clear which is meant."""
    names = [name.removesuffix(".index") for name in folder.matching("*.index")]
    if len(names) == 1:
        return names[0]
    choice = f"give one of {', '.join(str(folder / name) for name in names)}"
    if _STATE_NAME not in folder:
        raise InputError(f"{folder.path} has {len(names)} checkpoints; {choice}")
    state = folder.read_bytes(_STATE_NAME).decode("utf-8", "replace")
    named = re.search(r'^model_checkpoint_path: "(.*)"', state, re.MULTILINE)
    newest = Path(named[1]).name if named else ""
    if newest not in names:
        raise InputError(f"{folder / _STATE_NAME} names {newest!r}, which is not there; {choice}")
    return newest


def _model_config(settings: JsonObject, where: Path) -> tuple[ModelConfig, list[str]]:
    """Returns the model that a configuration of Google's describes, and lines that the user should see.

    Raises: InputError, with the name of the setting, if it is not a BERT as it is computed here.
    """
    # what Google's code has where the file says nothing
    values: JsonObject = {"type_vocab_size": _USUAL_TYPES}
    values |= {name: settings[theirs] for name, theirs in _SETTINGS.items() if theirs in settings}
    given = settings.get("hidden_act", "gelu")
    ours = settings.get(_OURS, {})
    notes = []
    if not isinstance(given, str) or given.lower() != "gelu":
        raise InputError(f"{where}: hidden_act is {shown(given)}; it can be gelu")
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
        notes.append(
            f"{where.name}: {', '.join(unknown)} is nothing that Google's BERT reads, and is not used"
        )
    config = from_dict(ModelConfig, values, "model")
    config.validate()
    return config, notes


def _load_tokenizer(folder: Folder) -> tuple[Tokenizer, list[str]]:
    """Returns the tokenizer of a directory, and lines that the user should see."""
    if "tokenizer_config.json" in folder:
        return read_tokenizer(folder), []
    name = folder.path.resolve().name
    named = True if _LOWER.search(name) else False if _CASED.search(name) else None
    tokenizer = read_vocabulary(folder / _VOCAB_NAME, lowercase=named)
    reason = (
        f"as {name} says by its name"
        if named is not None
        else "to judge by the capitals of its vocabulary"
    )
    casing = "lower-cased" if tokenizer.lowercase else "not lower-cased"
    return tokenizer, [
        f"text is {casing}, {reason}; a tokenizer_config.json with do_lower_case can say otherwise"
    ]
