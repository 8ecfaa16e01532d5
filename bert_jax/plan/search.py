# SPDX-License-Identifier: Apache-2.0
"""The settings with which a global batch takes the least time on a topology."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from bert_jax.devices.chips import GPUS
from bert_jax.errors import InputError
from bert_jax.plan.gpus import compiler_version
from bert_jax.plan.planner import Plan, num_chips_of, plan, plan_by_arithmetic, row_of
from bert_jax.settings.pretraining import MeshConfig, ResolvedConfig
from bert_jax.settings.rules import to_dict

BEST = 3  # plans that fit as compiled, after which a search ends
MOST_COMPILED = 8  # programs, each of which takes minutes


def search(
    config: ResolvedConfig,
    topology: str,
    row: np.dtype | None = None,
    on_plan: Callable[[Plan], object] = lambda plan: None,
    on_refusal: Callable[[str], object] = lambda line: None,
) -> list[Plan]:
    """Returns plans of the global batch `config.data.batch_size`, those that fit first and of these the fastest first.

    The search covers mesh, attention, rematerialization, unrolling, ZeRO-1, the dtype of gradients, and accumulation
    and so the rows at once. Candidates are ranked by arithmetic. Then the best are compiled in turn, where the topology
    has a compiler, until `BEST` of them fit, and ranked by the compiler's figures.
    `on_plan` is called with every compiled plan, `on_refusal` with the reason why a mesh is left out.

    Raises: as `plan`; InputError also if the batch divides over no mesh.
    """
    row = row_of(config) if row is None else row
    num_chips = num_chips_of(topology, config.mesh.dcn)
    candidates: list[tuple[Plan, ResolvedConfig]] = []
    for mesh in meshes(num_chips, config.mesh.dcn):
        try:
            candidates += _candidates(dataclasses.replace(config, mesh=mesh), topology, num_chips, row)
        except InputError as error:  # the model or the batch does not divide so; other meshes may do
            on_refusal(f"left out: {error}")
    if not candidates:
        raise InputError(f"data.batch_size {config.data.batch_size} divides over no mesh of {topology}; see above")
    candidates.sort(key=lambda candidate: _order(candidate[0]))
    if topology.partition(":")[0] in GPUS and not compiler_version():
        return [_with_flags(estimate, config, settings) for estimate, settings in candidates]
    compiled: list[Plan] = []
    for _, settings in candidates[:MOST_COMPILED]:
        compiled.append(_with_flags(plan(settings, topology, row), config, settings))
        on_plan(compiled[-1])
        if sum(result.fits for result in compiled) == BEST:
            break
    return sorted(compiled, key=_order)


def meshes(num_chips: int, slices: int) -> list[MeshConfig]:
    """Returns the meshes to compare: data parallel, fsdp within a slice, and a mixture of both."""
    mixed = next(size for size in (8, 4, 2, 3, 5, 7, 1) if num_chips % size == 0 and (size < num_chips or size == 1))
    num_slices = max(1, slices)
    sizes = [(-1, 1, 1), (num_slices, -1, 1)] + ([(-1, mixed, 1)] if 1 < mixed * num_slices < num_chips else [])
    return [MeshConfig(*size, dcn=slices) for size in sizes][: 1 if num_chips == 1 else None]


def _candidates(
    config: ResolvedConfig, topology: str, num_chips: int, row: np.dtype
) -> list[tuple[Plan, ResolvedConfig]]:
    """Returns for each combination of settings on a mesh the plan, by arithmetic, of the most rows at once that fit."""
    candidates = []
    for settings in _settings(config, num_chips):
        for accumulate in range(1, config.data.batch_size + 1):
            candidate = dataclasses.replace(settings, train=dataclasses.replace(settings.train, accumulate=accumulate))
            try:
                estimate = plan_by_arithmetic(candidate, topology, num_chips, row)
            except InputError:
                if accumulate == 1:
                    raise
                continue  # it does not divide the rows
            if estimate.fits or estimate.rows_per_chip == accumulate:
                candidates.append((estimate, candidate))
                break
    return candidates


def _settings(config: ResolvedConfig, num_chips: int) -> Iterator[ResolvedConfig]:
    """Returns the combinations of settings that a mesh allows."""
    model, several = config.model, num_chips > 1
    attention, remat = ("fused", "plain"), ("none", "dots", "full")
    attention = ("plain",) if config.masking.causal_rate else attention  # kernels read all rows alike
    unrolls = (model.num_layers, 1) if model.num_layers > 1 else (1,)
    zero1s = (True, False) if several and config.mesh.data != 1 else (False,)
    gradients = ("bfloat16", "float32") if several and model.compute_dtype == "bfloat16" else ("float32",)
    for kind, again, unroll, zero1, dtype in itertools.product(attention, remat, unrolls, zero1s, gradients):
        changed = dataclasses.replace(model, attention=kind, remat=again, unroll=unroll, gradient_dtype=dtype)
        yield dataclasses.replace(config, model=changed, train=dataclasses.replace(config.train, zero1=zero1))


def _order(result: Plan) -> tuple[bool, float]:
    """Returns the sort key of plans: that they fit, and their time. Of equals, those that recompute less are first."""
    return (not result.fits, result.seconds["step"])


def _with_flags(result: Plan, config: ResolvedConfig, settings: ResolvedConfig) -> Plan:
    """Returns a plan with the flags that make its settings of `config`."""
    before, after = to_dict(config), to_dict(settings)
    flags = [
        f"--config.{section}.{name}={value}"
        for section in ("mesh", "model", "train")
        for name, value in after[section].items()
        if value != before[section][name]
    ]
    return dataclasses.replace(result, flags=tuple(flags))
