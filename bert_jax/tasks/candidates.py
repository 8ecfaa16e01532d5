# SPDX-License-Identifier: Apache-2.0
"""Prepared pairs as a reranker reads them: each query with every text that was prepared with it, as a pair."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.batch import Row
from bert_jax.batches.pack import StoredRows
from bert_jax.errors import InputError
from bert_jax.tasks.embeddings.prepared import PreparedPairs, Source
from bert_jax.text.fitting import join_texts
from bert_jax.text.tokenizer import Tokenizer


class CandidateRows(StoredRows):
    """The rows of prepared pairs, joined to pairs of texts when a batch has them.

    Grades are the scores of the data, or else 1 of the positive and 0 of hard negatives. They are the rows of the table
    that was prepared, but for a pair of two texts that were both cut there: the second then keeps the odd token.
    As of a table, queries without negatives are left out; of graded pairs each is a query with one candidate.
    """

    def __init__(self, pairs: PreparedPairs, tokenizer: Tokenizer, max_length: int) -> None:
        rows = pairs.rows
        self.like(rows)
        self._rows = rows
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._has_grades = pairs.are_taught or pairs.is_graded
        lengths = rows.lengths
        self._kept: np.ndarray | None = None  # all
        if not pairs.is_graded and not lengths[:, 2].all():
            self._kept = np.flatnonzero(lengths[:, 2])
            lengths = lengths[self._kept]
            self._leave_out(self._kept, pairs.sources)
        self.num_left_out = len(rows) - len(lengths)
        # [CLS] and [SEP] stand at the ends of every text that was prepared
        added = 2 + len(tokenizer.between)
        query = lengths[:, :1].astype(np.int32)
        texts = lengths[:, 1:]
        joined = np.minimum(query - 2 + texts - 2 + added, max_length)
        self.lengths = np.where(texts > 0, joined, 0).astype(np.uint16)

    def _leave_out(self, kept: np.ndarray, sources: Sequence[Source]) -> None:
        """Leaves the other rows out of the sources and their streams. Raises: InputError if a source has no other."""
        ends = np.cumsum(self.stretches)
        edges = np.searchsorted(kept, np.append(0, ends))
        self.stretches = tuple(np.diff(edges).tolist())
        for source, count in zip(sources, self.stretches):
            if not count:
                raise InputError(
                    f"no query of {source.name} has a hard negative; prepare the pairs without it, or give it some"
                )
        starts = ends - [source.rows for source in sources]
        for stream, start, own in zip(self.streams, starts, np.split(kept, edges[1:-1])):
            stream.keep(own - start)

    def take(self, numbers: np.ndarray) -> list[Row]:
        rows = self._rows.take(numbers if self._kept is None else self._kept[numbers])
        return [self._joined(row, number) for row, number in zip(rows, numbers.tolist())]

    def _joined(self, row: Row, number: int) -> Row:
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
            example=number,
            token_ids=np.concatenate(token_ids),
            type_ids=np.concatenate(type_ids),
            lengths=tuple(lengths),
            label=(0.0, *grades),
        )

    def __getitem__(self, number: Any) -> Any:
        found = self.take(np.atleast_1d(np.arange(len(self))[number]))
        return found if isinstance(number, slice) else found[0]
