# SPDX-License-Identifier: Apache-2.0
"""Plans: memory, collectives, FLOPs and bytes of a training step on a pod, computed without the pod.

The compiler of the device compiles the real training step, libtpu for TPUs and XLA for GPUs, and neither needs such a
device. All figures are the compiler's, but for the bound on time: FLOPs and bytes at the data sheet's peaks.
"""

import dataclasses
import functools
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import Batch, RowShape
from bert_jax.batches.load import abstract_batch
from bert_jax.data.records import row_dtype
from bert_jax.devices.chips import GPUS, GPUS_PER_HOST, TPUS, Chip, peak_flops, vmem_bytes
from bert_jax.devices.sharding import check_divisible, make_mesh, mesh_sizes, row_sharding
from bert_jax.errors import InputError
from bert_jax.model.flops import step_flops
from bert_jax.model.objective import Objective
from bert_jax.model.replacing import objective_of
from bert_jax.plan import hlo
from bert_jax.plan.gpus import OPTIONS, compiler_version, gpu_devices
from bert_jax.plan.hbm import moved_bytes
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import DataConfig, ResolvedConfig, TeacherConfig, TrainConfig
from bert_jax.settings.rules import suggest
from bert_jax.training.choices import (
    Batches,
    choose_memory,
    choose_precision,
    choose_update,
    describe_choices,
)
from bert_jax.training.memory import estimate_memory, memory_problem, shard_bytes
from bert_jax.training.program import Program
from bert_jax.training.step import TrainState, abstract_state

# of its memory, for the program's arrays; the rest is the runtime's and the libraries'
USABLE_OF_GPU = 0.92
# JAX takes so much at its start (XLA_PYTHON_CLIENT_MEM_FRACTION).
GIVEN_OF_GPU = 0.75

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
class Traffic:
    """The collectives of one kind and dtype."""

    kind: str
    dtype: str
    count: int  # runs in a step
    bytes: int  # of all runs
    group_size: int


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
    problem: str  # why the step does not fit, in one line; "" if it does
    hbm_bytes: float
    bytes: dict[str, int]  # by kind, as compiled
    estimate: dict[str, int]  # by kind, by arithmetic
    model_flops: float
    compiled_flops: float  # 0.0 of a program that the compiler refuses
    moved_bytes: float  # to and from HBM, as compiled
    collectives: tuple[Traffic, ...]
    # seconds of the products, of HBM and of the links at their peaks; {} if nothing compiled
    bound: dict[str, float]
    bound_mfu: float  # the model's FLOPs in the sum of these, as a share of the peak
    compile_seconds: float
    source: str  # "libtpu VERSION" or "XLA, PACKAGE VERSION"
    choices: str = ""  # the line with which a run there says what it computes with
    flags: tuple[str, ...] = ()  # to add to the command line, of a plan of `search`

    @property
    def fits(self) -> bool:
        return not self.problem

    @property
    def bound_seconds(self) -> float:
        """The seconds of a step at the peaks, one part after the other; a step that overlaps parts may take less."""
        return sum(self.bound.values())

    @property
    def rows_per_chip(self) -> int:
        return self.batch_size // (self.mesh["data"] * self.mesh["fsdp"])


def plan(config: ResolvedConfig, topology: str, row: Rows | None = None) -> Plan:
    """Returns the plan of the training step of `config` on a topology such as "v5e:16x16" or "h100:8".

    `row` is the record of a row of the data, None that of `row_of`; or other work, whose rows `config.data` counts.
    `config.model.vocab_size` must be set.

    Raises: InputError if the topology is unknown, its compiler is not installed, the model does not divide over the
      mesh, or there is a teacher.
    """
    check_no_teacher(config.teacher)
    row = row_of(config) if row is None else row
    if (row_length := _batch(row).token_ids.shape[1]) > config.model.max_positions:
        raise InputError(
            f"rows of {row_length} are longer than model.max_positions {config.model.max_positions}"
        )
    devices, version = planned_devices(topology, config.mesh.dcn)
    limit = memory_of_chip(topology)
    config = _as_run_there(config, make_mesh(config.mesh, devices), limit, row)
    return _plan_by_compiler(config, topology, row, devices, version)


