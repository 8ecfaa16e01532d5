# SPDX-License-Identifier: Apache-2.0
"""Sparse vectors of texts: a weight for each word of the vocabulary."""

from functools import partial

import numpy as np

from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.devices.cores import on_all_cores
from bert_jax.devices.sharding import in_no_mesh
from bert_jax.errors import InputError
from bert_jax.inference.features import (
    Texts,
    check_lengths,
    embedded,
    outputs_of,
    rows_of,
    with_prompt,
)
from bert_jax.model.heads.sparse import QUERY_TABLE, Terms, terms_of
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.text.fitting import fit_texts, listed, tell_cut


def sparse_embeddings(
    bert: Pretrained,
    texts: Texts,
    kind: str = "",
    top_k: int = 0,
    sparse: bool = False,
    max_seq_length: int = 0,
    long_texts: str = "cut",
) -> np.ndarray | list[Terms]:
    """Returns a weight for each word of the vocabulary, for each text, [number of texts, V] float32.

    A model that was trained to make sparse vectors, here or by sentence-transformers, does it as it was trained, with
    the prompt of the `kind` of texts as `sentence_embeddings` has it. Queries of a model that has a table of weights
    are looked up there, without the encoder. Any other masked language model shows what it predicts.

    With `top_k` the largest weights of a text are kept, and the others are 0; 0 keeps all, or as many as the model's
    files say. With `sparse` the result is a list with `ids` [n] int32 and `weights` [n] float32 of the words of each
    text whose weight is not 0, largest first; `bert.tokenizer.tokens(ids)` shows them. `max_seq_length` and
    `long_texts` are those of `sentence_embeddings`.

    Raises: InputError as `sentence_embeddings`, or if the model has no words to predict, or makes dense vectors.

    Examples:
      >>> bert = bert_jax.load_pretrained("models/bert-mini-en")
      >>> bert_jax.sparse_embeddings(bert, ["open the door"]).shape
      (1, 8192)
    """
    if top_k < 0:
        raise InputError(f"top_k {top_k} is below 0; use 0 to keep all words")
    found = terms_of_texts(bert, texts, kind, top_k, max_seq_length, long_texts)
    if sparse:
        return found
    vectors = np.zeros((len(found), bert.config.vocab_size), np.float32)
    for vector, (ids, weights) in zip(vectors, found):
        vector[ids] = weights
    return vectors


@in_no_mesh()
@on_all_cores()
def terms_of_texts(
    bert: Pretrained,
    texts: Texts,
    kind: str = "",
    top_k: int = 0,
    max_seq_length: int = 0,
    long_texts: str = "cut",
) -> list[Terms]:
    """Returns the words of each text; no more vectors than those of a batch are held."""
    settings = _settings_of(bert)
    most = top_k or settings.embedding.max_terms
    length = max_seq_length or min(settings.max_seq_length, bert.config.max_positions)
    length = check_lengths(bert, (-1,), length)
    prompted = with_prompt(settings, listed(texts), kind)
    if kind == "query" and settings.embedding.query_table:
        weight = np.asarray(bert.params[QUERY_TABLE]["weight"])
        # of any length, since no position is read
        fitted = fit_texts(bert.tokenizer, prompted, max_seq_length or 1 << 30, long_texts)
        return [_looked_up(weight, text.token_ids[1:-1], most) for text in fitted]
    rows, cut = rows_of(bert, prompted, length, long_texts)
    tell_cut(sum(cut), length)
    found = [Terms(np.zeros(0, np.int32), np.zeros(0, np.float32))] * len(rows)
    compute = partial(embedded, bert.config, settings)
    # A text in each row: what packing saves in the encoder, finding the sequences among the logits takes again.
    for row, spot, vectors in outputs_of(bert, rows, compute, "off"):
        found[row.example] = terms_of(vectors[spot.places.start], most)
    return found


def _settings_of(bert: Pretrained) -> TaskConfig:
    """Returns the settings of a model's sparse vectors. Raises: InputError if it can make none."""
    if bert.embedding is not None and bert.embedding.embedding.kind == "sparse":
        return bert.embedding
    if bert.embedding is not None or "mlm" not in bert.params:
        what = "dense vectors" if bert.embedding else "no words: it is not a masked language model"
        raise InputError(
            f"the model makes {what}; train one with --config.task.embedding.kind=sparse, or take "
            "sentence_embeddings"
        )
    return TaskConfig(
        name="embeddings",
        max_seq_length=bert.config.max_positions,
        embedding=EmbeddingConfig(kind="sparse"),
    )


def _looked_up(weight: np.ndarray, token_ids: np.ndarray, most: int) -> Terms:
    """Returns the words of a query by a table [V]: each counts once, and [CLS] and [SEP] do not."""
    vector = np.zeros_like(weight)
    vector[token_ids] = weight[token_ids]
    return terms_of(vector, most)
