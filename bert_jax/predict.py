# SPDX-License-Identifier: Apache-2.0
"""What a trained model says of new text."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from bert_jax.batch import Batch
from bert_jax.config import ModelConfig
from bert_jax.errors import InputError
from bert_jax.model.objective import Params, task_forward
from bert_jax.pretrained import Pretrained, make_batch


class Filled(NamedTuple):
    """A guess for one [MASK] of a text."""

    token: str
    probability: float


def fill_masks(bert: Pretrained, texts: Sequence[str], num_guesses: int = 5) -> list[list[list[Filled]]]:
    """Returns the likeliest tokens, best first: for every text, for every [MASK] in it, `num_guesses` of them.

    Raises: InputError if a text has no [MASK] or is longer than the model's positions, or if the model is causal or
    has no masked language model.
    """
    if bert.config.causal:
        raise InputError(
            "this model reads from left to right and predicts what comes next; a blank needs one that sees both sides"
        )
    if "mlm" not in bert.params:
        raise InputError(f"this model has no head that predicts words, its task being {bert.task}; give another")
    mask_token = bert.tokenizer.vocab[bert.tokenizer.mask_id]
    batch = make_batch(bert.tokenizer, texts, bert.config.max_positions, allow_special=True)
    places = [np.flatnonzero(row == bert.tokenizer.mask_id) for row in batch.token_ids]
    for number, place in enumerate(places, 1):
        if not len(place):
            raise InputError(
                f"text {number} has no {mask_token}: {texts[number - 1]!r}; write it where a word is missing"
            )
    most = max(len(place) for place in places)
    positions = np.zeros((len(texts), most), np.int32)
    for row, place in enumerate(places):
        positions[row, : len(place)] = place
    probabilities = np.asarray(_mask_probabilities(bert.config, bert.params, batch._replace(mlm_positions=positions)))

    def guesses(row: np.ndarray) -> list[Filled]:
        best = np.argsort(-row, kind="stable")[:num_guesses]
        return [Filled(str(bert.tokenizer.vocab[token]), float(row[token])) for token in best]

    return [[guesses(probabilities[row, index]) for index in range(len(place))] for row, place in enumerate(places)]


@partial(jax.jit, static_argnums=0)
def _mask_probabilities(config: ModelConfig, params: Params, batch: Batch) -> jax.Array:
    logits = task_forward(config, params, batch, "masked_lm")
    return jax.nn.softmax(logits, axis=-1)[..., : config.vocab_size]
