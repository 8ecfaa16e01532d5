# SPDX-License-Identifier: Apache-2.0
"""What a run chooses where its settings say "auto": the type of products, the attention and who updates what by its
devices, the rest by the memory that they have.

A run keeps what it chose. When it is resumed, on other devices too, it reads its choices from its work directory.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from jax.sharding import Mesh

from bert_jax.batch import RowShape
from bert_jax.devices.chips import multiplies_faster_in_bfloat16
from bert_jax.devices.job import this_job
from bert_jax.devices.sharding import is_data_alone
from bert_jax.errors import without_secrets
from bert_jax.settings.finetuning import FinetuneConfig
from bert_jax.settings.model import MOST_UNROLLED, ModelConfig
from bert_jax.settings.pretraining import PretrainConfig
from bert_jax.settings.rules import to_dict
from bert_jax.storage.places import Place, check_workdir_place
from bert_jax.training.memory import activation_bytes, estimate_memory, logit_bytes
from bert_jax.training.step import TrainState
from bert_jax.training.workdir import common, read_identity

Config = TypeVar("Config", PretrainConfig, FinetuneConfig)

# Of the memory of a device, what a step may take by arithmetic, which is up to 9 % off (docs/planner.md).
_USABLE = 0.9
_REMATS = ("none", "dots", "full")  # the first computes nothing again
# Of a TPU's VMEM, what the hidden states of a microbatch may take (docs/planner.md).
OF_VMEM = 1 / 16
# section and name of the settings that may be left open, and what they say then
_OPEN = (
    ("model", "compute_dtype", "auto"),
    ("model", "attention", "auto"),
    ("model", "remat", "auto"),
    ("train", "accumulate", 0),
    ("train", "zero1", "auto"),  # which fine-tuning does not have
)


class Batches(NamedTuple):
    """The batches of a phase: rows of the global one, microbatches or 0 for open, and the sizes of a row."""

    size: int
    accumulate: int
    row: RowShape


def as_begun(config: Config, workdir: Place) -> Config:
    """Returns the settings with what the run of the work directory chose when it began, if there is one.

    With several processes the first one reads, since others may see the directory late.

    Raises: InputError, on every process, if the directory cannot hold a run, or belongs to another kind of run, or if
      the processes have other settings.
    """
    # so that all of them ask for the same
    this_job().check_same(common(workdir, {"run": without_secrets(to_dict(config))}))
    check_workdir_place(workdir)

    def read() -> dict[str, Any]:
        if not (workdir / "config.json").exists():
            return {}
        return read_identity(workdir, type(config))["run"]

    before = this_job().first_does(f"read {workdir / 'config.json'}", read)
    for section, name, is_open in _OPEN:
        values = getattr(config, section)
        if getattr(values, name, None) == is_open and name in before.get(section, {}):
            values = dataclasses.replace(values, **{name: before[section][name]})
            config = dataclasses.replace(config, **{section: values})
    return config


def choose_precision(config: Config, device: Any) -> Config:
    """Returns the settings with the type of products and the attention that are fast on a device, where they are open.

    Matrices are multiplied in bfloat16 by TPUs, and by GPUs that have units for it. On CPUs it stays float32: there a
    step in bfloat16 is not faster in general, and its results would be of one make of CPU.
    """
    is_fast = multiplies_faster_in_bfloat16(device)
    model = config.model
    if model.compute_dtype == "auto":
        dtype = "bfloat16" if is_fast and model.matmul_precision != "highest" else "float32"
        model = dataclasses.replace(model, compute_dtype=dtype)
        if isinstance(model, ModelConfig):
            model = model.computing_in(dtype)
    if model.attention == "auto":
        # The kernels read all rows alike.
        two_kinds = isinstance(config, PretrainConfig) and config.masking.causal_rate > 0
        attention = "fused" if is_fast and not two_kinds else "plain"
        model = dataclasses.replace(model, attention=attention)
    return dataclasses.replace(config, model=model)


def choose_update(config: PretrainConfig, mesh: Mesh) -> PretrainConfig:
    """Returns the settings with `train.zero1` on where it is open and several accelerators are all along "data".

    Each of them then updates a part of the parameters in place of all. TPUs do so where layers are a loop: libtpu makes
    whole sums of gradients all the same and cuts them afterwards, so that more is sent than without. A large model wins
    more by what it no longer reads and writes, BERT-Base does not (docs/planner.md). On CPUs nobody measured a gain.
    """
    if config.train.zero1 != "auto":
        return config
    platform = mesh.devices.flat[0].platform
    is_loop = config.model.num_layers > MOST_UNROLLED["tpu"]
    gains = is_loop if platform == "tpu" else platform != "cpu"
    divides = gains and is_data_alone(mesh.shape)
    train = dataclasses.replace(config.train, zero1="on" if divides else "off")
    return dataclasses.replace(config, train=train)


def choose_memory(
    model: ModelConfig,
    batches: Sequence[Batches],
    mesh_shape: Mapping[str, int],
    make_state: Callable[[], TrainState],
    limit: float,
    vmem: int = 0,
) -> tuple[str, list[int]]:
    """Returns `model.remat` and the microbatches of each phase: those that compute least again and fit `limit` bytes.

    By arithmetic (`estimate_memory`), of the shapes that `make_state` returns. To compute nothing again comes before
    fewer microbatches. If nothing fits, everything is computed again, for one row at once.

    `vmem` is that of `fewest_small`.
    """
    remats = _REMATS if model.remat == "auto" else (model.remat,)
    # Rows that take little would not make room for the rest; this spares a small run the shapes of its state.
    asked = dataclasses.replace(model, remat=remats[0])
    if all(_bytes_of_rows(asked, phase, mesh_shape) < limit / 16 for phase in batches):
        return remats[0], [max(1, phase.accumulate) for phase in batches]
    state = make_state()

    def wanted(remat: str, phase: Batches) -> int:
        asked = dataclasses.replace(model, remat=remat)
        fitting = []
        for count in _counts(phase, mesh_shape):
            kinds = estimate_memory(asked, phase.size, count, state, mesh_shape, phase.row)
            if kinds["total"] < limit * _USABLE:
                fitting.append(count)
        tokens = _rows(phase, mesh_shape) * phase.row.length
        return fewest_small(fitting, tokens, model.hidden_size, vmem) if fitting else 0

    for remat in remats:
        counts = [wanted(remat, phase) for phase in batches]
        if all(counts):
            return remat, counts
    return remats[-1], [_counts(phase, mesh_shape)[-1] for phase in batches]


def fewest_small(counts: Sequence[int], tokens: int, hidden_size: int, vmem: int) -> int:
    """Returns how many microbatches the `tokens` of a device are divided into, one of `counts`, which ascend.

    The fewest; with `vmem`, the bytes that a TPU has beside its units, the fewest whose hidden states in bfloat16 take
    a small part of it, or the most. libtpu then keeps more of what a layer makes there, and moves less through HBM.
    """
    if not vmem:
        return counts[0]
    small = [count for count in counts if tokens // count * hidden_size * 2 <= vmem * OF_VMEM]
    return small[0] if small else counts[-1]


def _rows(phase: Batches, mesh_shape: Mapping[str, int]) -> int:
    """Returns the rows of a batch that a device has."""
    return max(1, phase.size // (mesh_shape["data"] * mesh_shape["fsdp"]))


def _bytes_of_rows(model: ModelConfig, phase: Batches, mesh_shape: Mapping[str, int]) -> int:
    """Returns the bytes of a device that a whole batch takes, without microbatches."""
    tensor = mesh_shape["tensor"]
    logits = logit_bytes(model, phase.row.predictions, tensor)
    return _rows(phase, mesh_shape) * (activation_bytes(model, phase.row.length, tensor) + logits)


def _counts(phase: Batches, mesh_shape: Mapping[str, int]) -> list[int]:
    """Returns how many microbatches a batch may have, the fewest first."""
    if phase.accumulate:
        return [phase.accumulate]
    rows = _rows(phase, mesh_shape)
    return [count for count in range(1, rows + 1) if rows % count == 0]


def memory_of(mesh: Mesh) -> int:
    """Returns the bytes that a device of the mesh has for a program; devices of a CPU share the machine's memory."""
    local = mesh.local_devices
    figures = (local[0].memory_stats() if local else None) or {}
    shared = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(1, len(local))
    # of the first process, since all must choose alike
    return this_job().broadcast_int("memory of a device", figures.get("bytes_limit", shared))


def describe_choices(config: PretrainConfig | FinetuneConfig) -> str:
    """Returns a line with what a run computes with, as the settings that say so."""
    model = config.model
    line = (
        f"computes with model.compute_dtype={model.compute_dtype} model.attention={model.attention} "
        f"model.remat={model.remat} train.accumulate={config.train.accumulate}"
    )
    divides = isinstance(config, PretrainConfig) and config.train.divides_state
    return f"{line} train.zero1=on" if divides else line
