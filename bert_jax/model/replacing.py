# SPDX-License-Identifier: Apache-2.0
"""Replaced-token pre-training: a small generator fills in masks, and the model learns which tokens are not the text's.

Source: Clark et al. 2020, "ELECTRA", section 2; He et al. 2023, "DeBERTaV3", section 3, for tables of their own.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from bert_jax.batch import Batch, PyTree
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.heads.replaced import REPLACED
from bert_jax.model.losses import Pair
from bert_jax.model.masking import bits_of_predictions
from bert_jax.model.objective import Params, PretrainingObjective, forward, init_params
from bert_jax.model.product import widened
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import GeneratorConfig, MaskingConfig, PretrainConfig

# the part of the parameters beside the model's own
GENERATOR = "generator"


def objective_of(
    config: PretrainConfig,
    model: ModelConfig,
    masking: MaskingConfig,
    mask_id: int,
    never_predicted: tuple[int, ...],
) -> PretrainingObjective:
    """Returns the objective of a run of pre-training, for one of its phases or for its held-out text."""
    ids = mask_id, never_predicted
    num_steps = config.train.num_steps + config.phase2.num_steps
    if config.generator.num_layers:
        return ReplacedTokens(model, masking, *ids, config.generator, num_steps)
    others = config.train.next_sentence, config.teacher, num_steps
    return PretrainingObjective(model, masking, *ids, *others)


class ReplacedTokens(PretrainingObjective):
    """The generator's masked language model, and the model's guess, for each token, whether it was replaced.

    The generator learns by its own loss alone: a word that it draws is not differentiated. Draws are a function of
    seed, sequence, epoch and position, as masks are.
    """

    def __init__(
        self,
        model: ModelConfig,
        masking: MaskingConfig,
        mask_id: int,
        never_predicted: tuple[int, ...],
        generator: GeneratorConfig,
        num_steps: int = 1,
    ) -> None:
        ids = mask_id, never_predicted
        super().__init__(model, masking, *ids, next_sentence=False, num_steps=num_steps)
        self.unused = ()
        self.generator = generator.model_for(model)
        self.settings = generator

    def init(self, key: jax.Array) -> Params:
        params = init_params(self.model, key, REPLACED)
        generator = init_params(self.generator, jax.random.fold_in(key, 1), MASKED_LM)
        if self.settings.tables == "shared":
            return params | {GENERATOR: _with_tables(generator, {})}
        return _with_tables(params, _tables(generator)) | {GENERATOR: generator}

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        real = jnp.sum(_real_tokens(batch))
        return super().denominators(batch) | {
            "replaced_loss": jnp.maximum(real, 1.0) / self.settings.weight
        }

    def losses(
        self, params: Params, batch: Batch, dropout_key: jax.Array | None
    ) -> dict[str, Pair]:
        keys: tuple[jax.Array | None, ...] = (None, None)
        if dropout_key is not None:
            keys = (jax.random.fold_in(dropout_key, 1), dropout_key)
        generator = params[GENERATOR]
        if self.settings.tables == "shared":
            generator = _with_tables(generator, _tables(params))
        words = forward(self.generator, generator, batch, MASKED_LM, keys[0])
        weights = batch.mlm_weights
        metrics = MASKED_LM.losses(words, batch, weights)
        found = {f"mlm_{name}": pair for name, pair in metrics.items()}

        bits = bits_of_predictions(batch, self.masking.seed)
        drawn = draw_words(jax.lax.stop_gradient(words), bits)
        replaced, is_other = put_words(batch, drawn)
        own = model_alone(params)
        scores = widened(forward(self.model, own, replaced, REPLACED, keys[1])[..., 0])
        loss = jax.nn.softplus(scores) - scores * is_other
        is_right = (scores > 0) == (is_other > 0)

        def mean(values: jax.Array, weights: jax.Array) -> Pair:
            return jnp.sum(values * weights), jnp.sum(weights)

        real = _real_tokens(batch)
        return found | {
            "replaced_loss": mean(loss, real),
            "replaced_accuracy": mean(is_right, real),
            "replaced_recall": mean(is_right, is_other * real),
        }

    def apart(self, params: Params) -> Params:
        return self._with_generators(jnp.subtract, params)

    def together(self, updates: Params) -> Params:
        return self._with_generators(jnp.add, updates)

    def _with_generators(self, combine: Callable[..., jax.Array], params: Params) -> Params:
        """Returns parameters whose tables are combined with the generator's, if it has its own."""
        if self.settings.tables == "shared":
            return params
        own = _tables(params)
        of_generator = _tables(params[GENERATOR])
        return _with_tables(params, jax.tree.map(combine, own, of_generator))


def draw_words(logits: jax.Array, bits: jax.Array) -> jax.Array:
    """Returns a word [B, P] int32 for each of the logits [B, P, V], drawn by their softmax with random bits [B, P]."""
    sums = jnp.cumsum(jax.nn.softmax(widened(logits), axis=-1), axis=-1)
    share = (bits >> 8).astype(jnp.float32) * 2.0**-24
    # one of 0 probability has the sum of the word before it
    return jnp.sum(sums <= share[..., None] * sums[..., -1:], axis=-1, dtype=jnp.int32)


def put_words(batch: Batch, words: jax.Array) -> tuple[Batch, jax.Array]:
    """Returns the batch with words [B, P] where tokens are predicted, and which tokens [B, L] are others, 0 or 1."""
    token_ids = batch.token_ids.astype(jnp.int32)
    length = token_ids.shape[1]
    # the places that fill up a row are beyond it, and left out
    places = jnp.where(batch.mlm_weights > 0, batch.mlm_positions, length)

    def put(row: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
        return row.at[places].set(values, mode="drop")

    is_other = (words != batch.mlm_labels).astype(jnp.float32)
    new_ids = jax.vmap(put)(token_ids, places, words)
    others = jax.vmap(put)(jnp.zeros(token_ids.shape, jnp.float32), places, is_other)
    return batch._replace(token_ids=new_ids), others


def _real_tokens(batch: Batch) -> jax.Array:
    return (batch.sequence_ids != 0).astype(jnp.float32)


def _tables(params: Params) -> dict[str, PyTree]:
    """Returns the tables of the embeddings, without their norm and what else is no table."""
    embeddings = params["encoder"]["embeddings"]
    return {name: part for name, part in embeddings.items() if "embedding" in part}


def _with_tables(params: Params, tables: dict[str, PyTree]) -> Params:
    """Returns parameters with these tables in place of their own."""
    embeddings = params["encoder"]["embeddings"]
    others = {name: part for name, part in embeddings.items() if "embedding" not in part}
    return params | {"encoder": params["encoder"] | {"embeddings": others | tables}}


def model_alone(params: Params) -> Params:
    """Returns the parameters of the model, without those of a generator."""
    return {name: part for name, part in params.items() if name != GENERATOR}
