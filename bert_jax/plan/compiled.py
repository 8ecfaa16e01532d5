# SPDX-License-Identifier: Apache-2.0
"""Compiled training steps in files: the planner writes them, and a run starts from them without compiling.

A file is one line of JSON and then the executable. The line tells for which devices, versions and settings it was
compiled, and the sha256 of the program before compilation. A run lowers its own step, which takes seconds where
compilation takes minutes, and uses the executable only if the program is the same.

The executable is machine code in a pickle: who can change the file can run code on the machine that reads it. The
checksum finds damage, not malice.
"""

import hashlib
import json
import os
import pickle
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from bert_jax.batch import Batch
from bert_jax.checkpoints.arrays import describe
from bert_jax.data.pipeline import rows_to_batch
from bert_jax.data.records import Dataset
from bert_jax.devices.sharding import row_sharding
from bert_jax.errors import InputError, shown
from bert_jax.settings.phases import Phase
from bert_jax.settings.rules import changed_keys, to_dict
from bert_jax.storage.files import JsonObject
from bert_jax.storage.urls import local_copy
from bert_jax.storage.writing import atomic_path
from bert_jax.training.inputs import Part
from bert_jax.training.step import TrainState, TrainStep

MAGIC = "bert_jax compiled step 1"
_MOST_ABOUT = 2**24  # bytes of the first line
_MUST_AGREE = ("devices", "versions")  # the rest may differ where it does not change the program


def load_compiled(path: str, parts: Sequence[Part], abstract: TrainState, mesh: Mesh) -> dict[int, TrainStep]:
    """Returns the step of a file by the number of its phase; {} if `path` is "".

    Raises: InputError if the file cannot be used for this run.
    """
    if not path:
        return {}
    found = read_step(path)
    number = min(int(found[0].get("phase", 1)), len(parts))
    lowered, about = lower_phase(parts[number - 1], abstract, mesh)
    return {number: load_step(path, about, lowered, mesh, found)}


def lower_phase(part: Part, abstract: TrainState, mesh: Mesh) -> tuple[jax.stages.Lowered, dict]:
    """Returns the training step of a phase, not yet compiled, and what it depends on."""
    batch = abstract_batch_of(part.dataset, part.phase.config.data.batch_size, mesh)
    with jax.set_mesh(mesh):
        lowered = part.make_step(abstract, mesh).lower(abstract, batch)
    return lowered, describe_step(part.phase, mesh, abstract, batch, lowered)


def abstract_batch_of(dataset: Dataset, batch_size: int, mesh: Mesh) -> Batch:
    """Returns the shapes, dtypes and shardings of the global batches of a data set."""
    one = rows_to_batch(dataset.train.gather(np.zeros(1, np.int64)), np.zeros(1, np.int32))
    sharding = row_sharding(mesh)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((batch_size, *leaf.shape[1:]), leaf.dtype, sharding=sharding), one
    )


def describe_step(phase: Phase, mesh: Mesh, state: TrainState, batch: Batch, lowered: jax.stages.Lowered) -> dict:
    """Returns what a compiled step depends on, as JSON."""
    device = mesh.devices.flat[0]
    settings = to_dict(phase.config)
    batch_size = settings["data"]["batch_size"]
    settings = {name: settings[name] for name in ("model", "masking", "optimizer", "train")}
    for name in ("hang_seconds", "steps_per_call", "compiled"):
        settings["train"].pop(name)
    return {
        "phase": phase.number,
        "devices": {
            "platform": device.platform,
            "kind": device.device_kind,
            "mesh": dict(mesh.shape),
            **({"cpu": _cpu()} if device.platform == "cpu" else {}),
        },
        "versions": {"jax": jax.__version__, "jaxlib": metadata.version("jaxlib")},
        "settings": settings | {"data": {"batch_size": batch_size}},
        "state": describe(state),
        "batch": describe(batch),
        "program": hashlib.sha256(lowered.as_text().encode()).hexdigest(),
    }


