# SPDX-License-Identifier: Apache-2.0
"""Other files in a Hugging Face directory, beside a model or in its place: reported by what they are, with the fix."""

import re
from collections.abc import Iterable
from pathlib import Path

from bert_jax.errors import InputError, shown
from bert_jax.storage.files import read_object

MODULES, ADAPTER = "modules.json", "adapter_config.json"
EXTRAS = [MODULES, "*sentence*.json", "[1-9]_*/*", ADAPTER]  # of the hub
_PREFIXES = {
    "module.": "torch's DataParallel writes them; save model.module",
    "_orig_mod.": "torch.compile writes them; save model._orig_mod",
    "model.": "PyTorch Lightning writes them; save the model in it with model.save_pretrained",
    "0.auto_model.": "sentence-transformers writes them; save model[0].auto_model",
    "base_model.model.": "PEFT writes them; save the model after merge_and_unload()",
}


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


def check_prefix(names: Iterable[str], where: Path) -> None:
    """Raises: InputError if every tensor has the name that another program put before it."""
    names = list(names)
    for prefix, reason in _PREFIXES.items():
        if names and all(name.startswith(prefix) for name in names):
            raise InputError(f"{where}: the names of its tensors begin with {prefix!r}, as {reason}, or remove it")


def find_extras(directory: Path) -> list[str]:
    """Returns notes about files that are not used here: an adapter."""
    note = f"{directory / ADAPTER}: an adapter of PEFT lies beside the model, and is not applied"
    return [note] if (directory / ADAPTER).exists() else []
