# SPDX-License-Identifier: Apache-2.0
"""Texts whose tokens' vectors are compared one by one: how they are cut, filled up, and which tokens count.

Source: Khattab and Zaharia 2020, "ColBERT", section 3.2: queries are filled up with [MASK], punctuation of passages is
left out.
"""

from typing import Any, NamedTuple

import numpy as np

from bert_jax.batch import UNSCORED, UNSEEN, Row
from bert_jax.batches.pack import StoredRows
from bert_jax.errors import InputError
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


class TokenFit:
    """Makes rows of texts: cuts them, fills up queries, and marks what is not seen and what does not count."""

    def __init__(self, config: TaskConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        known = (tokenizer.pieces.ids.get(word) for word in config.embedding.skipped())
        self._skipped = [number for number in known if number is not None]

    def __call__(self, ids: list[int], is_query: bool) -> Marked:
        """Returns [CLS] ids [SEP], of a query with the [MASK]s that fill it up, and the marks of all of them."""
        settings = self.config.embedding
        most = most_tokens(self.config, is_query)
        fitted = join_texts(self.tokenizer, ids, None, most)
        token_ids = fitted.token_ids
        if not is_query:
            skipped = np.isin(token_ids, self._skipped)
            return Marked(token_ids, (UNSCORED * skipped).astype(np.uint8), fitted.was_cut)
        missing = max(settings.filled_length() - len(token_ids), 0)
        marks = np.zeros(len(token_ids) + missing, np.uint8)
        marks[len(token_ids) :] = 0 if settings.expansion_is_seen else UNSEEN
        filled = np.append(token_ids, np.full(missing, self.tokenizer.mask_id, np.int32))
        return Marked(filled, marks, fitted.was_cut)


class TokenRows(StoredRows):
    """Prepared pairs, whose texts are fitted when a batch has them; they are those of tables."""

    def __init__(self, rows: StoredRows, fit: TokenFit, are_alone: bool) -> None:
        """Makes the rows. `are_alone` says that all their texts are queries, and not the first of each.

        Raises: InputError if queries were cut shorter than they are to be.
        """
        config = fit.config
        most = most_tokens(config, is_query=True)
        if most > config.max_seq_length:
            raise InputError(
                f"embedding.query_length {most} is above the {config.max_seq_length} tokens of prepared texts; lower it"
            )
        self.like(rows)
        self._rows = rows
        self._fit = fit
        self._num_queries = rows.lengths.shape[1] if are_alone else 1
        self.lengths = np.array(rows.lengths)
        queries = self.lengths[:, : self._num_queries]
        filled = np.clip(queries, config.embedding.filled_length(), most)
        queries[:] = np.where(queries > 0, filled, 0)

    def take(self, numbers: np.ndarray) -> list[Row]:
        return [self._fitted(row) for row in self._rows.take(numbers)]

    def _fitted(self, row: Row) -> Row:
        texts = np.split(row.token_ids, np.cumsum(row.lengths)[:-1])
        fitted = [
            self._fit(text[1:-1].tolist(), place < self._num_queries)
            for place, text in enumerate(texts)
        ]
        token_ids = np.concatenate([text.token_ids for text in fitted])
        return row._replace(
            token_ids=token_ids,
            type_ids=np.zeros(len(token_ids), np.uint8),
            lengths=tuple(len(text.token_ids) for text in fitted),
            marks=np.concatenate([text.marks for text in fitted]),
        )

    def __getitem__(self, number: Any) -> Any:
        found = self._rows[number]
        return list(map(self._fitted, found)) if isinstance(number, slice) else self._fitted(found)
