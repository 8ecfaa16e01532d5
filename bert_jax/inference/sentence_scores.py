# SPDX-License-Identifier: Apache-2.0
"""How likely a sentence is: pseudo-log-likelihood of a masked language model, log-likelihood of a causal one.

Source: Salazar et al. 2020 ("original"); Kauf and Ivanova 2023 ("within_word_l2r").
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.batch import Batch
from bert_jax.batches.infer import computed, inference_layouts
from bert_jax.batches.pack import Layout, Sizes
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.devices.sharding import in_no_mesh
from bert_jax.errors import InputError
from bert_jax.inference.predict import check_predicts_words, padded_batch
from bert_jax.model.heads.pretraining import MASKED_LM
from bert_jax.model.objective import Params, forward
from bert_jax.settings.model import ModelConfig
from bert_jax.text.fitting import check_long_texts, listed, tell_cut, too_long

METHODS = ("original", "within_word_l2r")  # of a masked language model; the first is the default
LOG_LIKELIHOOD = "log_likelihood"  # of a causal model, which has one only

Progress = Callable[[int, int], None]


def score_sentences(
    bert: Pretrained,
    sentences: Iterable[str],
    method: str = "",
    names: Sequence[str] | None = None,
    progress: Progress = lambda done, total: None,
    long_texts: str = "cut",
) -> np.ndarray:
    """Returns the score of each sentence, [number of sentences] float64 in nats; more is likelier.

    It is the sum of `token_scores`, which takes the same arguments.

    Raises: InputError as `token_scores`.

    Examples:
      >>> bert = bert_jax.load_pretrained("models/bert-mini-en")
      >>> scores = bert_jax.score_sentences(bert, ["the king opened the door.", "the door king the opened."])
      >>> bool(scores[0] > scores[1])
      True
    """
    scores = token_scores(bert, sentences, method, names, progress, long_texts)
    return np.array([values.sum(dtype=np.float64) for values in scores], np.float64)


@in_no_mesh()
def token_scores(
    bert: Pretrained,
    sentences: Iterable[str],
    method: str = "",
    names: Sequence[str] | None = None,
    progress: Progress = lambda done, total: None,
    long_texts: str = "cut",
    begins: Sequence[int] | None = None,
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
      begins: the number of tokens of each sentence that are read and not scored, such as those before a completion;
        scores are those of the others.

    Raises: InputError if the model does not predict words, if it has no such method, if a sentence has no token to
    score, or if a score is not finite.
    """
    sentences = listed(sentences)
    method = check_method(bert, method)
    token_ids, num_cut = _encode_sentences(bert, sentences, names, long_texts)
    tell_cut(num_cut, bert.config.max_positions)
    begins = [0] * len(token_ids) if begins is None else begins
    indices: dict[tuple[bytes, int], int] = {}  # of the different sentences
    index_of = []
    for index, (ids, begin) in enumerate(zip(token_ids, begins, strict=True)):
        if not 0 <= begin < len(ids):
            raise InputError(
                f"{_name(names, index)} has {len(ids)} tokens, so none is left to score after {begin}; give fewer"
            )
        index_of.append(indices.setdefault((ids.tobytes(), begin), len(indices)))
    unique = [(np.frombuffer(key, np.int32), begin) for key, begin in indices]
    unique_scores = _score(bert, unique, method, progress) if unique else []
    scores = [unique_scores[index] for index in index_of]
    for index, values in enumerate(scores):
        if not np.isfinite(values).all():
            raise InputError(
                f"{_name(names, index)}: a score is not finite; the model's parameters are not those of a trained one"
            )
    return scores


def _name(names: Sequence[str] | None, index: int) -> str:
    return names[index] if names else f"sentence {index + 1}"


def check_method(bert: Pretrained, method: str) -> str:
    """Returns the method to score with. Raises: InputError if the model has no such method, or predicts no words."""
    check_predicts_words(bert)
    methods = (LOG_LIKELIHOOD,) if bert.config.causal else METHODS
    if method not in ("", *methods):
        kind = "a model that reads from left to right" if bert.config.causal else "a masked one"
        raise InputError(f"method {method!r} is unknown for {kind}; use {' or '.join(methods)}")
    return method or methods[0]


def encode_sentences(bert: Pretrained, sentences: Sequence[str]) -> list[np.ndarray]:
    """Returns the token ids of each sentence that are scored, [tokens] int32, without [CLS] and [SEP]."""
    return _encode_sentences(bert, sentences, None, "cut")[0]