def memory_of_chip(topology: str) -> float:
    """Returns the bytes of a device of the topology that JAX gives to programs, as a run would find them."""
    chip = (TPUS | GPUS)[topology.partition(":")[0]]
    return chip.hbm_bytes * (1.0 if chip.is_tpu else GIVEN_OF_GPU)


def _as_run_there(config: ResolvedConfig, mesh: Mesh, limit: float, row: Rows) -> ResolvedConfig:
    """Returns the settings with what a run on these devices would choose, where they leave it open."""
    config = ResolvedConfig(choose_precision(config, mesh.devices.flat[0]))
    config = ResolvedConfig(choose_update(config, mesh))
    model = dataclasses.replace(config.model, remat="none")
    keeps_all = ResolvedConfig(dataclasses.replace(config, model=model))
    shape = _objective(keeps_all, mesh, row).row_shape(_batch(row))
    batches = Batches(config.data.batch_size, config.train.accumulate, shape)
    state = functools.partial(_state, keeps_all, mesh, row)
    vmem = vmem_bytes(mesh.devices.flat[0].device_kind)
    remat, (count,) = choose_memory(config.in_memory, [batches], mesh.shape, state, limit, vmem)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, remat=remat),
        train=dataclasses.replace(config.train, accumulate=count),
    )


def planned_devices(topology: str, slices: int = 0) -> tuple[Sequence[Any], str]:
    """Returns the devices of a topology, for compiling only, and the version of their compiler.

    Raises: InputError if the topology is unknown or its compiler is not installed.
    """
    family, _, size = topology.partition(":")
    if family not in GPUS:
        return tpu_devices(topology, slices)
    if not re.fullmatch(r"[1-9]\d*", size):
        raise _unknown(topology)
    version = compiler_version()
    if not version:
        raise InputError(
            f"topology {topology!r} needs XLA's GPU compiler; pip install 'bert_jax[gpu-plan]'"
        )
    return gpu_devices(topology, int(size)), f"XLA, {version}"


def check_no_teacher(teacher: TeacherConfig) -> None:
    """Raises: InputError if there is a teacher."""
    if teacher.checkpoint:
        raise InputError(
            "teacher.checkpoint: plans know no teacher; leave it out, and add its memory to the plan's"
        )


def _plan_by_compiler(
    config: ResolvedConfig, topology: str, row: Rows, devices: Sequence[Any], version: str
) -> Plan:
    """Returns the plan for devices that are there for compiling only; `version` is that of their compiler."""
    chip = (TPUS | GPUS)[topology.partition(":")[0]]
    mesh = make_mesh(config.mesh, devices)
    sizes = dict(mesh.shape)
    check_divisible(mesh, config.model, (config.data.batch_size, config.train.microbatches))
    state = _state(config, mesh, row)
    shape = _objective(config, mesh, row).row_shape(_batch(row))
    needs = model_flops(config, mesh.size, shape)
    known: dict[str, Any] = {
        "topology": topology,
        "device_kind": chip.device_kind,
        "num_chips": mesh.size,
        "mesh": sizes,
        "batch_size": config.data.batch_size,
        "row_length": shape.length,
        "predictions": shape.predictions,
        "choices": describe_choices(config),
        "estimate": estimate_memory(
            config.model,
            config.data.batch_size,
            config.train.microbatches,
            state,
            sizes,
            shape,
        ),
        "model_flops": needs,
        "source": version,
    }
    lowered = lower_train_step(config, mesh, row)
    started = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=None if chip.is_tpu else OPTIONS)
    except jax.errors.JaxRuntimeError as error:
        needed, available = out_of_memory(str(error))
        return Plan(
            **known,
            problem=memory_problem(config, sizes, needed, available),
            hbm_bytes=available,
            bytes={"temporaries": round(needed)},
            compiled_flops=0.0,
            moved_bytes=0.0,
            collectives=(),
            bound={},
            bound_mfu=0.0,
            compile_seconds=time.perf_counter() - started,
        )
    seconds = time.perf_counter() - started
    module = hlo.parse(compiled.as_text() or "")
    kinds = compiled_bytes(compiled, state, config, mesh, row)
    needed = kinds["held at once"] or kinds["total"]
    # libtpu refuses programs that do not fit; XLA's GPU compiler does not know the free memory.
    available = math.inf if chip.is_tpu else chip.hbm_bytes * USABLE_OF_GPU
    collectives = summarize(hlo.collectives(module))
    flops = float(hlo.flops(module))
    moved = float(moved_bytes(module))
    peak = peak_flops(chip.device_kind, config.model.compute_dtype)
    bound = {
        "products": flops / peak,
        "memory": moved / chip.hbm_bandwidth,
        "links": link_seconds(chip, mesh.size, collectives),
    }
    return Plan(
        **known,
        problem="" if needed < available else memory_problem(config, sizes, needed, available),
        hbm_bytes=chip.hbm_bytes,
        bytes=kinds,
        compiled_flops=flops,
        moved_bytes=moved,
        collectives=collectives,
        bound=bound,
        bound_mfu=needs / peak / sum(bound.values()),
        compile_seconds=seconds,
    )


