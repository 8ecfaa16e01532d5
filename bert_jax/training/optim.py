# SPDX-License-Identifier: Apache-2.0
"""The optimizer and the learning rate. The only home of Optax."""

import operator
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from bert_jax.batch import PyTree
from bert_jax.devices.sharding import (
    constrain_rows,
    is_stacked,
    match_rule,
    num_row_shards,
    path_name,
    whole,
)
from bert_jax.settings.pretraining import OptimizerConfig

# (pattern of a whole parameter path, whether weight decay applies). The first match wins. Source: google-research/bert
# optimization.py, which excludes LayerNorm and every bias, and so decays all embeddings.
DECAY_RULES: tuple[tuple[str, bool], ...] = (
    (r"(.*/)?norm/(scale|bias)", False),
    (r".*/(bias|output_bias|score_bias/embedding)", False),
    (r"(encoder/(embeddings/(word|position|type)|distances)|mlm/words)/embedding", True),
    (r".*/kernel", True),
    (r"(?!encoder/).*", False),  # the weights of a probe's layers, and all others of a custom head
)

Step: TypeAlias = jax.typing.ArrayLike  # one step, or an array of them


def learning_rate_at(
    config: OptimizerConfig, num_steps: int, first_step: int = 0
) -> Callable[[Step], jax.Array]:
    """Returns the learning rate as a function of the step. The schedule begins at `first_step` and has `num_steps`.

    During warm-up it is rate x step / warmup_steps, so the first step has rate 0. After warm-up it is
    rate x (1 - step / num_steps) ** decay_power: the decay counts from step 0, so the rate drops at the end of warm-up.
    Source: google-research/bert optimization.py. "cosine" decays from the end of warm-up to 0, and "stable" as 1 -
    sqrt(share of the last `decay_rate` of the steps): Loshchilov and Hutter 2017; Haegele et al. 2024.
    """
    warmup_steps = config.warmup_of(num_steps)
    last = config.decay_rate * num_steps

    def rate(step: Step) -> jax.Array:
        # subtracted as integers: float32 has every whole number up to 2^24 alone
        step = jnp.asarray(jnp.asarray(step) - first_step, jnp.float32)
        left = jnp.maximum(num_steps - step, 0) / num_steps
        if config.schedule == "cosine":
            done = jnp.clip((step - warmup_steps) / max(1, num_steps - warmup_steps), 0, 1)
            left = (1 + jnp.cos(jnp.pi * done)) / 2
        elif config.schedule == "stable":
            left = 1 - jnp.sqrt(jnp.clip((step - num_steps + last) / last, 0, 1)) if last else 1.0
        decayed = config.learning_rate * (
            left if config.decay_power == 1 else left**config.decay_power
        )
        warming = config.learning_rate * step / max(1, warmup_steps)
        return jnp.where(step < warmup_steps, warming, decayed)

    return rate


class Moments(NamedTuple):
    """Running means of the gradient, in OptimizerConfig.state_dtype, and of its square, in float32; Muon lacks this."""

    mean: PyTree
    square: PyTree


