# SPDX-License-Identifier: Apache-2.0
"""One training step and one evaluation step, for pre-training and for every task."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.tree_util import KeyPath

from bert_jax.batch import Array, Batch, PyTree
from bert_jax.devices.sharding import is_stacked, path_name, tree_shardings
from bert_jax.model.keys import root_key
from bert_jax.model.losses import Pair
from bert_jax.model.objective import Objective, Params
from bert_jax.model.sequences import in_sequences
from bert_jax.settings.pretraining import OptimizerConfig, TrainConfig
from bert_jax.training.accumulate import sum_over_microbatches
from bert_jax.training.optim import apply_updates, global_norm, learning_rate_at, make_optimizer
from bert_jax.training.whole_batch import gradients_of_whole


class TrainState(NamedTuple):
    """The state of training. It has no random keys: they follow from the step."""

    step: jax.Array  # int32: the number of steps taken
    params: Params
    optimizer: PyTree


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics(Mapping[str, Pair]):
    """The metrics of a step, {name: (sum, weight)}, in one array: the host reads it in one transfer."""

    # [number of metrics, 2] float32; of several steps [steps, number of metrics, 2]
    table: jax.Array
    names: tuple[str, ...] = field(metadata={"static": True})

    @classmethod
    def of(cls, pairs: Mapping[str, Pair]) -> "Metrics":
        """Returns the metrics of {name: (sum, weight)}."""
        return cls(jnp.stack([jnp.stack(pair) for pair in pairs.values()]), tuple(pairs))

    def __getitem__(self, name: str) -> Pair:
        if name not in self.names:
            raise KeyError(name)
        total, weight = self.table[self.names.index(name)]
        return total, weight

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def is_ready(self) -> bool:
        """Returns whether the devices have computed the metrics."""
        return self.table.is_ready()  # type: ignore[attr-defined]

    def of_steps(self) -> list["Metrics"]:
        """Returns the metrics of each step, if these are the metrics of a call of several steps."""
        return (
            [self] if self.table.ndim == 2 else [Metrics(table, self.names) for table in self.table]
        )


_Pairs = dict[str, Pair]


def init_state(
    objective: Objective,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    state: TrainState,
    params: Params | None = None,
) -> TrainState:
    """Returns the state of step 0, from random parameters or from the given ones. `state` gives the shardings.

    Parameters are initialized whole on every device and sharded afterwards: how a function of random bits rounds
    depends on the sharding, and a seed gives the same state on every mesh. A device gets only its part of given values.
    """
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    whole = shardings.step  # on every device
    with jax.set_mesh(whole.mesh):
        if params is None:
            params = jax.jit(objective.init, out_shardings=whole)(
                root_key(train.seed, "parameters")
            )
            return jax.jit(_fresh_state(optimizer, train), out_shardings=shardings)(params)
        step, divided = jax.tree.map(_divide, (np.int32(0), params), (whole, shardings.params))
        moments = jax.jit(
            make_optimizer(optimizer, train.num_steps).init, out_shardings=shardings.optimizer
        )
        return TrainState(step, divided, moments(divided))


def _divide(leaf: Array, sharding: NamedSharding) -> jax.Array:
    """Returns an array that every process has, in parts on the devices of all. Nothing refers to the given one."""
    # of a JAX array the first of several devices would take the buffer (jax 0.10.2)
    if sharding.is_fully_addressable:
        return jax.device_put(np.asarray(leaf), sharding, may_alias=False)
    host = np.array(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def abstract_state(
    objective: Objective, optimizer: OptimizerConfig, train: TrainConfig, mesh: Mesh | AbstractMesh
) -> TrainState:
    """Returns the shapes, dtypes and shardings of the state, without computing it."""
    shapes = jax.eval_shape(
        lambda: _fresh_state(optimizer, train)(objective.init(jax.random.key(0)))
    )
    shardings = tree_shardings(mesh, shapes, over_data=train.divides_state)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def _fresh_state(optimizer: OptimizerConfig, train: TrainConfig) -> Callable[[Params], TrainState]:
    transformation = make_optimizer(optimizer, train.num_steps)
    return lambda params: TrainState(jnp.zeros((), jnp.int32), params, transformation.init(params))


def train_step(
    objective: Objective,
    optimizer: OptimizerConfig,
    train: TrainConfig,
    mesh: Mesh,
    state: TrainState,
    first_step: int = 0,
) -> Callable[[TrainState, Batch, jax.Array], tuple[TrainState, Metrics]]:
    """Returns the step (state, batch, key of dropout) -> (state, metrics), a pure function. `Program` compiles it.

    `state` gives the shapes and shardings of the training state (`init_state`, `abstract_state`). The batch is global,
    with rows sharded over data x fsdp. The learning rate schedule begins at `first_step` and has train.num_steps.

    With train.zero1 a step begins with an all-gather of the parameters, and reduce-scatters the gradients. The matrices
    of the layers are gathered in the compute dtype, in which they are multiplied.
    Source: Rajbhandari et al. 2020, stage 1; Xu et al. 2020.
    """
    # Between steps each device holds and updates its own part of the parameters, and within a step all of them.
    divided = (
        jax.tree.map(lambda leaf: leaf.sharding, state.params) if train.divides_state else None
    )
    transformation = make_optimizer(optimizer, train.num_steps, first_step)
    rate = learning_rate_at(optimizer, train.num_steps, first_step)
    kept = (*objective.unused, *(["encoder"] if optimizer.freeze_encoder else []))

    def whole_step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Metrics]:
        batch = objective.prepare(batch, state.step)
        denominators = objective.denominators(batch)
        further = objective.further_losses(state.step - first_step, train.num_steps)
        # By name, whatever generator a program has made JAX's default: other bits would be another
        # run.
        step_key = jax.random.fold_in(
            jax.random.wrap_key_data(key, impl="threefry2x32"), state.step
        )

        def loss_of(
            metrics: _Pairs, denominators: dict[str, jax.Array]
        ) -> tuple[jax.Array, _Pairs]:
            terms = [metrics[name][0] / denominator for name, denominator in denominators.items()]
            terms += [
                metrics[name][0] / metrics[name][1] * worth for name, worth in further.items()
            ]
            return jnp.sum(jnp.stack(terms)), metrics

        def gradients_of(
            params: Params, batch: Batch, key: jax.Array, denominators: dict[str, jax.Array]
        ) -> tuple[tuple[jax.Array, _Pairs], Params]:
            losses = lambda params: objective.losses(params, batch, key)  # noqa: E731
            return jax.value_and_grad(
                lambda params: loss_of(losses(params), denominators), has_aux=True
            )(params)

        params = state.params
        if divided is not None:
            params = _gather(params, tree_shardings(mesh, params), objective.model.compute_dtype)
        given = (params, batch, step_key, denominators)
        options = {"gradient_dtype": objective.model.gradient_dtype, "shardings": divided}
        if train.microbatches == 1 and divided is None:
            (loss, metrics), gradients = gradients_of(*given)
        elif objective.needs_whole_batch:
            (loss, metrics), gradients = gradients_of_whole(
                objective.outputs,
                lambda outputs: loss_of(objective.losses_of(outputs, batch), denominators),
                train.microbatches,
                *(params, batch, step_key),
                **options,
            )
        else:
            (loss, metrics), gradients = sum_over_microbatches(
                gradients_of, train.microbatches, *given, **options
            )

        if divided is not None:
            gradients = jax.lax.with_sharding_constraint(gradients, divided)
        gradients = _without(gradients, kept)  # they have no part in the norm
        own = objective.apart(state.params)
        updates, optimizer_state = transformation.update(gradients, state.optimizer, own)
        # nor are they decayed, as by Google's optimizer
        updates = _without(objective.together(cast(Params, updates)), kept)
        of_step = {
            "loss": loss,
            "grad_norm": global_norm(gradients),
            "learning_rate": rate(state.step),
        }
        metrics |= batch_counts(batch) | {
            name: (value, jnp.ones((), jnp.float32)) for name, value in of_step.items()
        }
        new_state = TrainState(
            state.step + 1, apply_updates(state.params, updates), optimizer_state
        )
        return new_state, Metrics.of(metrics)

    return whole_step


def _without(tree: Params, paths: tuple[str, ...]) -> Params:
    """Returns a tree with zeros below some paths."""
    below = lambda path: any(f"{path_name(path)}/".startswith(f"{prefix}/") for prefix in paths)  # noqa: E731
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.zeros_like(leaf) if below(path) else leaf, tree
    )


def _gather(params: Params, shardings: PyTree, compute_dtype: str) -> Params:
    """Returns parameters in `shardings`, with the matrices of layers rounded to the compute dtype before they are sent.

    They are float32 again when they come back, as gradients are to be, and the products round them to the same values.
    """

    def gather(path: KeyPath, leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        name = path_name(path)
        sent = leaf.astype(compute_dtype) if is_stacked(name) and name.endswith("kernel") else leaf
        # With the barrier libtpu's programs move fewer bytes of HBM (docs/optimization_log.md, entry 36).
        gathered = jax.lax.optimization_barrier(jax.lax.with_sharding_constraint(sent, sharding))
        return gathered.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(gather, params, shardings)


def eval_step(
    objective: Objective, mesh: Mesh, params: Params
) -> Callable[[Params, Batch], Metrics]:
    """Returns the evaluation (params, batch) -> metrics, a pure function without dropout. `Program` compiles it.

    `params` gives the shapes and shardings. Parameters that ZeRO-1 divides are gathered as in a training step.
    """
    shardings, whole = (
        jax.tree.map(lambda leaf: leaf.sharding, params),
        tree_shardings(mesh, params),
    )

    def step(params: Params, batch: Batch) -> Metrics:
        if shardings != whole:
            params = _gather(params, whole, objective.model.compute_dtype)
        return Metrics.of(objective.losses(params, objective.prepare(batch), None))

    return step


def batch_counts(batch: Batch) -> _Pairs:
    """Returns the counts of a batch without padding, from which throughput is computed.

    "tokens" include [CLS] and [SEP]. "words" need `word_starts`; they include punctuation, not special tokens.
    """
    inside = in_sequences(batch.sequence_ids, batch.cls_positions.shape[1])
    lengths = jnp.sum(inside, axis=-1).astype(jnp.float32)  # [B, M]
    counts = {
        "sequences": jnp.sum(batch.sequence_weights > 0, dtype=jnp.float32),
        "tokens": jnp.sum(lengths),
        "squared_lengths": jnp.sum(lengths**2),
        "predictions": jnp.sum(batch.mlm_weights)
        if batch.mlm_weights is not None
        else jnp.zeros((), jnp.float32),
    }
    if batch.word_starts is not None:
        # [B, M]: [CLS] A [SEP] B [SEP]
        pairs = jnp.any(inside & (batch.type_ids == 1)[:, None, :], axis=-1)
        special = jnp.sum((batch.sequence_weights > 0) * (2.0 + pairs))
        counts["words"] = (
            jnp.sum(batch.word_starts & (batch.sequence_ids > 0)).astype(jnp.float32) - special
        )
    return {name: (count, jnp.ones((), jnp.float32)) for name, count in counts.items()}