def estimated_bytes(config: ResolvedConfig, mesh: Mesh, row: Rows) -> int:
    """Returns the bytes of a step on each chip by arithmetic, before anything is compiled."""
    shape = _objective(config, mesh, row).row_shape(_batch(row))
    sizes = config.data.batch_size, config.train.microbatches
    state = _state(config, mesh, row)
    return estimate_memory(config.in_memory, *sizes, state, mesh.shape, shape)["total"]


def model_flops(config: ResolvedConfig, num_chips: int, row: RowShape) -> float:
    """Returns the FLOPs of one chip and step that the model needs, for full rows of sequences of equal length."""
    rows = config.data.batch_size / num_chips
    tokens = rows * row.length
    pairs = rows * row.length**2 / row.sequences
    return step_flops(config.models, tokens, pairs, rows * row.predictions, rows * row.sequences)


def link_seconds(chip: Chip, num_chips: int, collectives: Sequence[Traffic]) -> float:
    """Returns the seconds of a step's collectives at the peak of the links. An all-reduce sends its bytes twice."""
    sent = sum(
        traffic.bytes * (2 if traffic.kind == "all-reduce" else 1) for traffic in collectives
    )
    seconds = sent / chip.link_bandwidth
    # GPUs add up within a host, and then between hosts
    if chip.network_bandwidth and num_chips > GPUS_PER_HOST:
        seconds += sent / GPUS_PER_HOST / chip.network_bandwidth
    return seconds


def default_row_length(config: ResolvedConfig) -> int:
    """Returns the multiple of 128 whose tokens the predictions come from: 128 for 20 or 0 of them, 512 for 80."""
    masking = config.masking
    # 0 predictions say nothing
    length = 128 * round(masking.max_predictions / max(masking.rate, 0.01) / 128)
    return min(max(length, 128), config.model.max_positions)


def tpu_devices(topology: str, slices: int = 0) -> tuple[Sequence[Any], str]:
    """Returns the chips of `slices` slices of a TPU topology, for compiling only, and the version of libtpu.

    Raises: InputError if libtpu is not installed or does not know the topology.
    """
    family, _, size = topology.partition(":")
    if family in GPUS:
        raise InputError(
            f"topology {topology!r} is of GPUs; steps are compiled for TPUs, or here, for this machine"
        )
    if family not in TPUS or not re.fullmatch(r"\d+x\d+(x\d+)?", size):
        raise _unknown(topology)
    try:
        import libtpu  # pyright: ignore[reportMissingImports]
        from jax.experimental import topologies
    except ImportError:
        raise InputError(
            "TPU topologies need libtpu; pip install 'bert_jax[tpu]' (on Linux, x86)"
        ) from None
    # libtpu must not query the metadata server of a TPU host, and two planners may run at once.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options = {"chip_config_name": "megacore"} if TPUS[family].megacore else {}
    name = f"{'v5' if family == 'v5p' else family}:{size}"  # as libtpu calls it
    try:
        pod = topologies.get_topology_desc(
            platform="tpu", topology_name=name, num_slices=slices or 1, **options
        )
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        raise _unknown(topology, f" ({str(error).splitlines()[0][:120]})") from None
    return pod.devices, f"libtpu {getattr(libtpu, '__version__', '')}".strip()


