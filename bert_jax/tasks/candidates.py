# SPDX-License-Identifier: Apache-2.0
"""Prepared pairs as a reranker reads them: each query with every text that was prepared with it, as a pair."""

from typing import Any

import numpy as np

from bert_jax.batch import Row
from bert_jax.batches.pack import StoredRows
from bert_jax.tasks.embeddings.prepared import PreparedPairs
from bert_jax.text.fitting import join_texts
from bert_jax.text.tokenizer import Tokenizer


class CandidateRows(StoredRows):
    """The rows of prepared pairs, joined to pairs of texts when a batch has them.

    Grades are the scores of the data, or else 1 of the positive and 0 of hard negatives. They are the rows of the table
    that was prepared, but for a pair of two texts that were both cut there: the second then keeps the odd token.
    """

    def __init__(self, pairs: PreparedPairs, tokenizer: Tokenizer, max_length: int) -> None:
        rows = pairs.rows
        self.like(rows)
        self._rows = rows
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._has_grades = pairs.are_taught or pairs.is_graded
        # [CLS] and [SEP] stand at the ends of every text that was prepared
        added = 2 + len(tokenizer.between)
        query = rows.lengths[:, :1].astype(np.int32)
        texts = rows.lengths[:, 1:]
        joined = np.minimum(query - 2 + texts - 2 + added, max_length)
        self.lengths = np.where(texts > 0, joined, 0).astype(np.uint16)

    def take(self, numbers: np.ndarray) -> list[Row]:
        return [self._joined(row) for row in self._rows.take(numbers)]

    def _joined(self, row: Row) -> Row:
        query, *texts = np.split(row.token_ids, np.cumsum(row.lengths)[:-1])
        of_query = query[1:-1].tolist()
        token_ids = []
        type_ids = []
        lengths = []
        for text in texts:
            pair = join_texts(self._tokenizer, of_query, text[1:-1].tolist(), self._max_length)
            token_ids.append(pair.token_ids)
            type_ids.append(pair.type_ids)
            lengths.append(len(pair.token_ids))
        grades = [0.0] * len(texts)
        grades[0] = 1.0
        if self._has_grades:
            grades = row.label[0]
        return row._replace(
            token_ids=np.concatenate(token_ids),
            type_ids=np.concatenate(type_ids),
            lengths=tuple(lengths),
            label=(0.0, *grades),
        )

    def __getitem__(self, number: Any) -> Any:
        found = self._rows[number]
        return list(map(self._joined, found)) if isinstance(number, slice) else self._joined(found)
