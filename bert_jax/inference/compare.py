# SPDX-License-Identifier: Apache-2.0
"""Comparison of the outputs of two models on sample text."""

import dataclasses
import warnings
from functools import partial
from typing import Any

import jax
import numpy as np

from bert_jax.batch import Batch
from bert_jax.batches.make import make_batch
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.model.heads.table import HEADS, has_parts
from bert_jax.model.objective import Params, encode, forward, parts_of
from bert_jax.settings.model import ModelConfig
from bert_jax.text.fitting import CutWarning

_SAMPLE = (
    ("The old man sat by the river and watched the boats.", "He had done so for thirty-two years!"),
    ("Dr. Smith paid $3.50 (about 3 €) for a café au lait; naïve, isn't it?",),
    (
        "吾輩は猫である。名前はまだ無い。 Все счастливые семьи похожи друг на друга.",
        "العربية हिन्दी 한국어",
    ),
    ("unaffable untrustworthiness " * 12, "a b c d e f g h i j k l m n o p q r s t u v w x y z"),
)


def differences(one: Pretrained, other: Pretrained) -> dict[str, float]:
    """Returns the largest absolute differences of hidden states, pooled outputs and each head's logits on sample text.

    Each model uses its own tokenizer; the difference is infinite if the numbers of tokens differ. It is NaN if one of
    the models lacks the output. Both compute in float32, whatever they were trained in.
    """
    num_parts = max(1, min(one.config.type_vocab_size, other.config.type_vocab_size))
    texts: list[Any] = [parts[:num_parts] for parts in _SAMPLE]
    outputs = []
    for bert in (one, other):
        with warnings.catch_warnings():  # of texts that are cut, which is no matter here
            warnings.simplefilter("ignore", CutWarning)
            batch = make_batch(bert.tokenizer, texts, bert.config.max_positions, "cut")
        length = batch.token_ids.shape[1]
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), batch.token_ids.shape)
        config = dataclasses.replace(bert.config, compute_dtype="float32", gradient_dtype="float32")
        outputs.append(_all_outputs(config, bert.params, batch._replace(mlm_positions=positions)))
    largest = {}
    for name in outputs[0] | outputs[1]:
        first, second = (np.float32(found.get(name, np.nan)) for found in outputs)
        is_same = first.shape == second.shape or not first.shape or not second.shape
        largest[name] = float(np.abs(first - second).max()) if is_same else float("inf")
    return largest


def rounded(params: Params, dtype: str) -> Params:
    """Returns parameters in their own type, with the digits that another one holds."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype).astype(leaf.dtype), params)


@partial(jax.jit, static_argnums=0)
def _all_outputs(config: ModelConfig, params: Params, batch: Batch) -> dict[str, jax.Array]:
    """Returns hidden states, pooled outputs if any, and the logits of every head."""
    encoded = encode(config, params, batch)
    outputs = {"hidden": encoded.hidden} | (
        {} if encoded.pooled is None else {"pooled": encoded.pooled}
    )
    parts = parts_of(params)
    for head in HEADS.values():
        for part in parts:
            if head.own_parts == {part} and has_parts(head, parts) and part not in outputs:
                outputs[part] = forward(config, params, batch, head)
    if "mlm" in outputs:
        outputs["mlm"] = outputs["mlm"][..., : config.vocab_size]
    return outputs