def _encode_sentences(
    bert: Pretrained,
    sentences: Sequence[str],
    names: Sequence[str] | None,
    long_texts: str,
) -> tuple[list[np.ndarray], int]:
    """Returns the token ids of each sentence, and the number that were cut. Raises: InputError if one has no token."""
    check_long_texts(long_texts)
    if not len(sentences):
        return [], 0
    flat, counts = bert.tokenizer.encode_arrays(sentences)
    most = bert.config.max_positions - 2
    for index, count in enumerate(counts.tolist()):
        if not count:
            raise InputError(
                f"{_name(names, index)} has no token: {sentences[index]!r:.200}; write a sentence, or leave it out"
            )
        if count > most and long_texts == "refuse":
            raise too_long(_name(names, index), most + 2, count + 2)
    token_ids = np.split(flat.astype(np.int32), np.cumsum(counts)[:-1])
    return [ids[:most] for ids in token_ids], int((counts > most).sum())


def _score(
    bert: Pretrained,
    sentences: list[tuple[np.ndarray, int]],
    method: str,
    progress: Progress,
) -> list[np.ndarray]:
    """Returns the scores of the tokens of each sentence, given with the number of those before them; all are different.

    A sentence takes a row for each token that is scored, which is predicted in it; with a causal model a single row.
    """
    counts = np.array([len(ids) for ids, _ in sentences])
    begins = np.array([begin for _, begin in sentences])
    skipped = np.zeros_like(begins) if method == LOG_LIKELIHOOD else begins
    rows_of = np.ones_like(counts) if method == LOG_LIKELIHOOD else counts - skipped
    members = np.repeat(np.arange(len(counts)), rows_of)  # the sentence of each row
    # the first token's is 1
    positions = np.arange(len(members)) - np.repeat(np.cumsum(rows_of) - rows_of, rows_of) + 1
    positions += skipped[members]
    cls = bert.tokenizer.cls_id
    sep = bert.tokenizer.sep_id
    texts = [[cls, *ids, sep] for ids, _ in sentences]

    def compute(layout: Layout) -> jax.Array:
        numbers = [number for (number,) in layout.bins]
        batch = padded_batch(bert, layout, [texts[member] for member in members[numbers]])
        asked = np.ones((layout.num_rows, 1), np.int32)
        asked[: len(numbers), 0] = positions[numbers]
        if method == LOG_LIKELIHOOD:  # each token is predicted from those before it
            asked = np.tile(np.arange(layout.length - 1, dtype=np.int32), (layout.num_rows, 1))
        later = int(method == LOG_LIKELIHOOD)
        labels = np.take_along_axis(batch.token_ids, asked + later, axis=1)
        token_ids = batch.token_ids if later else _masked(bert, batch.token_ids, asked, method)
        batch = batch._replace(token_ids=token_ids, mlm_positions=asked, mlm_labels=labels)
        return _log_probabilities(bert.config, bert.prepared, batch)

    sizes = Sizes(counts[members] + 2, np.ones_like(members))
    scores = [np.zeros(count, np.float32) for count in counts]
    done = 0
    for layout, result in computed(inference_layouts(sizes, bert.config), compute):
        for (number,), values in zip(layout.bins, result):
            of_sentence = scores[members[number]][positions[number] - 1 :]
            of_sentence[: len(values)] = values[: len(of_sentence)]
        done += len(layout.bins)
        progress(done, len(members))
    return [of_all[begin:] for of_all, begin in zip(scores, begins)]


def _masked(
    bert: Pretrained,
    token_ids: np.ndarray,
    positions: np.ndarray,
    method: str,
) -> np.ndarray:
    """Returns token ids [B, L] with the token at the position [B, 1] of each row masked."""
    everywhere = np.arange(token_ids.shape[1])
    masked = everywhere == positions
    if method == "within_word_l2r":
        # the number of the word that a token is in
        words = np.cumsum(bert.tokenizer.word_starts[token_ids], axis=1)
        masked |= (everywhere > positions) & (words == np.take_along_axis(words, positions, axis=1))
    return np.where(masked, bert.tokenizer.mask_id, token_ids)


@partial(jax.jit, static_argnums=0)
def _log_probabilities(config: ModelConfig, params: Params, batch: Batch) -> jax.Array:
    """Returns the log-probabilities of the labels, [B, P] float32."""
    logits = forward(config, params, batch, MASKED_LM)
    chosen = jnp.take_along_axis(logits, batch.mlm_labels[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
