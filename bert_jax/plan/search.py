# SPDX-License-Identifier: Apache-2.0
"""The settings with which a global batch has the lowest bound on a topology."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.devices.chips import GPUS, TPUS, vmem_bytes
from bert_jax.devices.sharding import check_divisible, make_mesh
from bert_jax.errors import InputError
from bert_jax.plan.planner import Plan, estimated_bytes, plan, planned_devices, row_of
from bert_jax.settings.pretraining import MeshConfig, ResolvedConfig
from bert_jax.settings.rules import to_dict
from bert_jax.training.choices import choose_precision, fewest_small

BEST = 3  # plans that fit as compiled, after which a search ends
MOST_COMPILED = 8  # programs, each of which takes minutes
_REMATS = ("none", "dots", "full")  # the first computes nothing again


class _Candidate(NamedTuple):
    """Settings to compile, in the order in which they are tried."""

    # what does not fit comes last, then what computes more again, then more microbatches
    order: tuple[bool, int, int]
    config: ResolvedConfig


def search(
    config: ResolvedConfig,
    topology: str,
    row: np.dtype | None = None,
    on_plan: Callable[[Plan], object] = lambda plan: None,
    on_refusal: Callable[[str], object] = lambda line: None,
) -> list[Plan]:
    """Returns plans of the global batch `config.data.batch_size`, those that fit first, by their bound.

    The search covers mesh, attention, rematerialization, unrolling, ZeRO-1, the dtype of gradients, and accumulation
    and so the rows at once. The estimate of memory says how many rows at once may fit; on TPUs `fewest_small` takes
    fewer. Candidates that compute least again are compiled in turn until `BEST` of them fit.
    `on_plan` is called with every compiled plan, `on_refusal` with the reason why a mesh is left out.

    Raises: as `plan`; InputError also if the batch divides over no mesh.
    """
    row = row_of(config) if row is None else row
    devices, _ = planned_devices(topology, config.mesh.dcn)
    hbm_bytes = (TPUS | GPUS)[topology.partition(":")[0]].hbm_bytes
    config = ResolvedConfig(choose_precision(config, devices[0]))
    candidates: list[_Candidate] = []
    for mesh in meshes(len(devices), config.mesh.dcn):
        try:
            candidates += _candidates(
                dataclasses.replace(config, mesh=mesh), devices, hbm_bytes, row
            )
        # the model or the batch does not divide so; other meshes may do
        except InputError as error:
            on_refusal(f"left out: {error}")
    if not candidates:
        raise InputError(
            f"data.batch_size {config.data.batch_size} divides over no mesh of {topology}; see above"
        )
    candidates.sort(key=lambda candidate: candidate.order)
    compiled: list[Plan] = []
    for candidate in candidates[:MOST_COMPILED]:
        compiled.append(
            _with_flags(plan(candidate.config, topology, row), config, candidate.config)
        )
        on_plan(compiled[-1])
        if sum(result.fits for result in compiled) == BEST:
            break
    return sorted(compiled, key=lambda result: (not result.fits, result.bound_seconds))


def meshes(num_chips: int, slices: int) -> list[MeshConfig]:
    """Returns the meshes to compare: data parallel, fsdp within a slice, and a mixture of both."""
    mixed = next(
        size
        for size in (8, 4, 2, 3, 5, 7, 1)
        if num_chips % size == 0 and (size < num_chips or size == 1)
    )
    num_slices = max(1, slices)
    sizes = [(-1, 1, 1), (num_slices, -1, 1)] + (
        [(-1, mixed, 1)] if 1 < mixed * num_slices < num_chips else []
    )
    return [MeshConfig(*size, dcn=slices) for size in sizes][: 1 if num_chips == 1 else None]


def _candidates(
    config: ResolvedConfig, devices: Sequence[Any], hbm_bytes: float, row: np.dtype
) -> Iterator[_Candidate]:
    """Yields each combination of settings on a mesh with as many rows at once as a run would take.

    What fits is told by the estimate of memory.

    Raises: InputError if the model or the batch does not divide over the mesh.
    """
    mesh = make_mesh(config.mesh, devices)
    check_divisible(mesh, config.model, (config.data.batch_size, 1))
    rows = config.data.batch_size // (mesh.shape["data"] * mesh.shape["fsdp"])
    counts = [number for number in range(1, rows + 1) if rows % number == 0]
    tokens = rows * row["token_ids"].shape[0]
    vmem = vmem_bytes(devices[0].device_kind)
    for settings in _settings(config, mesh.size):
        divided = {
            count: dataclasses.replace(
                settings, train=dataclasses.replace(settings.train, accumulate=count)
            )
            for count in counts
        }
        fitting = [
            count for count in counts if estimated_bytes(divided[count], mesh, row) < hbm_bytes
        ]
        count = fewest_small(fitting or counts[-1:], tokens, config.model.hidden_size, vmem)
        again = _REMATS.index(settings.model.remat)
        yield _Candidate((not fitting, again, count), divided[count])


def _settings(config: ResolvedConfig, num_chips: int) -> Iterator[ResolvedConfig]:
    """Returns the combinations of settings that a mesh allows."""
    model = config.model
    several = num_chips > 1
    # kernels read all rows alike
    attention = ("plain",) if config.masking.causal_rate else ("fused", "plain")
    unrolls = (model.num_layers, 1) if model.num_layers > 1 else (1,)
    zero1s = ("on", "off") if several and config.mesh.data != 1 else ("off",)
    gradients = (
        ("bfloat16", "float32") if several and model.compute_dtype == "bfloat16" else ("float32",)
    )
    for kind, again, unroll, zero1, dtype in itertools.product(
        attention, _REMATS, unrolls, zero1s, gradients
    ):
        changed = dataclasses.replace(
            model, attention=kind, remat=again, unroll=unroll, gradient_dtype=dtype
        )
        yield dataclasses.replace(
            config, model=changed, train=dataclasses.replace(config.train, zero1=zero1)
        )


def _with_flags(result: Plan, config: ResolvedConfig, settings: ResolvedConfig) -> Plan:
    """Returns a plan with the flags that make its settings of `config`."""
    before = to_dict(config)
    after = to_dict(settings)
    flags = [
        f"--config.{section}.{name}={value}"
        for section in ("mesh", "model", "train")
        for name, value in after[section].items()
        if value != before[section][name]
    ]
    return dataclasses.replace(result, flags=tuple(flags))
