# SPDX-License-Identifier: Apache-2.0
"""Plans: memory, collectives, FLOPs and time of a training step on a pod, computed without the pod.

The compiler of the device compiles the real training step, libtpu for TPUs and XLA for GPUs, and neither needs such a
device: memory, collectives and FLOPs are the compiler's. For GPUs they are arithmetic where the compiler is not
installed, and for time on any device. Every figure says which of the two it is.
"""

import dataclasses
import functools
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from bert_jax.batch import Batch, RowShape
from bert_jax.data.pipeline import abstract_batch
from bert_jax.data.records import row_dtype
from bert_jax.devices.chips import GPUS, TPUS, Chip, peak_flops
from bert_jax.devices.sharding import check_divisible, make_mesh, mesh_sizes, row_sharding
from bert_jax.errors import InputError
from bert_jax.model.objective import Objective, pretraining_objective
from bert_jax.plan import hlo
from bert_jax.plan.gpus import OPTIONS, compiler_version, gpu_devices
from bert_jax.plan.hbm import moved_bytes
from bert_jax.plan.roofline import Traffic, assumptions, expected_traffic, model_flops, step_seconds
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import DataConfig, ResolvedConfig, TeacherConfig, TrainConfig
from bert_jax.settings.rules import suggest
from bert_jax.training.memory import estimate_memory, gathered_bytes, memory_problem, shard_bytes
from bert_jax.training.program import Program
from bert_jax.training.step import TrainState, abstract_state

USABLE_OF_GPU = 0.92  # of its memory, for the program's arrays; the rest is the runtime's and the libraries'

TOPOLOGIES = (
    *("v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16"),
    *("v6e:2x2", "v6e:2x4", "v6e:4x4", "v6e:4x8", "v6e:8x8", "v6e:8x16", "v6e:16x16"),
    *("v4:2x2x1", "v4:2x2x4", "v4:4x4x4", "v4:4x4x8", "v4:4x8x8"),
    *("v5p:2x2x1", "v5p:2x2x4", "v5p:4x4x4", "v5p:4x4x8", "v5p:4x8x8"),
)


class Work(NamedTuple):
    """The work of a step other than pre-training: its objective, by the model, and a batch of shapes."""

    objective: Callable[[ModelConfig], Objective]
    batch: Batch


Rows = np.dtype | Work  # the record of a row of pre-training data, or other work


@dataclass(frozen=True)
class Plan:
    """The cost of a step. Bytes are per chip, FLOPs per chip and step."""

    topology: str
    device_kind: str
    num_chips: int
    mesh: dict[str, int]
    batch_size: int
    row_length: int
    predictions: int  # places for predictions in a row
    fits: bool
    problem: str  # "" or one line
    hbm_bytes: float
    bytes: dict[str, int]  # by kind, as compiled; of a plan by arithmetic those of `estimate`
    estimate: dict[str, int]
    model_flops: float
    compiled_flops: float  # 0.0 if nothing has been compiled
    moved_bytes: float  # to and from HBM, as compiled; 0.0 if nothing has been compiled
    collectives: tuple[Traffic, ...]
    seconds: dict[str, float]  # of the model of time: products, attention, memory, network, step
    mfu: float
    compile_seconds: float
    source: str  # "libtpu VERSION", "XLA, PACKAGE VERSION" or "arithmetic"
    assumptions: tuple[str, ...] = field(default=())
    flags: tuple[str, ...] = field(default=())  # to add to the command line, of a plan of `search`

    @property
    def rows_per_chip(self) -> int:
        return self.batch_size // (self.mesh["data"] * self.mesh["fsdp"])


def plan(config: ResolvedConfig, topology: str, row: Rows | None = None) -> Plan:
    """Returns the plan of the training step of `config` on a topology such as "v5e:16x16" or "h100:8".

    `row` is the record of a row of the data, None that of `row_of`; or other work, whose rows `config.data` counts.
    `config.model.vocab_size` must be set.

    Raises: InputError if the topology is unknown, libtpu is missing, the model does not divide over the mesh, or there
      is a teacher.
    """
    check_no_teacher(config.teacher)
    row = row_of(config) if row is None else row
    if (row_length := _batch(row).token_ids.shape[1]) > config.model.max_positions:
        raise InputError(
            f"rows of {row_length} are longer than model.max_positions {config.model.max_positions}; plan shorter rows"
        )
    family, _, size = topology.partition(":")
    if family in GPUS:
        num_gpus, version = _gpu_count(topology, size), compiler_version()
        if not version:
            return plan_by_arithmetic(config, topology, num_gpus, row)
        return _plan_by_compiler(config, topology, row, gpu_devices(topology, num_gpus), f"XLA, {version}")
    return _plan_by_compiler(config, topology, row, *tpu_devices(topology, config.mesh.dcn))