def _cpu() -> str:
    """Returns the kind of this machine's processor: code for one may have instructions that another lacks."""
    flags = ""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass  # not Linux
    return f"{platform.machine()}, features {hashlib.sha256(flags.encode()).hexdigest()[:12]}"


def write_step(path: str | os.PathLike, compiled: jax.stages.Compiled, about: Mapping[str, object]) -> int:
    """Writes a compiled step, and returns the size of the file in bytes. `about` is as `describe_step` returns it.

    Raises: InputError if this compiler's programs cannot be written.
    """
    try:
        executable, _, _ = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"the compiled step cannot be written ({reason}); leave out --output") from None
    first = {"format": MAGIC, **about, "bytes": len(executable), "sha256": hashlib.sha256(executable).hexdigest()}
    data = json.dumps(first, sort_keys=True).encode() + b"\n" + executable
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)
    return len(data)


def read_step(path: str | os.PathLike) -> tuple[JsonObject, bytes]:
    """Returns what a file, which may be a URL, says of its step, and the executable.

    Raises: InputError if the file is missing, damaged or of another kind.
    """
    try:
        with open(local_copy(os.fspath(path)), "rb") as file:
            line, executable = file.readline(_MOST_ABOUT), file.read()
    except OSError as error:
        raise InputError(f"train.compiled={path} cannot be read: {error.strerror or error}") from None
    try:
        about = json.loads(line)
        known = about["format"] == MAGIC
    except (ValueError, TypeError, KeyError, RecursionError):
        known, about = False, {}
    if not known:
        raise InputError(f"train.compiled={path} is not a compiled step of this version; write one: plan --output=FILE")
    if about.get("bytes") != len(executable) or about.get("sha256") != hashlib.sha256(executable).hexdigest():
        raise InputError(
            f"train.compiled={path} is damaged: it has {len(executable)} of {shown(about.get('bytes'))} bytes, or "
            "another sha256; copy it again"
        )
    return about, executable


def load_step(
    path: str | os.PathLike,
    about: Mapping[str, object],
    lowered: jax.stages.Lowered,
    mesh: Mesh,
    found: tuple[JsonObject, bytes],
) -> TrainStep:
    """Returns the compiled step of a file, as `read_step` has found it, for a run of which `about` is true.

    Raises: InputError, naming the first difference, if it was compiled for other devices, versions or programs.
    """
    theirs, executable = found
    parts = {name: (theirs.get(name), about[name]) for name in about if name != "program"}
    # JSON has made lists of tuples.
    differ = [changed_keys({name: json.loads(json.dumps(old))}, {name: json.loads(json.dumps(new))})
              for name, (old, new) in parts.items()]  # fmt: skip
    names = [name for each in differ for name in each]
    fatal = [name for name in names if name.split(".")[0] in _MUST_AGREE]
    if theirs.get("program") != about["program"]:
        fatal = fatal or names or ["the program, by other code or XLA settings"]
    if fatal:
        name = fatal[0]
        old, new = (shown(_at(each, name)) for each in (theirs, about))
        more = f", and {len(fatal) - 1} more" if len(fatal) > 1 else ""
        values = f": {name} is {old} there and {new} here{more}" if "." in name or name == "phase" else f": {name}"
        raise InputError(f"train.compiled={path} does not fit this run{values}; write it again by plan --output=FILE, "
                         "or leave out --config.train.compiled")  # fmt: skip
    devices = list(mesh.devices.flat)
    local = [device for device in devices if device.process_index == jax.process_index()]
    try:
        return serialize_executable.deserialize_and_load(
            executable, lowered.in_tree, lowered.out_tree, backend=local[0].client, execution_devices=devices
        )
    except (ValueError, TypeError, pickle.UnpicklingError, jax.errors.JaxRuntimeError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InputError(
            f"train.compiled={path} cannot be loaded here ({reason}); leave out --config.train.compiled"
        ) from None


def _at(values: object, name: str) -> object:
    """Returns the value of a dotted name, None if there is none."""
    for key in name.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values
