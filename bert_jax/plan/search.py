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
MOST_COMPILED = 8  # programs, of which each takes minutes


def search(
    config: ResolvedConfig,
    topology: str,
    row: np.dtype | None = None,
    on_plan: Callable[[Plan], object] = lambda plan: None,
    on_refusal: Callable[[str], object] = lambda line: None,
) -> list[Plan]:
    """Returns plans of the global batch `config.data.batch_size`, those that fit first and of these the fastest first.

    Searched are mesh, attention, rematerialization, unrolling, ZeRO-1, the dtype of
    gradients, and accumulation and so the rows at once. Candidates are ranked by arithmetic. Then the best are compiled
    in turn, where the topology has a compiler, until `BEST` of them fit, and ranked by what the compiler says.
    `on_plan` is called with every compiled plan, `on_refusal` with the reason why a mesh is left out.

    Raises: as `plan`; InputError also if the batch divides over no mesh.
    """
    row = row_of(config) if row is None else row
    num_chips = num_chips_of(topology, config.mesh.dcn)
    found: list[tuple[Plan, ResolvedConfig]] = []
    for mesh in meshes(num_chips, config.mesh.dcn):
        try:
            found += _candidates(dataclasses.replace(config, mesh=mesh), topology, num_chips, row)
        except InputError as error:  # the model or the batch does not divide so; other meshes may do
            on_refusal(f"left out: {error}")
    if not found:
        raise InputError(f"data.batch_size {config.data.batch_size} divides over no mesh of {topology}; see above")
    found.sort(key=lambda each: _order(each[0]))
    if topology.partition(":")[0] in GPUS and not compiler_version():
        return [_with_flags(made, config, its) for made, its in found]
    compiled: list[Plan] = []
    for _, its in found[:MOST_COMPILED]:
        compiled.append(_with_flags(plan(its, topology, row), config, its))
        on_plan(compiled[-1])
        if sum(made.fits for made in compiled) == BEST:
            break
    return sorted(compiled, key=_order)


def meshes(num_chips: int, slices: int) -> list[MeshConfig]:
    """Returns the meshes to compare: data parallel, fsdp within a slice, and a mixture of both."""
    mixed = next(size for size in (8, 4, 2, 3, 5, 7, 1) if num_chips % size == 0 and (size < num_chips or size == 1))
    each = max(1, slices)
    sizes = [(-1, 1, 1), (each, -1, 1)] + ([(-1, mixed, 1)] if 1 < mixed * each < num_chips else [])
    return [MeshConfig(*size, dcn=slices) for size in sizes][: 1 if num_chips == 1 else None]


def _candidates(
    config: ResolvedConfig, topology: str, num_chips: int, row: np.dtype
) -> list[tuple[Plan, ResolvedConfig]]:
    """Returns for each combination of settings on a mesh the plan, by arithmetic, of the most rows at once that fit."""
    found = []
    for settings in _settings(config, num_chips):
        for accumulate in range(1, config.data.batch_size + 1):
            its = dataclasses.replace(settings, train=dataclasses.replace(settings.train, accumulate=accumulate))
            try:
                made = plan_by_arithmetic(its, topology, num_chips, row)
            except InputError:
                if accumulate == 1:
                    raise
                continue  # it does not divide the rows
            if made.fits or made.rows_per_chip == accumulate:
                found.append((made, its))
                break
    return found


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


def _order(made: Plan) -> tuple[bool, float]:
    """Returns what plans are sorted by: that they fit, and their time. Of equals, what recomputes less is first."""
    return (not made.fits, made.seconds["step"])


def _with_flags(made: Plan, config: ResolvedConfig, its: ResolvedConfig) -> Plan:
    """Returns a plan with the flags that make its settings of `config`."""
    before, after = to_dict(config), to_dict(its)
    flags = [
        f"--config.{section}.{name}={value}"
        for section in ("mesh", "model", "train")
        for name, value in after[section].items()
        if value != before[section][name]
    ]
    return dataclasses.replace(made, flags=tuple(flags))