def check_no_teacher(teacher: TeacherConfig) -> None:
    """Raises: InputError if there is a teacher."""
    if teacher.checkpoint:
        raise InputError("teacher.checkpoint: plans know no teacher; leave it out, and add its memory to the plan's")


def _plan_by_compiler(config: ResolvedConfig, topology: str, row: Rows, devices: Sequence[Any], version: str) -> Plan:
    """Returns the plan for devices that are there for compiling only; `version` is that of their compiler."""
    mesh = make_mesh(config.mesh, devices)
    setup = _set_up(config, topology, mesh, row)
    lowered = lower_train_step(config, mesh, row)
    started = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=None if setup.chip.is_tpu else OPTIONS)
    except jax.errors.JaxRuntimeError as error:
        needed, available = out_of_memory(str(error))
        seconds = time.perf_counter() - started
        return _finish(config, setup, (), needed, available, compile_seconds=seconds, source=version,
                       hbm_bytes=available, bytes={"temporaries": round(needed)})  # fmt: skip
    seconds = time.perf_counter() - started
    module = hlo.parse(compiled.as_text() or "")
    kinds = compiled_bytes(compiled, setup.state, config, mesh, row)
    # libtpu refuses programs that do not fit; XLA's GPU compiler does not know the free memory.
    available = math.inf if setup.chip.is_tpu else usable_bytes(setup.chip)
    return _finish(
        config, setup, summarize(hlo.collectives(module)), kinds["held at once"] or kinds["total"], available,
        compile_seconds=seconds, source=version, bytes=kinds, compiled_flops=float(hlo.flops(module)),
        moved_bytes=float(moved_bytes(module)),
    )  # fmt: skip


def default_row_length(config: ResolvedConfig) -> int:
    """Returns the multiple of 128 whose tokens the predictions come from: 128 for 20 or 0 of them, 512 for 80."""
    masking = config.masking
    length = 128 * round(masking.max_predictions / max(masking.rate, 0.01) / 128)  # 0 predictions say nothing
    return min(max(length, 128), config.model.max_positions)


def tpu_devices(topology: str, slices: int = 0) -> tuple[Sequence[Any], str]:
    """Returns the chips of `slices` slices of a TPU topology, for compiling only, and the version of libtpu.

    Raises: InputError if libtpu is not installed or does not know the topology.
    """
    family, _, size = topology.partition(":")
    if family in GPUS:
        raise InputError(f"topology {topology!r} is of GPUs; steps are compiled for TPUs, or here, for this machine")
    if family not in TPUS or not re.fullmatch(r"\d+x\d+(x\d+)?", size):
        raise _unknown(topology)
    try:
        import libtpu  # pyright: ignore[reportMissingImports]
        from jax.experimental import topologies
    except ImportError:
        raise InputError(
            "libtpu is not installed, and TPU topologies are planned by its compiler; pip install 'bert_jax[tpu]' "
            "(on Linux, x86; it needs no TPU)"
        ) from None
    # libtpu must not query the metadata server of a TPU host, and two planners may run at once.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options = {"chip_config_name": "megacore"} if TPUS[family].megacore else {}
    name = f"{'v5' if family == 'v5p' else family}:{size}"  # as libtpu calls it
    try:
        pod = topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=slices or 1, **options)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        raise _unknown(topology, f" ({str(error).splitlines()[0][:120]})") from None
    return pod.devices, f"libtpu {getattr(libtpu, '__version__', '')}".strip()


def _unknown(topology: str, reason: str = "") -> InputError:
    known = (*TOPOLOGIES, *(f"{name}:8" for name in sorted(GPUS)))
    return InputError(
        f"topology {topology!r} is unknown{suggest(topology, known)}{reason}; "
        f"TPUs: {', '.join(TOPOLOGIES)}; GPUs: {', '.join(f'{name}:N' for name in sorted(GPUS))}"
    )


