# SPDX-License-Identifier: Apache-2.0
"""Other files in a Hugging Face directory, beside a model or in its place: reported by what they are, with the fix."""

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable

from bert_jax.errors import InputError, shown
from bert_jax.storage.folder import Folder

MODULES = "modules.json"
ADAPTER = "adapter_config.json"
_WORDS = "idf.json"
# of the hub; those of a Router have folders of their own, and a table of words may be a file
EXTRAS = [MODULES, "*sentence*.json", "[1-9]_*/*", ADAPTER, "artifact.metadata"]
EXTRAS += ["router_config.json", "query_*/*", "document_*/*", _WORDS]
_HEAD_OF_SETFIT = "model_head.pkl"
# What a trainer puts before the names of a model's tensors: PyTorch Lightning, torch's DataParallel and compile,
# sentence-transformers.
_PREFIXES = ("model.", "module.", "_orig_mod.", "0.auto_model.")


def check_whole(folder: Folder) -> None:
    """Raises: InputError if a directory has an adapter or a variant of a model, or the model in a folder of its own."""
    tensors = [
        name for name in folder.matching("*model*.*") if name.endswith((".safetensors", ".bin"))
    ]
    whole = any(re.fullmatch(r"(pytorch_)?model[^.]*\.\w+", name) for name in tensors)
    if ADAPTER in folder and not whole:
        base = folder.object(ADAPTER).get("base_model_name_or_path")
        fix = "AutoPeftModel.from_pretrained(DIR).merge_and_unload().save_pretrained(OTHER)"
        raise InputError(
            f"{folder.path} is a PEFT adapter of the model {shown(base)}; merge them, in Python {fix}"
        )
    variants = fnmatch.filter(tensors, "*model.*.*")
    if variants and not whole:
        raise InputError(
            f"{folder.path} has {variants[0]}, a variant, and no model.safetensors; rename it so"
        )
    if "0_Transformer" in folder.names and not whole:
        inner = folder / "0_Transformer"
        raise InputError(
            f"{folder.path} is of sentence-transformers, with the model in a folder; give {inner}"
        )


def find_prefix(names: Collection[str], is_known: Callable[[Iterable[str]], bool]) -> str:
    """Returns what a trainer put before every name; "" if nothing. `is_known` tells a model's names without it."""
    before = ""
    # One inside of another, as of a compiled model that was trained in parallel.
    while names and not is_known(name.removeprefix(before) for name in names):
        prefix = next(
            (each for each in _PREFIXES if all(name.startswith(before + each) for name in names)),
            None,
        )
        if prefix is None:
            return ""
        before += prefix
    return before


def find_extras(folder: Folder) -> list[str]:
    """Returns notes about files that are not used: an adapter, SetFit's classifier, BGE-M3's heads, words' weights."""
    notes = []
    if ADAPTER in folder:
        notes.append(
            f"{folder / ADAPTER}: an adapter of PEFT lies beside the model, and is not applied"
        )
    if _HEAD_OF_SETFIT in folder:
        notes.append(
            f"{folder / _HEAD_OF_SETFIT}: a classifier of SetFit lies beside the model, and is not read, since a "
            "pickle could run any code: only the encoder is there; fine-tune a classifier on the same examples"
        )
    if heads := folder.matching("*_linear.pt"):
        notes.append(
            f"{folder.path}: {' and '.join(heads)}, as BGE-M3 has them for weights of words and a vector of each "
            "token, are not read: the model gives a vector of each text"
        )
    if _WORDS in folder and MODULES not in folder:
        notes.append(
            f"{folder / _WORDS}: weights of words in queries, as OpenSearch's models have them, are not read without "
            f"{MODULES}: queries go through the model"
        )
    return notes