def scale_by_uncorrected_adam(
    beta1: float, beta2: float, epsilon: float
) -> optax.GradientTransformation:
    """Returns Adam's ratio mean / (sqrt(square) + epsilon) without bias correction.

    Source: google-research/bert optimization.py, AdamWeightDecayOptimizer.
    """

    def update(
        gradients: PyTree, moments: Moments, params: PyTree = None
    ) -> tuple[PyTree, Moments]:
        mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, moments.mean, gradients)
        square = jax.tree.map(
            lambda v, g: beta2 * v + (1 - beta2) * g * g, moments.square, gradients
        )
        ratio = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mean, square)
        return ratio, Moments(mean, square)

    def init(params: PyTree) -> Moments:
        return Moments(jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def clip_by_global_norm(most: float) -> optax.GradientTransformation:
    """Returns a scaling of all gradients by one number, so that their global norm is `most` if it was more.

    Optax divides: XLA then writes and reads them once more. A factor is multiplied in where they are read.
    """

    def update(gradients: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        # 1 exactly, if nothing is to be clipped
        factor = most / jnp.maximum(global_norm(gradients), most)
        return jax.tree.map(lambda g: g * factor.astype(g.dtype), gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]


def decay_mask(params: PyTree) -> PyTree:
    """Returns a tree that is True where weight decay applies. Raises: InputError if no rule matches a parameter."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: match_rule(DECAY_RULES, path_name(path)), params
    )


def scale_by_layer_trust_ratio(
    applies_to: Callable[[PyTree], PyTree],
) -> optax.GradientTransformation:
    """Returns LAMB's scaling: each parameter's update times |parameter| / |update|, or times 1 if a norm is 0.

    Stacked parameters have one norm per layer. Rows that pad the vocabulary are zero in parameter and update, and add
    nothing to a norm. `applies_to(params)` is True for the parameters to scale. Source: You et al. 2019, algorithm 2.
    """

    def scale(path: KeyPath, update: jax.Array, param: jax.Array, applies: bool) -> jax.Array:
        if not applies:
            return update
        axes = _axes_of_one(path, param)
        size, change = (
            jnp.sqrt(jnp.sum(jnp.square(x), axes, keepdims=True)) for x in (param, update)
        )
        known = (size > 0) & (change > 0)
        return update * jnp.where(known, size / jnp.where(known, change, 1), 1)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return jax.tree_util.tree_map_with_path(scale, updates, params, applies_to(params)), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]


def _axes_of_one(path: KeyPath, array: jax.Array) -> tuple[int, ...]:
    """Returns the axes of one parameter: in a stack of layers all but the first, so that stacking changes nothing."""
    return tuple(range(1 if is_stacked(path_name(path)) else 0, array.ndim))


# Of Muon: the momentum, and the coefficients of a polynomial that brings singular values from 0 to 1 near to 1.
_MOMENTUM = 0.95
_ODD = (3.4445, -4.7750, 2.0315)
# the root of the mean square of an update of AdamW's
_AS_LARGE = 0.2


def is_matrix(params: PyTree) -> PyTree:
    """Returns a tree that is True for the matrices inside layers: one for each kernel, with the heads side by side."""

    def is_one(path: KeyPath, _: jax.Array) -> bool:
        name = path_name(path)
        return is_stacked(name) and name.endswith("/kernel")

    return jax.tree_util.tree_map_with_path(is_one, params)


def is_no_matrix(params: PyTree) -> PyTree:
    """Returns a tree that is True for what `is_matrix` leaves."""
    return jax.tree.map(operator.not_, is_matrix(params))


def scale_by_muon() -> optax.GradientTransformation:
    """Returns Muon's update of stacks of matrices: Nesterov's momentum, made orthogonal, as large as AdamW's updates.

    Momentum has no bias correction, which would change the direction. Source: Jordan et al. 2024; Liu et al. 2025 for
    the size, 0.2 as the root of the mean square.
    """

    def blend(mean: jax.Array, gradient: jax.Array) -> jax.Array:
        return _MOMENTUM * mean + (1 - _MOMENTUM) * gradient

    def scaled(matrices: jax.Array) -> jax.Array:
        return orthogonalized(matrices) * (_AS_LARGE * max(matrices.shape[-2:]) ** 0.5)

    def update(
        gradients: PyTree, moments: Moments, params: PyTree = None
    ) -> tuple[PyTree, Moments]:
        mean = jax.tree.map(blend, moments.mean, gradients)
        ahead = jax.tree.map(blend, mean, gradients)
        return jax.tree.map(scaled, ahead), Moments(mean, ())

    def init(params: PyTree) -> Moments:
        return Moments(jax.tree.map(jnp.zeros_like, params), ())

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def orthogonalized(matrices: jax.Array) -> jax.Array:
    """Returns matrices [L, in, out] with singular values from 0.68 to 1.21, by five steps of Newton-Schulz.

    Values below 0.0015 of the matrix's norm stay smaller. Devices that divide rows share out the matrices, or take all
    of them if they are too few: of parts of matrices, each product would gather what it multiplies. Optax's
    `scale_by_muon` has the same steps, and corrects the bias of the momentum.
    """
    linear, cubic, quintic = _ODD
    # products of the shorter side are smaller
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    missing = -len(x) % num_row_shards()
    if missing < len(x):
        place = constrain_rows
        x = jnp.pad(x, ((0, missing), (0, 0), (0, 0)))
    else:
        place = whole
    x = place(x)
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = linear * x + (cubic * square + quintic * square @ square) @ x
    x = place(x)[: len(matrices)]
    return x.mT if is_tall else x


def clip_updates(
    adamw: optax.GradientTransformation, beta2: float, epsilon: float
) -> optax.GradientTransformation:
    """Returns StableAdamW: updates of `adamw`, a chain that begins with Adam, divided by max(1, RMS).

    RMS is the root of the mean of gradient^2 / max(v, epsilon^2) over a parameter, one per layer of a stack; v is the
    corrected mean of the squares, with those of this step. Weight decay is divided too, as by a lower rate. Rows that
    pad the vocabulary count in the mean. Source: Wortsman et al. 2023, algorithm 2; Warner's library optimi.
    """

    def update(gradients: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        updates, state = adamw.update(gradients, state, params)
        correction = 1 - beta2 ** state[0].count

        def clip(
            path: KeyPath, update: jax.Array, gradient: jax.Array, square: jax.Array
        ) -> jax.Array:
            ratio = jnp.square(gradient) / jnp.maximum(square / correction, epsilon**2)
            rms = jnp.sqrt(jnp.mean(ratio, _axes_of_one(path, ratio), keepdims=True))
            return update / jnp.maximum(rms, 1)

        return jax.tree_util.tree_map_with_path(clip, updates, gradients, state[0].nu), state

    return optax.GradientTransformation(adamw.init, update)  # pyright: ignore[reportArgumentType]


def scale_by_depth(layer_decay: float) -> optax.GradientTransformation:
    """Returns a scaling of updates by layer_decay ** (distance from the top).

    Heads and pooler are at the top, the last layer is 1 below, the embeddings are one below the first layer, and so is
    what all layers know of distances. Layers that share their parameters count as one.
    Source: Clark et al. 2020 (ELECTRA), appendix, layer-wise learning rate decay.
    """

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        num_layers = updates["encoder"]["layers"]["attention"]["query"]["kernel"].shape[0]

        def scale(path: KeyPath, update: jax.Array) -> jax.Array:
            name = path_name(path)
            if name.startswith(
                ("encoder/embeddings/", "encoder/score_bias/", "encoder/distances/")
            ):
                return update * layer_decay ** (num_layers + 1)
            if not is_stacked(name):
                return update
            factors = layer_decay ** jnp.arange(num_layers, 0, -1, dtype=update.dtype)
            return update * factors.reshape(-1, *(1,) * (update.ndim - 1))

        return jax.tree_util.tree_map_with_path(scale, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)  # pyright: ignore[reportArgumentType]


def store_mean_in(
    dtype: str, adam: optax.GradientTransformation, mean: str
) -> optax.GradientTransformation:
    """Returns Adam with its mean, the field `mean` of its state, kept in `dtype` between steps.

    A step computes in float32 and rounds the mean afterwards, so its own update does not see that rounding. The mean of
    the gradient moves by a tenth of the difference each step, far more than bfloat16's relative precision of 1/512. The
    mean square falls by a thousandth of its value at most: in bfloat16 that would round back to the old value, and it
    would never fall. So it stays in float32.
    """

    def cast(state: PyTree, dtype: jax.typing.DTypeLike) -> PyTree:
        return state._replace(
            **{mean: jax.tree.map(lambda leaf: leaf.astype(dtype), getattr(state, mean))}
        )

    def update(gradients: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        ratio, state = adam.update(gradients, cast(state, jnp.float32), params)
        return ratio, cast(state, dtype)

    return optax.GradientTransformation(lambda params: cast(adam.init(params), dtype), update)  # pyright: ignore[reportArgumentType]


def reset_moments(state: PyTree) -> PyTree:
    """Returns the optimizer's state with Adam's means, and the count that corrects their bias, at zero.

    The step count of the learning rate is kept.
    """
    is_adam = lambda part: isinstance(part, (Moments, optax.ScaleByAdamState))  # noqa: E731
    zeroed = lambda part: jax.tree.map(jnp.zeros_like, part) if is_adam(part) else part  # noqa: E731
    return jax.tree.map(zeroed, state, is_leaf=is_adam)


def make_optimizer(
    config: OptimizerConfig, num_steps: int, first_step: int = 0
) -> optax.GradientTransformation:
    """Returns BERT's AdamW, LAMB, StableAdamW or Muon: clip, ratio, decoupled weight decay, their own scaling, rate.

    It expects the gradients of the global batch, so clipping comes after all reductions.
    """
    adam = (
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
        if config.bias_correction
        else scale_by_uncorrected_adam(config.beta1, config.beta2, config.epsilon)
    )
    if config.state_dtype != "float32":
        adam = store_mean_in(config.state_dtype, adam, "mu" if config.bias_correction else "mean")
    ratios = (adam,)
    if config.name == "muon":
        muon = store_mean_in(config.state_dtype, scale_by_muon(), "mean")
        ratios = (optax.masked(muon, is_matrix), optax.masked(adam, is_no_matrix))
    # Decay comes after Adam's ratio, so that the root of the squares does not divide it
    # (decoupled).
    adamw = (*ratios, optax.add_decayed_weights(config.weight_decay, decay_mask))
    if config.name == "stable_adamw":
        adamw = (clip_updates(optax.chain(*adamw), config.beta2, config.epsilon),)
    everywhere = lambda params: jax.tree.map(lambda _: True, params)  # noqa: E731
    trust_ratio = scale_by_layer_trust_ratio(
        everywhere if config.trust_ratio_for == "all" else decay_mask
    )
    return optax.chain(
        clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        *adamw,
        *([trust_ratio] if config.name == "lamb" else []),
        *([scale_by_depth(config.layer_decay)] if config.layer_decay != 1 else []),
        optax.scale_by_learning_rate(learning_rate_at(config, num_steps, first_step)),
    )


def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Returns the parameters after an update."""
    return optax.apply_updates(params, updates)


global_norm = optax.tree.norm  # the square root of the sum of all squares
