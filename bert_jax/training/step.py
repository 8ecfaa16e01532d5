# SPDX-License-Identifier: Apache-2.0
"""One training step and one evaluation step, for pre-training and for every task."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from bert_jax.batch import Batch
from bert_jax.devices.sharding import replicated, row_sharding, tree_shardings
from bert_jax.model.keys import root_key
from bert_jax.model.losses import Pair
from bert_jax.model.objective import Objective, Params
from bert_jax.settings.pretraining import OptimizerConfig, TrainConfig
from bert_jax.training.optim import apply_updates, global_norm, learning_rate_at, make_optimizer


class TrainState(NamedTuple):
    """All that a run carries from step to step. Random keys are not in it: they follow from the step."""

    step: jax.Array  # int32: how many steps have been taken
    params: Params
    optimizer: Any


Metrics = dict[str, Pair]


def init_state(
    objective: Objective, optimizer: OptimizerConfig, train: TrainConfig, mesh: Mesh, params: Params | None = None
) -> TrainState:
    """Returns the state of step 0 on the mesh, from random parameters or from the given ones.

    Parameters are made whole on every device and then cut: how a function of random bits rounds depends on
    how its array is cut, and a seed is to give the same state on every mesh.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(objective, optimizer, train, mesh))
    with jax.set_mesh(mesh):
        if params is None:
            params = jax.jit(objective.init, out_shardings=replicated(mesh))(root_key(train.seed, "parameters"))
        else:
            # From the host: what one device holds cannot be handed to those of other processes.
            params = jax.device_put(jax.device_get(params), replicated(mesh))
        return jax.jit(_fresh_state(optimizer, train), out_shardings=shardings)(params)


def abstract_state(
    objective: Objective, optimizer: OptimizerConfig, train: TrainConfig, mesh: Mesh | AbstractMesh
) -> TrainState:
    """Returns the shapes, dtypes and shardings of the state, computing nothing."""
    key = root_key(train.seed, "parameters")
    shapes = jax.eval_shape(lambda key: _fresh_state(optimizer, train)(objective.init(key)), key)
    shardings = tree_shardings(mesh, shapes)
    if train.zero1:
        shardings = shardings._replace(optimizer=tree_shardings(mesh, shapes.optimizer, over_data=True))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )


def _fresh_state(optimizer: OptimizerConfig, train: TrainConfig) -> Callable[[Params], TrainState]:
    transformation = make_optimizer(optimizer, train.num_steps)
    return lambda params: TrainState(jnp.zeros((), jnp.int32), params, transformation.init(params))


