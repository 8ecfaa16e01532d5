# SPDX-License-Identifier: Apache-2.0
"""The compiled steps of a mesh. A step is a pure function (training/step.py) until it is compiled here."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bert_jax.batch import Batch
from bert_jax.devices.sharding import replicated, row_sharding
from bert_jax.model.keys import root_key
from bert_jax.model.objective import Objective, Params
from bert_jax.settings.pretraining import OptimizerConfig, TrainConfig
from bert_jax.training.step import Metrics, TrainState, eval_step, train_step

_OPTIONS: dict[str, dict[str, bool | str]] = {
    "gpu": {
        # without it GPUs add up the word table's gradient in an order that changes from run to run
        "xla_gpu_exclude_nondeterministic_ops": True,
        # cuBLAS adds biases and computes GELU where it writes a product; XLA tries that for no product of Triton's
        "xla_gpu_enable_triton_gemm": False,
        # one product for query, key and value would be cut apart by three more kernels
        "xla_gpu_dot_merger_threshold_mb": "0",
    }
}
EvalStep = Callable[[Params, Batch], Metrics]  # compiled


class TrainStep:
    """A compiled training step, or one with each of several batches of the same shapes in one call.

    One call costs the host as much as one step. The result is that of single steps within rounding. The given state is
    donated: do not use it again. The key of dropout is an argument, so that runs of all seeds share one program.
    """

    def __init__(
        self, one: jax.stages.Wrapped, several: jax.stages.Wrapped, seed: int, mesh: Mesh
    ) -> None:
        self._one = one
        self._several = several
        self._seed = seed
        self._mesh = mesh

    @functools.cached_property
    def key(self) -> jax.Array:  # on all devices, uint32 [2]
        whole = replicated(self._mesh)
        return jax.jit(
            lambda: jax.random.key_data(root_key(self._seed, "dropout")), out_shardings=whole
        )()

    def __call__(self, state: TrainState, /, *batches: Batch) -> tuple[TrainState, Metrics]:
        return (
            self._one(state, *batches, self.key)
            if len(batches) == 1
            else self._several(state, batches, self.key)
        )

    def lower(self, state: TrainState, batch: Batch, /) -> jax.stages.Lowered:
        return self._one.lower(state, batch, jax.ShapeDtypeStruct((2,), jnp.uint32))


class Program:
    """Compiles steps for a mesh: one step of training, several in a call, and evaluation.

    `options` of the compiler are for training, and replace those of the mesh's platform that have the same names.
    """

    def __init__(self, mesh: Mesh, options: dict[str, bool | str] | None = None) -> None:
        self._mesh = mesh
        self._options = _OPTIONS.get(mesh.devices.flat[0].platform, {}) | (options or {})

    def training(
        self,
        objective: Objective,
        optimizer: OptimizerConfig,
        train: TrainConfig,
        state: TrainState,
        first_step: int = 0,
    ) -> TrainStep:
        """Returns the compiled step of `train_step`'s arguments."""
        step = train_step(objective, optimizer, train, self._mesh, state, first_step)

        def several(
            state: TrainState, batches: tuple[Batch, ...], key: jax.Array
        ) -> tuple[TrainState, Metrics]:
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
            return jax.lax.scan(lambda state, batch: step(state, batch, key), state, stacked)

        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        whole = replicated(self._mesh)
        compile_step = functools.partial(
            jax.jit,  # only here: inner functions may have no compiler options
            in_shardings=(shardings, row_sharding(self._mesh), whole),
            out_shardings=(shardings, whole),
            donate_argnums=0,
            compiler_options=self._options,
        )
        return TrainStep(compile_step(step), compile_step(several), train.seed, self._mesh)

    def evaluation(self, objective: Objective, params: Params) -> EvalStep:
        """Returns the compiled evaluation (params, batch) -> metrics of `eval_step`'s arguments."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, params), row_sharding(self._mesh)
        step = eval_step(objective, self._mesh, params)
        return jax.jit(step, in_shardings=shardings, out_shardings=replicated(self._mesh))
