# SPDX-License-Identifier: Apache-2.0
"""Texts whose tokens' vectors are compared one by one: how they are cut, filled up, and which tokens count.

Source: Khattab and Zaharia 2020, "ColBERT", section 3.2: queries are filled up with [MASK], punctuation of passages is
left out.
"""

from typing import NamedTuple

import numpy as np

from bert_jax.batch import UNSCORED, UNSEEN
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.text.fitting import join_texts
from bert_jax.text.tokenizer import Tokenizer


class Marked(NamedTuple):
    """The tokens of a query or passage."""

    token_ids: np.ndarray  # [L] int32
    marks: np.ndarray  # [L] uint8, as in `batch.Row`
    was_cut: bool


def most_tokens(config: TaskConfig, is_query: bool) -> int:
    """Returns the most tokens of a query or passage, [CLS], [SEP] and prompt included."""
    has_own = is_query and config.embedding.kind == "multi_vector"
    return config.embedding.query_length if has_own else config.max_seq_length


def fit_tokens(config: TaskConfig, tokenizer: Tokenizer, ids: list[int], is_query: bool) -> Marked:
    """Returns [CLS] ids [SEP], of a query with the [MASK]s that fill it up, and the marks of all of them."""
    settings, most = config.embedding, most_tokens(config, is_query)
    fitted = join_texts(tokenizer, ids, None, most)
    token_ids = fitted.token_ids
    if not is_query:
        known = [tokenizer.pieces.ids.get(word) for word in settings.skipped()]
        skipped = np.isin(token_ids, [number for number in known if number is not None])
        return Marked(token_ids, (UNSCORED * skipped).astype(np.uint8), fitted.was_cut)
    missing = max(min(settings.query_expansion, most) - len(token_ids), 0)
    marks = np.zeros(len(token_ids) + missing, np.uint8)
    marks[len(token_ids) :] = 0 if settings.expansion_is_seen else UNSEEN
    filled = np.append(token_ids, np.full(missing, tokenizer.mask_id, np.int32))
    return Marked(filled, marks, fitted.was_cut)
