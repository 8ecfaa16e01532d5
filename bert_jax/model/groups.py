# SPDX-License-Identifier: Apache-2.0
"""Layers that are not all alike, not stacked, or share parameters: one after the other, and groups of them in a loop.

A group is a global layer and the local ones around it. A loop over single layers would have to decide in every one, and
a condition keeps for the backward pass what either kind of layer needs. The parameters stay stacked by layers. Layers
after the last whole group stand behind the loop.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from bert_jax.batch import PyTree
from bert_jax.model.on_cpu import layer_name
from bert_jax.settings.model import ModelConfig

Carry = TypeVar("Carry")


def sharing(config: ModelConfig, layer: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function of one layer, or of all the layers of a group that share their parameters."""
    length = config.num_layers // config.num_stacked
    if length == 1:
        return layer
    return nn.scan(
        layer,
        variable_broadcast="params",
        split_rngs={"params": False, "dropout": True},
        length=length,
        unroll=min(length, config.layers_at_once(jax.default_backend())),
    )


def by_layer(config: ModelConfig, kept: PyTree) -> Any:
    """Returns what layers keep, stacked by layers, where it is stacked by groups that share parameters."""
    if config.num_stacked == config.num_layers:
        return kept
    return jax.tree.map(lambda leaf: leaf.reshape(config.num_layers, *leaf.shape[2:]), kept)


def run_layers(
    encoder: nn.Module,
    config: ModelConfig,
    layer: Callable[[bool], Callable[[nn.Module, Any], tuple[Any, PyTree]]],
    module: nn.Module,
    stream: Any,
) -> tuple[Any, Any]:
    """Returns the stream after all layers, and what they keep, stacked by layers.

    The parameters of the unbound `module` of a layer are those of `encoder`: "layers", a stack, or by layer, as
    `on_cpu.unstack` leaves them. `layer(is_global)` is a function of the module and the stream for one layer.
    """
    keys = {}
    if encoder.has_rng("dropout"):
        keys["dropout"] = jax.random.split(encoder.make_rng("dropout"), config.num_layers)

    def run(is_global: bool, own: tuple[PyTree, PyTree], stream: Any) -> tuple[Any, PyTree]:
        params, rngs = own
        return nn.apply(layer(is_global), module)({"params": params}, stream, rngs=rngs)

    if not encoder.has_variable("params", layer_name(0)):
        return scan_groups(config, run, (encoder.get_variable("params", "layers"), keys), stream)
    params = [encoder.get_variable("params", layer_name(i)) for i in range(config.num_layers)]
    apart = [(own, _part(keys, index)) for index, own in enumerate(params)]
    return _one_after_the_other(config, run, apart, stream)


def scan_groups(
    config: ModelConfig,
    run: Callable[[bool, Any, Carry], tuple[Carry, PyTree]],
    stacks: PyTree,
    carry: Carry,
) -> tuple[Carry, Any]:
    """Returns the carry after all layers, and what they keep, stacked by layers.

    `run` returns both for one layer; it is given whether the layer is global, its part of `stacks`, and the carry.
    """
    size = config.global_every
    length = config.num_layers
    whole = length - length % size

    def of_group(carry: Carry, group: PyTree) -> tuple[Carry, PyTree]:
        return _one_after_the_other(config, run, [_part(group, i) for i in range(size)], carry)

    groups = jax.tree.map(
        lambda leaf: leaf[:whole].reshape(whole // size, size, *leaf.shape[1:]), stacks
    )
    unroll = max(1, config.layers_at_once(jax.default_backend()) // size)
    carry, kept = jax.lax.scan(of_group, carry, groups, unroll=unroll)
    kept = jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), kept)
    if whole < length:
        rest = [_part(stacks, index) for index in range(whole, length)]
        carry, of_rest = _one_after_the_other(config, run, rest, carry)
        kept = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), kept, of_rest)
    return carry, kept


def _one_after_the_other(
    config: ModelConfig,
    run: Callable[[bool, Any, Carry], tuple[Carry, PyTree]],
    layers: list[Any],
    carry: Carry,
) -> tuple[Carry, Any]:
    """Like `scan_groups`, for layers apart from each other, from the first of a group on."""
    all_kept = []
    for index, own in enumerate(layers):
        is_global = not config.num_local or index % config.global_every == config.global_first
        carry, kept = run(is_global, own, carry)
        all_kept.append(kept)
    return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *all_kept)


def _part(stacks: PyTree, index: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[index], stacks)
