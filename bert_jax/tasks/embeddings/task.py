# SPDX-License-Identifier: Apache-2.0
"""Embeddings: vectors of texts that are close to each other if the texts belong together.

Graded pairs are scored by the correlation of their cosines with the scores. Other data are searched: the texts of all
pairs, or BEIR's corpus, for those that belong to each query.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.batch import UNSCORED
from bert_jax.errors import InputError, shown
from bert_jax.model.heads.multi_vector import USUAL
from bert_jax.model.heads.sparse import Terms
from bert_jax.model.heads.table import EMBEDDING_KINDS
from bert_jax.settings.finetuning import OF_SCORES, EmbeddingConfig, TaskConfig
from bert_jax.storage.writing import atomic_path
from bert_jax.tasks import scores
from bert_jax.tasks.base import CUT, Rows, Task, choose_metric, single_row, without_zeros
from bert_jax.tasks.embeddings.prepared import PreparedPairs
from bert_jax.tasks.embeddings.read import (
    SAME,
    TextsExample,
    are_alone,
    are_taught,
    is_graded,
    read_prepared,
    read_texts,
)
from bert_jax.tasks.embeddings.search import Nearest, in_blocks, nearest, nearest_texts
from bert_jax.tasks.embeddings.terms import nearest_terms
from bert_jax.tasks.embeddings.tokens import TokenFit, TokenRows, most_tokens
from bert_jax.tasks.texts import NUMBER_METRICS, check_length, write_predictions
from bert_jax.text.fitting import join_texts
from bert_jax.text.tokenizer import Tokenizer

_DEPTH = 100  # of rankings
# of each kind: the tokens of a text, and the settings of a model that starts from another
_USUAL_LENGTH = {"dense": 128, "sparse": 128, "multi_vector": 180}
_USUAL = {
    "dense": EmbeddingConfig(),
    "sparse": EmbeddingConfig(kind="sparse"),
    "multi_vector": USUAL,
}
# Of `EmbeddingConfig`, what comes from an embedding model that a run starts from, where it is at its default.
_OF_START = (
    *("kind", "log_times", "max_terms", "query_table", "pooling", "projection_size"),
    *("projection_activation", "normalize", "kept_dimensions", "query_length"),
    *("query_expansion", "expansion_is_seen", "skipped_words"),
    *("query_prompt", "passage_prompt", "other_prompts", "default_prompt"),
)
METRICS = (*scores.RANKING_METRICS, *NUMBER_METRICS)


class Embedded(NamedTuple):
    """The vectors of the texts of an example."""

    vectors: Any  # [T, K] float32, or of each text [tokens, K] or `Terms`


class EmbeddingTask(Task[TextsExample, Embedded]):
    """A vector for each text."""

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()) -> None:
        """Makes the task, which has no classes. Raises: InputError if a setting cannot be used."""
        kind = config.embedding.kind
        length = config.max_seq_length or _USUAL_LENGTH[kind]
        super().__init__(dataclasses.replace(config, max_seq_length=length))
        self.head = EMBEDDING_KINDS[kind]
        check_length(self.config)
        self.metric = choose_metric(config, METRICS)

    def read(self, source, split) -> Any:
        """Returns the examples of a split; to train on also prepared pairs, which are not in memory."""
        prepared = read_prepared(self.config, source, split)
        return read_texts(self.config, source, split) if prepared is None else prepared

    def parse(self, value, where):
        """Returns the example of a text, which is a query, or of {"query": ...} or {"passage": ...}."""
        kind = "text"
        if isinstance(value, Mapping) and len(value) == 1:
            ((kind, value),) = value.items()
        elif isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if not isinstance(value, str) or kind not in ("query", "passage", "text"):
            raise InputError(
                f'{where}: {value!r:.60} is not a text; give a string, or {{"passage": "..."}}'
            )
        return TextsExample(
            texts=(value,),
            where=where,
            is_passage=kind == "passage",
        )

    def settle(self, examples):
        """Returns the settings with the loss and the metric for the data. Raises: InputError if they do not fit."""
        graded = is_graded(examples)
        if graded and self.config.embedding.kind == "multi_vector":
            raise InputError(
                "vectors of tokens (embedding.kind multi_vector) are not learnt from graded pairs; give texts that "
                "belong together, or take kind=dense"
            )
        loss = self.config.embedding.loss or ("cosent" if graded else "infonce")
        if isinstance(examples, PreparedPairs):
            has_negatives = examples.has_negatives
            most = max(examples.largest_score, -examples.smallest_score)
            largest = [(examples.place, most)]
        else:
            has_negatives = any(len(example.texts) > 2 for example in examples)
            largest = ((example.where, abs(example.score or 0)) for example in examples)
        if loss in OF_SCORES and not (are_taught(examples) and has_negatives):
            raise InputError(
                f"embedding.loss {loss} is learnt from a teacher's scores, and not all examples have them; give "
                "columns negative and scores, as mine_negatives --scores writes them"
            )
        if graded != (loss in ("cosent", "cosine")):
            kind = "graded pairs" if graded else "texts without scores"
            fitting = "cosent or cosine" if graded else "infonce, gist, triplet, margin_mse or kl"
            raise InputError(f"embedding.loss {loss} is not for {kind}; use {fitting}")
        if loss == "triplet" and not has_negatives:
            raise InputError(
                "embedding.loss triplet needs hard negatives, and no example has one; use infonce"
            )
        if loss in ("infonce", "gist") and not isinstance(examples, PreparedPairs):
            _check_positives(examples)
        if self.config.embedding.query_table and (graded or are_alone(examples)):
            raise InputError(
                "embedding.query_table needs queries with their passages, and these texts are alike; leave it out"
            )
        best = self.config.embedding.best_score
        for where, score in largest if loss == "cosine" else ():
            if score > best:
                raise InputError(f"{where}: score {score:g} is above embedding.best_score {best:g}")
        metric = self.config.metric or getattr(examples, "metric", "")
        embedding = dataclasses.replace(self.config.embedding, loss=loss)
        return dataclasses.replace(self.config, metric=metric, embedding=embedding)

    def make_rows(self, examples, tokenizer, training):
        """Returns a row with a label for each example in training, or else a row for each distinct text."""
        if isinstance(examples, PreparedPairs):
            examples.check(tokenizer)
            if self.config.embedding.kind != "multi_vector":
                return Rows(examples.rows, {})
            fit = TokenFit(self.config, tokenizer)
            return Rows(TokenRows(examples.rows, fit, examples.are_alone), {})
        uses: dict[tuple[bool, str], list[tuple[int, int]]] = {}  # example and place of each text
        for number, example in enumerate(examples):
            for index, text in enumerate(example.texts):
                uses.setdefault((example.is_query(index), text), []).append((number, index))
        fitted, cut = fit_prompted(self.config, list(uses), tokenizer)
        counts = {**getattr(examples, "counts", {}), CUT: cut}
        if not training:
            rows = []
            for key, at in uses.items():
                row = single_row(at[0][0], fitted[key].token_ids, detail=at)
                rows.append(row._replace(marks=fitted[key].marks, is_query=key[0]))
            return Rows(rows, without_zeros(counts))
        rows = []
        numbers: dict[bytes, int] = {}
        same = 0
        for number, example in enumerate(examples):
            label = []
            token_ids = []
            lengths = []
            marks = []
            for place, text in enumerate(example.texts):
                own = fitted[example.is_query(place), text]
                label.append(numbers.setdefault(own.known, len(numbers)))
                token_ids.append(own.token_ids)
                lengths.append(len(own.token_ids))
                if own.marks is not None:
                    marks.append(own.marks)
            same += label[1] in label[2:]
            is_taught = self.config.embedding.loss in OF_SCORES
            known = example.scores if is_taught else example.score or 0.0
            row = single_row(number, np.concatenate(token_ids), (known, *label))
            row = row._replace(lengths=tuple(lengths))
            rows.append(row._replace(marks=np.concatenate(marks) if marks else None))
        counts[SAME] = counts.get(SAME, 0) + same
        return Rows(rows, without_zeros(counts))

    def decode(self, examples, rows, outputs):
        vectors: list[list[Any]] = [[np.zeros(0)] * len(example.texts) for example in examples]
        for row, vector in zip(rows, outputs):
            if row.marks is not None:
                vector = vector[row.marks & UNSCORED == 0]
            for number, index in row.detail:
                is_sparse = isinstance(vector, Terms)
                vectors[number][index] = vector if is_sparse else np.asarray(vector, np.float32)
        apart = any(row.marks is not None for row in rows) or _are_sparse(vectors)
        return [Embedded(texts if apart else np.stack(texts)) for texts in vectors]

    def score(self, examples, predictions):
        """Returns correlations of graded pairs, or else metrics of rankings."""
        if is_graded(examples):
            truth = [example.score or 0.0 for example in examples]
            said = _cosines(predictions)
            return {name: metric(truth, said) for name, metric in NUMBER_METRICS.items()}
        ranked = _rank(examples, predictions)
        return scores.ranking_scores(
            [query.grades for query in ranked], [query.relevant for query in ranked]
        )

    def show(self, prediction):
        if _are_sparse([prediction.vectors]):
            ids, weights = prediction.vectors[0]
            return {"ids": ids.tolist(), "weights": [round(float(value), 6) for value in weights]}
        vectors = np.round(prediction.vectors[0].astype(np.float64), 6).tolist()
        return {"embedding" if prediction.vectors[0].ndim == 1 else "embeddings": vectors}

    def write(self, directory, split, examples, predictions):
        """Writes the cosines of graded pairs to SPLIT.tsv, or rankings to SPLIT.trec, as trec_eval reads them."""
        is_paired = all(len(each.texts) > 1 and each.relevant is None for each in examples)
        if is_graded(examples) or is_paired:
            write_predictions(directory / f"{split}.tsv", zip(examples, _cosines(predictions)))
            return
        lines = []
        for query in _rank(examples, predictions):
            for rank, (name, score) in enumerate(query.best, 1):
                lines.append(f"{query.id} Q0 {name} {rank} {score:.6f} bert_jax\n")
        with atomic_path(directory / f"{split}.trec") as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")


def _check_positives(examples: Sequence[TextsExample]) -> None:
    """Raises: InputError if all examples have the same positive, so that none is told from others."""
    if len({example.texts[1] for example in examples}) < 2 < len(examples):
        first = examples[0]
        raise InputError(
            f"{first.where}: all {len(examples)} examples have the positive {first.texts[1]!r:.60}; check "
            "task.second_text_column"
        )


def from_start(config: TaskConfig, start: TaskConfig | None) -> tuple[TaskConfig, list[str]]:
    """Returns the settings, with what they leave open as in an embedding model to start from, and lines about it."""
    usual = TaskConfig(max_seq_length=0)
    taken = []
    other = []
    chosen: dict[str, Any] = {}
    kind = config.embedding.kind
    if start is not None and kind not in ("dense", start.embedding.kind):
        start = None
    base = TaskConfig(max_seq_length=0, embedding=_USUAL[kind]) if start is None else start
    for name in (*_OF_START, "max_seq_length"):
        value, own, default = (_setting(task, name) for task in (config, base, usual))
        if config.embedding.from_start and value == default:
            value = own
        if name == "max_seq_length":
            value = value or _USUAL_LENGTH[chosen["kind"]]
        chosen[name] = value
        if value != own:
            other.append(f"{name} {shown(value)} (not {shown(own)})")
        elif own != default:
            taken.append(f"{name} {shown(value)}")
    lines = [f"from it: {', '.join(taken)}"] if taken and start is not None else []
    lines += [f"from the settings: {', '.join(other)}"] if other and start is not None else []
    length = chosen.pop("max_seq_length")
    embedding = dataclasses.replace(config.embedding, **chosen)
    embedding = dataclasses.replace(embedding, pooling=",".join(embedding.poolings()))
    return dataclasses.replace(config, max_seq_length=length, embedding=embedding), lines


def _setting(task: TaskConfig, name: str) -> Any:
    return getattr(task if name == "max_seq_length" else task.embedding, name)


class Prompted(NamedTuple):
    """The tokens of a text after its prompt."""

    token_ids: np.ndarray  # [L] int32
    known: bytes  # the same for texts of the same tokens
    marks: np.ndarray | None  # as in `batch.Row`


def fit_prompted(
    config: TaskConfig, texts: Sequence[tuple[bool, str]], tokenizer: Tokenizer
) -> tuple[dict[Any, Prompted], int]:
    """Returns [CLS] prompt text [SEP] of each text, the same bytes for texts of the same tokens, and how many were cut.

    A text is (whether it is a query, text). Raises: InputError if a prompt leaves no room for a text.
    """
    prompts = {True: config.embedding.query_prompt, False: config.embedding.passage_prompt}
    counts = [len(tokenizer.encode(prompt)) for prompt in prompts.values()]
    for (is_query, prompt), count in zip(prompts.items(), counts):
        if count + 3 > (most := most_tokens(config, is_query)):
            name = "task.max_seq_length" if most == config.max_seq_length else "query_length"
            raise InputError(
                f"the prompt {prompt!r:.60} has {count} tokens, and {name} {most} leaves no room for a text after it"
            )
    encoded = tokenizer.encode_batch([prompts[is_query] + text for is_query, text in texts])
    joined: list[Any]
    if config.embedding.kind == "multi_vector":
        fit = TokenFit(config, tokenizer)
        joined = [fit(ids, is_query) for (is_query, _), ids in zip(texts, encoded)]
    else:
        joined = [join_texts(tokenizer, ids, None, config.max_seq_length) for ids in encoded]
    # A prompt may end within a word of the text, so texts are compared by their own tokens, as far as there is room.
    alone = tokenizer.encode_batch([text for _, text in texts]) if any(counts) else encoded
    room = config.max_seq_length - 2 - max(counts)
    fitted = {}
    for text, row, ids in zip(texts, joined, alone):
        known = np.asarray(ids[:room], np.int32).tobytes()
        fitted[text] = Prompted(row.token_ids, known, getattr(row, "marks", None))
    return fitted, sum(row.was_cut for row in joined)


def _cosines(predictions: Sequence[Embedded]) -> list[float]:
    """Returns the cosines of pairs, or of vectors of tokens and of sparse ones the scores."""
    if _are_sparse([prediction.vectors for prediction in predictions[:1]]):
        pairs = [prediction.vectors[:2] for prediction in predictions]
        return [float(nearest_terms([one], [other], 1).scores[0, 0]) for one, other in pairs]
    if isinstance(predictions[0].vectors, list):
        found = []
        for prediction in predictions:
            first, second, *_ = prediction.vectors
            found.append(float((first @ second.T).max(axis=1).sum()))
        return found
    pairs = np.stack([prediction.vectors[:2] for prediction in predictions]).astype(np.float64)
    pairs /= np.maximum(np.linalg.norm(pairs, axis=-1, keepdims=True), 1e-12)
    return np.sum(pairs[:, 0] * pairs[:, 1], axis=-1).tolist()


def _are_sparse(vectors: Sequence[Sequence[Any]]) -> bool:
    return bool(vectors) and isinstance(vectors[0][0], Terms)


class _Ranked(NamedTuple):
    """What was found for a query."""

    id: int | str
    best: list[tuple[int | str, float]]  # ids and cosines
    grades: list[float]  # of the best
    relevant: list[float]  # all grades above 0


def _rank(examples: Sequence[TextsExample], predictions: Sequence[Embedded]) -> list[_Ranked]:
    """Returns the best passages for each query.

    A passage that is the query itself is not among its results, unless it is relevant to it.
    """
    queries: dict[int | str, Any] = {}
    truth: dict[int | str, dict[Any, float]] = {}
    passages: dict[int | str, Any] = {}
    own: dict[int | str, set[Any]] = {}
    for example, prediction in zip(examples, predictions):
        vectors = prediction.vectors
        if example.is_passage:
            passages[example.id] = vectors[0]
        elif example.relevant is not None:
            queries[example.id], truth[example.id] = vectors[0], dict(example.relevant)
            own[example.id] = set(example.own)
        else:  # the positives and hard negatives of all pairs are searched, by their text
            anchor, positive = example.texts[:2]
            passages |= dict(zip(example.texts[1:], vectors[1:]))
            queries[anchor] = vectors[0]
            truth.setdefault(anchor, {})[positive] = 1.0
            own[anchor] = {anchor} - truth[anchor].keys()
    names = list(passages)
    # as many more as are dropped below
    depth = _DEPTH + max(map(len, own.values()))
    results = _nearest(list(queries.values()), list(passages.values()), depth)
    ranked = []
    for query, cosines, numbers in zip(queries, results.scores, results.numbers):
        best = []
        for cosine, number in zip(cosines, numbers):
            if number >= 0 and names[number] not in own[query]:
                best.append((names[number], float(cosine)))
        del best[_DEPTH:]
        grades = [truth[query].get(name, 0.0) for name, _ in best]
        ranked.append(
            _Ranked(
                id=query,
                best=best,
                grades=grades,
                relevant=list(truth[query].values()),
            )
        )
    return ranked


def _nearest(queries: list[Any], passages: list[Any], depth: int) -> Nearest:
    """Returns the passages with the best scores of each query."""
    if isinstance(queries[0], Terms):
        return nearest_terms(queries, passages, depth)
    if queries[0].ndim == 2:  # of tokens
        return nearest_texts(queries, passages, depth)
    return nearest(np.stack(queries), in_blocks(np.stack(passages)), depth)
