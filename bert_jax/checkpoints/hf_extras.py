# SPDX-License-Identifier: Apache-2.0
"""What stands in a directory of Hugging Face's beside a model, or in its place: named for what it is, with the fix."""

import re
from collections.abc import Iterable
from pathlib import Path

from bert_jax.errors import InputError, shown
from bert_jax.storage.files import JsonObject, read_json

EXTRAS = ["modules.json", "sentence_bert_config.json", "*_Pooling/config.json", "adapter_config.json"]
ADAPTER, _MODULES = "adapter_config.json", "modules.json"
_PREFIXES = {
    "module.": "torch's DataParallel writes them; save model.module",
    "_orig_mod.": "torch.compile writes them; save model._orig_mod",
    "model.": "PyTorch Lightning writes them; save the model in it with model.save_pretrained",
    "0.auto_model.": "sentence-transformers writes them; save model[0].auto_model",
    "base_model.model.": "PEFT writes them; save the model after merge_and_unload()",
}


def check_whole(directory: Path) -> None:
    """Raises: InputError if a directory has an adapter or a variant of a model, or the model in a folder of its own."""
    whole = [
        path.name
        for path in directory.glob("*")
        if re.fullmatch(r"(pytorch_)?model[^.]*\.(safetensors|bin)", path.name)
    ]
    if (directory / ADAPTER).exists() and not whole:
        base = _object(directory / ADAPTER).get("base_model_name_or_path")
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


def check_prefix(names: Iterable[str], where: Path) -> None:
    """Raises: InputError if every tensor has the name that another program put before it."""
    names = list(names)
    for prefix, reason in _PREFIXES.items():
        if names and all(name.startswith(prefix) for name in names):
            raise InputError(f"{where}: the names of its tensors begin with {prefix!r}, as {reason}, or remove it")


def find_extras(directory: Path) -> list[str]:
    """Returns lines about what is not computed here: the modules of sentence-transformers, an adapter."""
    notes = []
    if (directory / ADAPTER).exists():
        notes.append(f"{directory / ADAPTER}: an adapter of PEFT lies beside the model, and is not applied")
    home = directory.parent if re.fullmatch(r"\d+_Transformer", directory.name) else directory
    if not (home / _MODULES).exists():
        return notes
    modules = read_json(home / _MODULES)
    found = [each for each in modules if isinstance(each, dict)] if isinstance(modules, list) else []
    kinds = [str(each.get("type")).rpartition(".")[2] for each in found]
    paths = [str(each.get("path")) for each, kind in zip(found, kinds) if kind == "Pooling"]
    pooling = _pooling(home / paths[0] / "config.json") if paths else "unknown"
    others = [kind for kind in kinds if kind not in ("Transformer", "Pooling")]
    limits = [_object(each / "sentence_bert_config.json").get("max_seq_length") for each in (home, directory)]
    length = next((limit for limit in limits if limit), None)
    use = f"pooling={pooling!r}" + (f", max_seq_length={shown(length)}" if length else "")
    return [
        *notes,
        f"{home / _MODULES}: sentence-transformers pools the vectors of this model; sentence_embeddings({use}) does so "
        f"here{f', without its {shown(others)}' if others else ''}, and what is written here does not keep it",
    ]


def _pooling(path: Path) -> str:
    """Returns how vectors are pooled, as `sentence_embeddings` calls it where it can do it."""
    about = _object(path)
    modes = [name for name, chosen in about.items() if name.startswith("pooling_mode") and chosen is True]
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    return ", ".join(known.get(mode) or mode for mode in modes) or str(about.get("pooling_mode", "unknown"))


def _object(path: Path) -> JsonObject:
    """Returns the object in a JSON file, {} if there is none."""
    content = read_json(path) if path.exists() else {}
    return content if isinstance(content, dict) else {}