def _unknown(topology: str, reason: str = "") -> InputError:
    known = (*TOPOLOGIES, *(f"{name}:8" for name in sorted(GPUS)))
    return InputError(
        f"topology {topology!r} is unknown{suggest(topology, known)}{reason}; "
        f"TPUs: {', '.join(TOPOLOGIES)}; GPUs: {', '.join(f'{name}:N' for name in sorted(GPUS))}"
    )


def _objective(config: ResolvedConfig, mesh: Mesh, row: Rows | None = None) -> Objective:
    """Returns the objective of a run on the devices of the mesh; the ids of special tokens do not affect the plan."""
    # which is not this machine's
    unroll = config.model.layers_at_once(mesh.devices.flat[0].platform)
    model = dataclasses.replace(config.model, unroll=unroll)
    if isinstance(row, Work):
        return row.objective(model)
    return objective_of(config, model, config.masking, 103, (101, 102))


def _state(config: ResolvedConfig, mesh: Mesh, row: Rows | None = None) -> TrainState:
    """Returns the shapes and shardings of the training state, traced once for all settings that do not change them."""
    if isinstance(row, Work):
        return abstract_state(_objective(config, mesh, row), config.optimizer, config.train, mesh)
    model = dataclasses.replace(
        config.model, attention="plain", remat="none", unroll=1, gradient_dtype="float32"
    )
    train = TrainConfig(zero1=config.train.zero1, next_sentence=config.train.next_sentence)
    return _state_of(dataclasses.replace(config, model=model, train=train, data=DataConfig()), mesh)


@functools.lru_cache(maxsize=8)
def _state_of(config: ResolvedConfig, mesh: Mesh) -> TrainState:
    return abstract_state(_objective(config, mesh), config.optimizer, config.train, mesh)


def _batch(row: Rows, batch_size: int = 1, mesh: Mesh | None = None) -> Batch:
    """Returns the shapes of a batch, on a mesh with its shardings; other work has a batch of its own."""
    if not isinstance(row, Work):
        return abstract_batch(row, batch_size, mesh)
    sharding = None if mesh is None else row_sharding(mesh)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), row.batch
    )


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
    params = shard_bytes(state.params)
    optimizer = shard_bytes(state.optimizer)
    kinds = {
        "params": params,
        "optimizer": optimizer,
        "batch": shard_bytes(_batch(row, config.data.batch_size, mesh)),
    }
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
    match = re.search(
        r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)", message
    ) or re.search(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm", message)
    if not match:
        raise InputError(
            f"the compiler has refused the program: {message.strip().splitlines()[0][:300]}"
        )
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    return float(match[1]) * units[match[2]], float(match[3]) * units[match[4]]


def summarize(found: list[hlo.Collective]) -> tuple[Traffic, ...]:
    """Returns the collectives of a program by kind and dtype, the largest first."""
    counts = Counter()
    sizes = Counter()
    for collective in found:
        key = (collective.kind, "+".join(collective.dtypes), collective.group_size)
        counts[key] += collective.count
        sizes[key] += collective.count * collective.bytes
    return tuple(
        Traffic(kind, dtypes, counts[kind, dtypes, group], size, group)
        for (kind, dtypes, group), size in sizes.most_common()
    )


def with_rows(config: ResolvedConfig, topology: str, rows_per_chip: int) -> ResolvedConfig:
    """Returns the configuration with as many rows for each chip that has rows of its own."""
    sizes = mesh_sizes(config.mesh, len(planned_devices(topology, config.mesh.dcn)[0]))
    data = dataclasses.replace(
        config.data, batch_size=rows_per_chip * sizes["data"] * sizes["fsdp"]
    )
    return dataclasses.replace(config, data=data)