def _gpu_count(topology: str, size: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", size):
        raise _unknown(topology)
    return int(size)


def _objective(config: ResolvedConfig, mesh: Mesh | AbstractMesh, row: Rows | None = None) -> Objective:
    """Returns the objective of a run on the devices of the mesh; the ids of special tokens do not affect the plan."""
    model = config.model
    if isinstance(mesh, Mesh):  # they are not this machine's
        unroll = model.layers_at_once(mesh.devices.flat[0].platform)
        model = dataclasses.replace(model, unroll=unroll)
    if isinstance(row, Work):
        return row.objective(model)
    return pretraining_objective(model, config.masking, 103, (101, 102), config.train.next_sentence)


def _state(config: ResolvedConfig, mesh: Mesh | AbstractMesh, row: Rows | None = None) -> TrainState:
    """Returns the shapes and shardings of the training state, traced once for all settings that do not change them."""
    if isinstance(row, Work):
        return abstract_state(_objective(config, mesh, row), config.optimizer, config.train, mesh)
    model = dataclasses.replace(config.model, attention="plain", remat="none", unroll=1, gradient_dtype="float32")
    train = TrainConfig(zero1=config.train.zero1, next_sentence=config.train.next_sentence)
    return _state_of(dataclasses.replace(config, model=model, train=train, data=DataConfig()), mesh)


@functools.lru_cache(maxsize=8)
def _state_of(config: ResolvedConfig, mesh: Mesh | AbstractMesh) -> TrainState:
    return abstract_state(_objective(config, mesh), config.optimizer, config.train, mesh)


def _batch(row: Rows, batch_size: int = 1, mesh: Mesh | None = None) -> Batch:
    """Returns the shapes of a batch, on a mesh with its shardings; other work has a batch of its own."""
    if not isinstance(row, Work):
        return abstract_batch(row, batch_size, mesh)
    sharding = None if mesh is None else row_sharding(mesh)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), row.batch)


def row_of(config: ResolvedConfig, row_length: int = 0) -> np.dtype:
    """Returns the record of a row of one sequence and `row_length` tokens; 0 is `default_row_length`."""
    if row_length and not 8 <= row_length <= 65535:  # as of prepared data
        raise InputError(f"row_length {row_length} is not in 8..65535; 128 and 512 are usual")
    return row_dtype(row_length or default_row_length(config), 1, config.model.vocab_size)


def lower_train_step(config: ResolvedConfig, mesh: Mesh, row: Rows) -> jax.stages.Lowered:
    """Returns the training step that `train.py` would run, traced for the mesh and not yet compiled."""
    objective = _objective(config, mesh, row)
    state = _state(config, mesh, row)
    step = Program(mesh).training(objective, config.optimizer, config.train, state)
    with jax.set_mesh(mesh):
        return step.lower(state, _batch(row, config.data.batch_size, mesh))


def compiled_bytes(
    compiled: jax.stages.Compiled, state: TrainState, config: ResolvedConfig, mesh: Mesh, row: Rows
) -> dict[str, int]:
    """Returns bytes per chip by kind, as compiled, their total, and the peak ("held at once").

    Outputs that alias arguments are not counted. Temporaries may share memory one after the other, so a program can fit
    although the total exceeds the memory of a chip.
    """
    memory: Any = compiled.memory_analysis()
    params, optimizer = shard_bytes(state.params), shard_bytes(state.optimizer)
    kinds = {"params": params, "optimizer": optimizer, "batch": shard_bytes(_batch(row, config.data.batch_size, mesh))}
    kinds["padding of arguments"] = max(0, memory.argument_size_in_bytes - sum(kinds.values()))
    kinds |= {
        "temporaries": memory.temp_size_in_bytes,
        "outputs": max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes),
        "generated code": memory.generated_code_size_in_bytes,
    }
    return kinds | {"total": sum(kinds.values()), "held at once": memory.peak_memory_in_bytes}


def out_of_memory(message: str) -> tuple[float, float]:
    """Returns the needed and the available bytes of HBM from libtpu's error message.

    Raises: InputError with the compiler's first line if it is another error.
    """
    match = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)", message) or re.search(
        r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm", message
    )
    if not match:
        raise InputError(f"the compiler has refused the program: {message.strip().splitlines()[0][:300]}")
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    return float(match[1]) * units[match[2]], float(match[3]) * units[match[4]]


