# SPDX-License-Identifier: Apache-2.0
"""Comparison of the outputs of two models on sample text."""

import dataclasses
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
    texts: list[Any] = [_fitting(one, parts[:num_parts]) for parts in _SAMPLE]
    outputs = []
    for bert in (one, other):
        batch = make_batch(bert.tokenizer, texts, bert.config.max_positions, "refuse")
        length = batch.token_ids.shape[1]
        positions = np.broadcast_to(np.arange(length, dtype=np.int32), batch.token_ids.shape)
        config = dataclasses.replace(bert.config, compute_dtype="float32", gradient_dtype="float32")
        outputs.append(_all_outputs(config, bert.params, batch._replace(mlm_positions=positions)))
    names = [*outputs[0], *(name for name in outputs[1] if name not in outputs[0])]
    return {name: _largest(*(output.get(name) for output in outputs)) for name in names}


def _fitting(bert: Pretrained, parts: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the parts, each cut to as many characters as the model has positions for."""
    room = max(1, (bert.config.max_positions - 1) // len(parts) - 1)
    return tuple(
        next(
            part[:end]
            for end in range(len(part), -1, -1)
            if len(bert.tokenizer.encode(part[:end])) <= room
        )
        for part in parts
    )


@partial(jax.jit, static_argnums=0)
def _all_outputs(config: ModelConfig, params: Params, batch: Batch) -> dict[str, jax.Array]:
    """Returns hidden states, pooled outputs if any, and the logits of every head."""
    encoded = encode(config, params, batch)
    outputs = {"hidden": encoded.hidden} | (
        {} if encoded.pooled is None else {"pooled": encoded.pooled}
    )
    parts = parts_of(params)
    for part in parts:
        head = next(
            (
                head
                for head in HEADS.values()
                if head.own_parts == {part} and has_parts(head, parts)
            ),
            None,
        )
        if head is not None:
            outputs[part] = forward(config, params, batch, head)
    if "mlm" in outputs:
        outputs["mlm"] = outputs["mlm"][..., : config.vocab_size]
    return outputs


def _largest(one: jax.Array | None, other: jax.Array | None) -> float:
    if one is None or other is None:
        return float("nan")
    if one.shape != other.shape:
        return float("inf")
    return float(np.abs(np.asarray(one, np.float32) - np.asarray(other, np.float32)).max())
