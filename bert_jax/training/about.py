# SPDX-License-Identifier: Apache-2.0
"""The record of a run's data, software and devices: about.json, which `checkpoints.model_card` reads."""

import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from bert_jax.storage.files import JsonObject
from bert_jax.version import __version__

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def record_of_run(data_sets: Sequence[tuple[str, Mapping[str, Any]]], devices: str) -> JsonObject:
    """Returns the record of a run: name and manifest of its data sets, its software and devices."""
    data = []
    for name, manifest in data_sets:
        splits = {
            split: {key: value for key, value in values.items() if key != "shards"}
            for split, values in manifest.get("splits", {}).items()
        }
        identity = manifest.get("identity", {})
        data.append(
            {
                "name": name,
                "inputs": manifest.get("inputs", {}),
                "input": identity.get("input", ""),
                "options": identity.get("options", {}),
                "row": manifest.get("row", {}),
                "splits": splits,
                "vocab_size": manifest.get("tokenizer", {}).get("vocab_size", 0),
            }
        )
    software = {"python": platform.python_version(), "bert_jax": __version__}
    for package in _PACKAGES:
        try:
            software[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"data": data, "software": software, "devices": devices}