def make_train_step(
    objective: Objective, optimizer: OptimizerConfig, train: TrainConfig, mesh: Mesh, state: Any, first_step: int = 0
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the compiled step (state, batch) -> (state, metrics); it consumes the state it is given.

    `state` gives the shapes and shardings of the training state (`init_state`, `abstract_state`). The batch is the
    global one, with rows over data x fsdp. The schedule of the learning rate starts at `first_step` and takes
    train.num_steps.
    """
    divided = tree_shardings(mesh, state.params, over_data=True) if train.zero1 else None
    step = step_function(objective, optimizer, train, divided, first_step)
    dropout_root = root_key(train.seed, "dropout")
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(
        lambda state, batch: step(state, batch, dropout_root),
        in_shardings=(shardings, row_sharding(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )


def step_function(
    objective: Objective,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    update_shardings: Any = None,
    first_step: int = 0,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Returns the step (state, batch, root key of dropout, scale of the learning rate = 1) -> (state, metrics).

    `update_shardings` says where each parameter's update is computed, if not where the parameter lies: devices then
    add up their gradients and keep a part each (reduce-scatter), and get the new parameters from each other
    (all-gather), which sends as much as adding up alone. Source: Rajbhandari et al. 2020, stage 1; Xu et al. 2020.
    """
    transformation = make_optimizer(optimizer, train.num_steps, first_step)
    rate = learning_rate_at(optimizer, train.num_steps, first_step)

    def step(
        state: TrainState, batch: Batch, dropout_root: jax.Array, rate_scale: Any = None
    ) -> tuple[TrainState, Metrics]:
        batch = objective.prepare(batch)
        denominators = objective.denominators(batch)
        step_key = jax.random.fold_in(dropout_root, state.step)

        def loss_and_metrics(params: Params, batch: Batch, key: jax.Array) -> tuple[jax.Array, Metrics]:
            metrics = objective.losses(params, batch, key)
            terms = [metrics[name][0] / denominator for name, denominator in denominators.items()]
            return jnp.sum(jnp.stack(terms)), metrics

        def gradients_of(batch: Batch, index: jax.Array | int) -> tuple[jax.Array, Metrics, Params]:
            key = jax.random.fold_in(step_key, index)
            (loss, metrics), gradients = jax.value_and_grad(loss_and_metrics, has_aux=True)(state.params, batch, key)
            return loss, metrics, gradients

        if train.accumulate == 1:
            loss, metrics, gradients = gradients_of(batch, 0)
        else:
            loss, metrics, gradients = _sum_over_microbatches(gradients_of, batch, train.accumulate)

        params = state.params
        if update_shardings is not None:
            gradients, params = jax.lax.with_sharding_constraint((gradients, params), (update_shardings,) * 2)
        updates, optimizer_state = transformation.update(gradients, state.optimizer, params)
        learning_rate = rate(state.step)
        if rate_scale is not None:  # an update is proportional to the rate, so another rate is another scale
            updates = jax.tree.map(lambda update: update * rate_scale, updates)
            learning_rate *= rate_scale
        one = jnp.ones(())
        metrics |= batch_counts(batch)
        metrics |= {
            "loss": (loss, one),
            "grad_norm": (global_norm(gradients), one),
            "learning_rate": (learning_rate, one),
        }
        return TrainState(state.step + 1, apply_updates(params, updates), optimizer_state), metrics

    return step


def make_eval_step(objective: Objective, mesh: Mesh, params: Any) -> Callable[[Params, Batch], Metrics]:
    """Returns the compiled evaluation (params, batch) -> metrics, without dropout."""

    def step(params: Params, batch: Batch) -> Metrics:
        return objective.losses(params, objective.prepare(batch), None)

    return jax.jit(
        step, in_shardings=(tree_shardings(mesh, params), row_sharding(mesh)), out_shardings=replicated(mesh)
    )


def batch_counts(batch: Batch) -> Metrics:
    """Returns how much is in a batch, padding left out: what throughput is computed from.

    "tokens" count [CLS] and [SEP]. "words" are there where the batch says where words begin: punctuation counts, and
    special tokens do not.
    """
    places = jnp.arange(1, batch.cls_positions.shape[1] + 1)
    inside = batch.sequence_ids[:, None, :] == places[:, None]  # [B, M, L]
    lengths = jnp.sum(inside, axis=-1).astype(jnp.float32)  # [B, M]
    counts = {
        "sequences": jnp.sum(batch.sequence_weights),
        "tokens": jnp.sum(lengths),
        "squared_lengths": jnp.sum(lengths**2),
        "predictions": jnp.sum(batch.mlm_weights) if batch.mlm_weights is not None else jnp.zeros(()),
    }
    if batch.word_starts is not None:
        pairs = jnp.any(inside & (batch.type_ids == 1)[:, None, :], axis=-1)  # [B, M]: [CLS] A [SEP] B [SEP]
        special = jnp.sum(batch.sequence_weights * (2.0 + pairs))
        counts["words"] = jnp.sum(batch.word_starts & (batch.sequence_ids > 0)).astype(jnp.float32) - special
    return {name: (count, jnp.ones(())) for name, count in counts.items()}


def _sum_over_microbatches(gradients_of: Callable, batch: Batch, count: int) -> Any:
    """Returns the sum of `gradients_of` over `count` microbatches, one after the other.

    Microbatch i takes rows i, i + count, ...: each device keeps its own rows and nothing moves.
    """
    pieces = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, count, *x.shape[1:]), 0, 1), batch)

    def add(total: Any, piece: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, gradients_of(*piece)), None

    first = jax.tree.map(lambda x: x[0], pieces)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(gradients_of, first, 0))
    return jax.lax.scan(add, zeros, (pieces, jnp.arange(count)))[0]
