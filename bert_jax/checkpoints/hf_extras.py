# SPDX-License-Identifier: Apache-2.0
"""Other files in a Hugging Face directory, beside a model or in its place: reported by what they are, with the fix."""

import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from bert_jax.errors import InputError, shown
from bert_jax.storage.files import read_object

MODULES, ADAPTER = "modules.json", "adapter_config.json"
EXTRAS = [MODULES, "*sentence*.json", "[1-9]_*/*", ADAPTER]  # of the hub
_HEAD_OF_SETFIT = "model_head.pkl"
# What a trainer puts before the names of a model's tensors: PyTorch Lightning, torch's DataParallel and compile,
# sentence-transformers.
_PREFIXES = ("model.", "module.", "_orig_mod.", "0.auto_model.")
_OF_PEFT = "base_model.model."


def check_whole(directory: Path) -> None:
    """Raises: InputError if a directory has an adapter or a variant of a model, or the model in a folder of its own."""
    whole = any(re.fullmatch(r"(pytorch_)?model[^.]*\.(safetensors|bin)", path.name) for path in directory.glob("*"))
    if (directory / ADAPTER).exists() and not whole:
        base = read_object(directory / ADAPTER).get("base_model_name_or_path")
        raise InputError(
            f"{directory} is an adapter of PEFT, which changes the model {shown(base)}; merge them, in Python "
            "AutoPeftModel.from_pretrained(DIR).merge_and_unload().save_pretrained(OTHER), and give OTHER"
        )
    variants = sorted(path.name for path in directory.glob("*model.*.*") if path.suffix in (".safetensors", ".bin"))
    if variants and not whole:
        kind = variants[0].split(".")[1].partition("-")[0]
        raise InputError(
            f"{directory} has {variants[0]}, the variant {kind} of a model, and no model.safetensors; rename it so if "
            "it is a single file, or get the model without a variant"
        )
    if (inner := directory / "0_Transformer").is_dir() and not whole:
        raise InputError(f"{directory} is of sentence-transformers, with the model in a folder; give {inner}")
    modules = directory / MODULES
    text = modules.read_text("utf-8", "replace") if modules.exists() else ""
    kinds = re.findall(r'"type": *"(?:[^"]*\.)?(\w+)"', text)
    if kinds and kinds[0] != "Transformer":
        raise InputError(f"{modules} has the module {kinds[0]}, which cannot be computed here; a Transformer can")


def find_prefix(names: Collection[str], is_known: Callable[[Iterable[str]], bool], where: Path) -> str:
    """Returns what a trainer put before every name; "" if nothing. `is_known` tells a model's names without it.

    Raises: InputError if the tensors are those of a model that PEFT has changed.
    """
    if names and all(name.startswith(_OF_PEFT) for name in names):
        raise InputError(
            f"{where}: the names of its tensors begin with {_OF_PEFT!r}, as PEFT writes them; save the model after "
            "merge_and_unload(), or remove it"
        )
    before = ""
    while names and not is_known(name.removeprefix(before) for name in names):
        prefix = next((each for each in _PREFIXES if all(name.startswith(before + each) for name in names)), None)
        if prefix is None:
            return ""
        before += prefix
    return before


def find_extras(directory: Path) -> list[str]:
    """Returns notes about files that are not used here: an adapter, and the classifier of SetFit."""
    notes = []
    if (directory / ADAPTER).exists():
        notes.append(f"{directory / ADAPTER}: an adapter of PEFT lies beside the model, and is not applied")
    if (directory / _HEAD_OF_SETFIT).exists():
        notes.append(
            f"{directory / _HEAD_OF_SETFIT}: a classifier of SetFit lies beside the model, and is not read, since a "
            "pickle could run any code: only the encoder is there; fine-tune a classifier on the same examples"
        )
    return notes
