# SPDX-License-Identifier: Apache-2.0
"""How likely a sentence is: pseudo-log-likelihood of a masked language model, log-likelihood of a causal one.

Source: Salazar et al. 2020 ("original"); Kauf and Ivanova 2023 ("within_word_l2r").
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch, pad_rows
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.devices.allocator import give_back_freed_memory
from bert_jax.devices.sharding import in_no_mesh
from bert_jax.errors import InputError
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.objective import Params, forward
from bert_jax.model.on_cpu import length_step
from bert_jax.settings.model import ModelConfig
from bert_jax.tasks.evaluation import ahead
from bert_jax.text.fitting import check_long_texts, padded_length, tell_cut, too_long

METHODS = ("original", "within_word_l2r")  # of a masked language model; the first is the default
LOG_LIKELIHOOD = "log_likelihood"  # of a causal model, which has one only

# Sentences are short, so that their rows are padded to lengths closer to each other than those of tasks.
_SHORT, _SHORT_BY = 32, 4
# Where rows of one length fill this many batches, half the step saves more than another program takes to compile.
_MANY_BATCHES, _FINER_BY = 512, 2
# Tokens of a batch, padding included. More are no faster on a CPU, and an accelerator needs more to be busy.
_CPU_TOKENS, _OTHER_TOKENS = 2048, 65536
_FEWEST_ROWS = 8
_IN_FLIGHT = 3  # batches that are computed while the host makes the next

Progress = Callable[[int, int], None]


def score_sentences(
    bert: Pretrained,
    sentences: Sequence[str],
    method: str = "",
    names: Sequence[str] | None = None,
    progress: Progress = lambda done, total: None,
    long_texts: str = "cut",
) -> np.ndarray:
    """Returns the score of each sentence, [number of sentences] float64 in nats; more is likelier.

    It is the sum of `token_scores`, which takes the same arguments.

    Raises: InputError as `token_scores`.
    """
    scores = token_scores(bert, sentences, method, names, progress, long_texts)
    return np.array([values.sum(dtype=np.float64) for values in scores], np.float64)


@in_no_mesh()
def token_scores(
    bert: Pretrained,
    sentences: Sequence[str],
    method: str = "",
    names: Sequence[str] | None = None,
    progress: Progress = lambda done, total: None,
    long_texts: str = "cut",
) -> list[np.ndarray]:
    """Returns the log-probability of every token of every sentence: for each an array [tokens] float32, in nats.

    "original": a token is masked, and predicted from all others. "within_word_l2r": with it the tokens of the same word
    to its right are masked. A causal model predicts each token from [CLS] and the tokens before it. [CLS] and [SEP] are
    read and not scored. Sentences with the same tokens are computed once, so that their scores are equal.

    Args:
      bert: a model that predicts words.
      sentences: any number of them.
      method: one of `METHODS`; "" is the first of them, or the log-likelihood of a causal model.
      names: the names of the sentences in messages, such as "file.txt:3".
      progress: is called with the numbers of rows that are done, and of all.
      long_texts: a sentence with more tokens than the model has positions is cut, with a warning ("cut"), or an error
        ("refuse").

    Raises: InputError if the model does not predict words, if it has no such method, if a sentence has no token, or if
    a score is not finite.
    """
    if isinstance(sentences, str):
        raise InputError("sentences is a single text; give a list of them, such as [text]")
    method = check_method(bert, method)
    token_ids, num_cut = _encode_sentences(bert, sentences, names, long_texts)
    tell_cut(num_cut, bert.config.max_positions)
    indices: dict[bytes, int] = {}  # of the different sentences
    index_of = [indices.setdefault(ids.tobytes(), len(indices)) for ids in token_ids]
    unique = [np.frombuffer(key, np.int32) for key in indices]
    unique_scores = _score(bert, unique, method, progress) if unique else []
    scores = [unique_scores[index] for index in index_of]
    for index, values in enumerate(scores):
        if not np.isfinite(values).all():
            name = names[index] if names else f"sentence {index + 1}"
            raise InputError(f"{name}: a score is not finite; the model's parameters are not those of a trained one")
    return scores


def check_method(bert: Pretrained, method: str) -> str:
    """Returns the method to score with. Raises: InputError if the model has no such method, or predicts no words."""
    if "mlm" not in bert.params:
        raise InputError(f"this model has no head that predicts words, its task being {bert.task}; give another")
    if bert.config.causal:
        if method not in ("", LOG_LIKELIHOOD):
            raise InputError(
                f"method {method!r} masks tokens, and this model reads from left to right: its score is the "
                "log-likelihood; leave the method out"
            )
        return LOG_LIKELIHOOD
    if method and method not in METHODS:
        raise InputError(f"method {method!r} is unknown for a masked language model; use {' or '.join(METHODS)}")
    return method or METHODS[0]


def encode_sentences(bert: Pretrained, sentences: Sequence[str]) -> list[np.ndarray]:
    """Returns the token ids of each sentence that are scored, [tokens] int32, without [CLS] and [SEP]."""
    return _encode_sentences(bert, sentences, None, "cut")[0]


def _encode_sentences(
    bert: Pretrained, sentences: Sequence[str], names: Sequence[str] | None, long_texts: str
) -> tuple[list[np.ndarray], int]:
    """Returns the token ids of each sentence, and the number that were cut. Raises: InputError if one has no token."""
    check_long_texts(long_texts)
    flat, counts = bert.tokenizer.encode_arrays(sentences) if len(sentences) else (np.zeros(0), np.zeros(0, np.int64))
    most = bert.config.max_positions
    long = counts + 2 > most
    for index in np.flatnonzero((counts == 0) | (long & (long_texts == "refuse")))[:1]:
        name = str(names[index]) if names else f"sentence {index + 1}"
        if not counts[index]:
            raise InputError(f"{name} has no token: {sentences[index]!r:.200}; write a sentence, or leave it out")
        raise too_long(name, most, int(counts[index]) + 2)
    token_ids = np.split(flat.astype(np.int32), np.cumsum(counts)[:-1]) if len(counts) else []
    return [ids[: most - 2] for ids in token_ids], int(long.sum())


class _Bucket(NamedTuple):
    """Sentences whose rows are padded to one length."""

    members: np.ndarray  # [S] int: indices of the sentences
    rows: np.ndarray  # [S, L] int32: [CLS] tokens [SEP], padded
    words: np.ndarray  # [S, L] int: the number of the word that a token is in
    lengths: np.ndarray  # [S] int, with [CLS] and [SEP]


class _Work(NamedTuple):
    """The rows to compute for a bucket: a row for each token of a sentence; of a causal model, for each sentence."""

    sentences: np.ndarray  # [R] int: which sentence of the bucket a row is a copy of
    places: np.ndarray  # [R, P] int: the positions whose outputs are asked for
    targets: np.ndarray  # [R, P] int: the positions of the tokens that they are to predict


def _score(bert: Pretrained, sentences: list[np.ndarray], method: str, progress: Progress) -> list[np.ndarray]:
    """Returns the scores of the tokens of each sentence, which are all different."""
    buckets = list(_buckets(bert, sentences, method))
    all_work = [_work_of(bucket, method) for bucket in buckets]
    done, total = 0, sum(len(work.sentences) for work in all_work)
    all_scores = [np.zeros(0, np.float32)] * len(sentences)
    for bucket, work in zip(buckets, all_work, strict=True):
        scores = np.zeros(work.places.shape, np.float32)
        for part, result in ahead(_computed(bert, bucket, work, method), _IN_FLIGHT):
            scores[part] = np.asarray(result)[: part.stop - part.start]
            give_back_freed_memory()
            done += part.stop - part.start
            progress(done, total)
        counts = bucket.lengths - 2
        if method == LOG_LIKELIHOOD:
            per_sentence = [row[:count] for row, count in zip(scores, counts, strict=True)]
        else:
            per_sentence = np.split(scores[:, 0], np.cumsum(counts)[:-1])
        for member, tokens in zip(bucket.members, per_sentence, strict=True):
            all_scores[member] = tokens
    return all_scores


def _computed(bert: Pretrained, bucket: _Bucket, work: _Work, method: str) -> Iterator[tuple[slice, jax.Array]]:
    """Yields the rows of each batch and their scores, which are not waited for."""
    num_rows = len(work.sentences)
    size = _batch_rows(bucket.rows.shape[1], num_rows)
    for first in range(0, num_rows, size):
        part = slice(first, min(first + size, num_rows))
        batch = _make_batch(bert, bucket, _Work(*(array[part] for array in work)), method, size)
        yield part, _log_probabilities(bert.config, bert.prepared, batch)


def _buckets(bert: Pretrained, sentences: list[np.ndarray], method: str) -> Iterator[_Bucket]:
    """Yields the sentences by the length of their rows, longest first, so that a lack of memory shows soon."""
    lengths = np.array([len(ids) + 2 for ids in sentences])
    counts = np.ones_like(lengths) if method == LOG_LIKELIHOOD else lengths - 2
    padded = _row_lengths(lengths, counts, bert.config.max_positions, bert.config.attention)
    tokenizer = bert.tokenizer
    for length in np.unique(padded)[::-1].tolist():
        members = np.flatnonzero(padded == length)
        rows = np.full((len(members), length), tokenizer.pad_id, np.int32)
        for row, member in zip(rows, members, strict=True):
            row[: lengths[member]] = [tokenizer.cls_id, *sentences[member], tokenizer.sep_id]
        yield _Bucket(members, rows, np.cumsum(tokenizer.word_starts[rows], axis=1), lengths[members])


def _row_lengths(lengths: np.ndarray, counts: np.ndarray, most: int, attention: str) -> np.ndarray:
    """Returns the padded lengths of the rows of each sentence [S]; `counts` [S] are the numbers of rows."""
    padded = np.array([padded_length(length, most, length_step(attention)) for length in lengths.tolist()])
    short = lengths <= _SHORT

    def pad(members: np.ndarray, step: int) -> None:
        padded[members] = np.minimum(-(-lengths[members] // step) * step, most)

    pad(short, _SHORT_BY)
    for length in np.unique(padded[short]):
        members = short & (padded == length)
        if counts[members].sum() * length >= _MANY_BATCHES * _batch_tokens():
            pad(members, _FINER_BY)
    return padded


def _batch_tokens() -> int:
    return _CPU_TOKENS if jax.default_backend() == "cpu" else _OTHER_TOKENS


def _batch_rows(length: int, num_rows: int) -> int:
    """Returns the rows of every batch of a bucket, so that it is a single program; fewer where there are few."""
    full = max(_FEWEST_ROWS, 1 << max(1, _batch_tokens() // length).bit_length() - 1)
    return min(full, max(_FEWEST_ROWS, 1 << (num_rows - 1).bit_length()))


def _work_of(bucket: _Bucket, method: str) -> _Work:
    counts = bucket.lengths - 2
    if method == LOG_LIKELIHOOD:
        positions = np.tile(np.arange(bucket.rows.shape[1] - 1), (len(counts), 1))
        return _Work(np.arange(len(counts)), positions, positions + 1)
    sentences = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(len(sentences)) - np.repeat(np.cumsum(counts) - counts, counts) + 1  # 1 to its count
    return _Work(sentences, places[:, None], places[:, None])


def _make_batch(bert: Pretrained, bucket: _Bucket, work: _Work, method: str, size: int) -> Batch:
    """Returns the batch of some rows of a bucket, filled up to `size` with empty ones."""
    rows, lengths = bucket.rows[work.sentences], bucket.lengths[work.sentences]
    labels = np.take_along_axis(rows, work.targets, axis=1)
    if method != LOG_LIKELIHOOD:
        positions = np.arange(rows.shape[1])
        masked = positions == work.places
        if method == "within_word_l2r":
            words = bucket.words[work.sentences]
            masked |= (positions > work.places) & (words == np.take_along_axis(words, work.places, axis=1))
        rows = np.where(masked, bert.tokenizer.mask_id, rows)
    missing = size - len(rows)

    def filled(array: np.ndarray) -> np.ndarray:
        return np.pad(array, ((0, missing), *((0, 0),) * (array.ndim - 1)))

    texts = [row[:length] for row, length in zip(rows, lengths, strict=True)]
    batch = pad_rows([*texts, *[()] * missing], rows.shape[1], pad_id=bert.tokenizer.pad_id)
    return batch._replace(mlm_positions=filled(work.places).astype(np.int32), mlm_labels=filled(labels))


@partial(jax.jit, static_argnums=0)
def _log_probabilities(config: ModelConfig, params: Params, batch: Batch) -> jax.Array:
    """Returns the log-probabilities of the labels, [B, P] float32."""
    logits = forward(config, params, batch, MASKED_LM)
    chosen = jnp.take_along_axis(logits, batch.mlm_labels[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