def summarize(found: list[hlo.Collective]) -> tuple[Traffic, ...]:
    """Returns the collectives of a program by kind and dtype, the largest first."""
    counts, sizes = Counter(), Counter()
    for collective in found:
        key = (collective.kind, "+".join(collective.dtypes), collective.group_size)
        counts[key] += collective.count
        sizes[key] += collective.count * collective.bytes
    return tuple(
        Traffic(kind, dtypes, counts[kind, dtypes, group], size, group)
        for (kind, dtypes, group), size in sizes.most_common()
    )


class _Setup(NamedTuple):
    """The parts of a plan that are known before anything is compiled."""

    chip: Chip
    row: RowShape
    state: TrainState
    fields: dict[str, Any]  # of the plan


def _set_up(config: ResolvedConfig, topology: str, mesh: Mesh | AbstractMesh, row: Rows) -> _Setup:
    """Raises: InputError if the model or the batch does not divide over the mesh."""
    check_divisible(mesh, config.model, (config.data.batch_size, config.train.accumulate))
    state = _state(config, mesh, row)
    shape = _objective(config, mesh, row).row_shape(_batch(row))
    chip = (TPUS | GPUS)[topology.partition(":")[0]]
    sizes = dict(mesh.shape)
    fields = {
        "topology": topology,
        "device_kind": chip.device_kind,
        "num_chips": mesh.size,
        "mesh": sizes,
        "batch_size": config.data.batch_size,
        "row_length": shape.length,
        "predictions": shape.predictions,
        "estimate": estimate_memory(config, state, sizes, shape),
        "model_flops": model_flops(config, mesh.size, shape),
        "hbm_bytes": chip.hbm_bytes,
    }
    return _Setup(chip, shape, state, fields)


def _finish(
    config: ResolvedConfig,
    setup: _Setup,
    collectives: tuple[Traffic, ...],
    needed: float,
    available: float,
    **rest: Any,
) -> Plan:
    """Returns the plan of a step: the bytes that it needs and those available, and its model of time."""
    chip, row, _, fields = setup
    problem = "" if needed < available else memory_problem(config, fields["mesh"], needed, available)
    moved = rest.get("moved_bytes", 0.0)
    seconds = step_seconds(config, chip, fields["mesh"], row, collectives, moved)
    peak = peak_flops(chip.device_kind, config.model.compute_dtype)
    uncompiled: dict[str, Any] = {"compiled_flops": 0.0, "moved_bytes": 0.0, "compile_seconds": 0.0}
    return Plan(
        **(uncompiled | fields | rest),
        fits=not problem,
        problem=problem,
        collectives=collectives,
        seconds=seconds,
        mfu=fields["model_flops"] / seconds["step"] / peak,
        assumptions=assumptions(config, chip, moved),
    )


def plan_by_arithmetic(config: ResolvedConfig, topology: str, num_chips: int, row: Rows) -> Plan:
    """Returns the plan by arithmetic alone, as for GPUs where their compiler is not installed.

    Raises: InputError if the model or the batch does not divide over the mesh.
    """
    sizes = mesh_sizes(config.mesh, num_chips)
    setup = _set_up(config, topology, AbstractMesh(tuple(sizes.values()), tuple(sizes)), row)
    estimate = setup.fields["estimate"]
    traffic = expected_traffic(config, sizes, setup.row.length, gathered_bytes(setup.state.params))
    available = usable_bytes(setup.chip)
    return _finish(config, setup, traffic, estimate["total"], available, source="arithmetic", bytes=estimate)


def usable_bytes(chip: Chip) -> float:
    """Returns the bytes of a chip that a program may use."""
    return chip.hbm_bytes * (1 if chip.is_tpu else USABLE_OF_GPU)


def num_chips_of(topology: str, slices: int = 0) -> int:
    """Returns the chips of a topology, of all slices. Raises: InputError if it is unknown."""
    family, _, size = topology.partition(":")
    return _gpu_count(topology, size) if family in GPUS else len(tpu_devices(topology, slices)[0])


def with_rows(config: ResolvedConfig, topology: str, rows_per_chip: int) -> ResolvedConfig:
    """Returns the configuration with as many rows for each chip that has rows of its own."""
    sizes = mesh_sizes(config.mesh, num_chips_of(topology, config.mesh.dcn))
    data = dataclasses.replace(config.data, batch_size=rows_per_chip * sizes["data"] * sizes["fsdp"])
    return dataclasses.replace(config, data=data)
