# SPDX-License-Identifier: Apache-2.0
"""Vectors of the tokens of texts, and scores of passages by them. Source: Khattab and Zaharia 2020, "ColBERT"."""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from bert_jax.batch import UNSCORED
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.devices.cores import on_all_cores
from bert_jax.devices.sharding import in_no_mesh
from bert_jax.errors import InputError
from bert_jax.inference.features import embedded, outputs_of
from bert_jax.model.inputs import check_rows
from bert_jax.tasks.base import single_row
from bert_jax.tasks.embeddings.tokens import TokenFit, most_tokens
from bert_jax.text.fitting import check_long_texts, listed, tell_cut, too_long

_WORST = np.float32(-1e9)  # the score of a passage without a token that counts
_PRODUCTS = 1 << 24  # of two tokens, that are held at once


def is_of_tokens(bert: Pretrained) -> bool:
    """Returns whether a model has vectors of tokens, which `multi_vectors` gives."""
    return bert.embedding is not None and bert.embedding.embedding.kind == "multi_vector"


@in_no_mesh()
@on_all_cores()
def multi_vectors(
    bert: Pretrained,
    texts: Iterable[str],
    kind: str = "",
    max_seq_length: int = 0,
    long_texts: str = "cut",
) -> list[np.ndarray]:
    """Returns the vectors of the tokens of each text, [tokens, D] float32, of a model that was trained for it.

    `kind` "query" or "passage" gives texts their prompt, and the name of another prompt that one; "" takes the default
    prompt or none. A query is cut at the model's `query_length` and, if the model does so, filled up with [MASK], whose
    vectors are among the result. Of other texts the tokens are left out that the model skips, such as punctuation.
    `max_seq_length`, which 0 leaves to the model, limits the tokens of these texts, [CLS] and [SEP] included. A longer
    text is cut, with a warning, or with `long_texts` "refuse" an error.

    Raises: InputError if the model has one vector for a text, or there is no such kind, or an input is no text.
    """
    texts, settings = listed(texts), bert.embedding
    if settings is None or not is_of_tokens(bert):
        raise InputError(
            "this model was not trained for vectors of tokens; train one with task.embedding.kind=multi_vector, or use "
            "sentence_embeddings"
        )
    prompts = settings.embedding.prompts()
    is_query = kind == "query"
    if kind not in ("", *prompts):
        raise InputError(f"kind {kind!r} is unknown; use {', '.join(prompts)}, or leave it empty")
    length = max_seq_length or min(settings.max_seq_length, bert.config.max_positions)
    if not 5 <= length <= bert.config.max_positions:
        raise InputError(
            f"max_seq_length {length} is not from 5 to the model's {bert.config.max_positions} positions"
        )
    config = dataclasses.replace(settings, max_seq_length=length)
    fit = TokenFit(config, bert.tokenizer)
    check_long_texts(long_texts)
    prompt, most = (
        prompts.get(kind or settings.embedding.default_prompt, ""),
        most_tokens(config, is_query),
    )
    rows = []
    scored = []
    num_cut = 0
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"text {number + 1} is {text!r:.60}, not a text; give a string")
        fitted = fit(bert.tokenizer.encode(prompt + text), is_query)
        if fitted.was_cut and long_texts == "refuse":
            raise too_long(f"text {number + 1}", most)
        num_cut += fitted.was_cut
        scored.append(fitted.marks & UNSCORED == 0)
        rows.append(single_row(number, fitted.token_ids)._replace(marks=fitted.marks))
    check_rows(bert.config, rows, "the input")
    tell_cut(num_cut, most)
    found = [np.zeros((0, 0), np.float32)] * len(rows)
    for row, spot, vectors in outputs_of(bert, rows, partial(embedded, bert.config, config)):
        found[row.example] = vectors[spot.tokens][scored[row.example]]
    return found


def maxsim(queries: Sequence[np.ndarray], passages: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the scores [Q, C] float32 of passages for queries, both as `multi_vectors` gives them.

    The score is the sum over the tokens of the query of the largest product with a token of the passage. It is computed
    by NumPy on the host: for a few thousand passages, such as those that another search has found.

    Raises: InputError if vectors are not all of one size.

    Examples:
      >>> query, passage = np.eye(3)[:2], np.array([[0.5, 0.75, 0.0], [0.0, 0.0, 1.0]])
      >>> bert_jax.maxsim([query], [passage, query])
      array([[1.25, 2.  ]], dtype=float32)
    """
    shapes = {np.shape(vectors)[1:] for vectors in [*queries, *passages]}
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        raise InputError(
            f"vectors of tokens have the sizes {sorted(map(list, shapes))}; give [tokens, D] of one model"
        )
    scores = np.full((len(queries), len(passages)), _WORST)
    counts = np.array([len(vectors) for vectors in passages], int)
    there = np.flatnonzero(counts)
    if not len(queries) or not len(there):
        return scores
    asked = np.concatenate(queries).astype(np.float32)
    ends = np.cumsum([len(query) for query in queries])[:-1]
    size = max(1, _PRODUCTS // (len(asked) * int(counts.max()) + 1))
    for first in range(0, len(there), size):
        block = there[first : first + size]
        tokens = np.concatenate([passages[int(number)] for number in block]).astype(np.float32)
        products = asked @ tokens.T
        best = np.maximum.reduceat(products, np.cumsum(counts[block]) - counts[block], axis=1)
        scores[:, block] = [of_query.sum(axis=0) for of_query in np.split(best, ends)]
    return scores
