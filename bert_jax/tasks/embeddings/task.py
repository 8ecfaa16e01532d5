# SPDX-License-Identifier: Apache-2.0
"""Embeddings: vectors of texts that are close to each other if the texts belong together.

Graded pairs are scored by the correlation of their cosines with the scores. Other data are searched: the texts of all
pairs, or BEIR's corpus, for those that belong to each query.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.batch import Row
from bert_jax.errors import InputError, shown
from bert_jax.model.heads.embedding import EMBEDDINGS
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.storage.places import Place
from bert_jax.storage.writing import atomic_path
from bert_jax.tasks import scores
from bert_jax.tasks.base import CUT, Rows, Task, choose_metric
from bert_jax.tasks.embeddings.read import SAME, TextsExample, is_graded, read_texts
from bert_jax.tasks.embeddings.search import in_blocks, nearest
from bert_jax.tasks.texts import NUMBER_METRICS, check_length, write_predictions
from bert_jax.text.fitting import join_texts
from bert_jax.text.tokenizer import Tokenizer

_DEPTH = 100  # of rankings
_USUAL_LENGTH = 128
# Of `EmbeddingConfig`, what comes from an embedding model that a run starts from, where it is at its default.
_OF_START = (
    *("pooling", "projection_size", "projection_activation", "normalize", "kept_dimensions"),
    *("query_prompt", "passage_prompt", "other_prompts", "default_prompt"),
)
METRICS = (*scores.RANKING_METRICS, *NUMBER_METRICS)


class Embedded(NamedTuple):
    """The vectors of the texts of an example."""

    vectors: np.ndarray  # [T, K] float32


class EmbeddingTask(Task):
    """A vector for each text."""

    head = EMBEDDINGS

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()) -> None:
        """Makes the task, which has no classes. Raises: InputError if a setting cannot be used."""
        super().__init__(
            dataclasses.replace(config, max_seq_length=config.max_seq_length or _USUAL_LENGTH)
        )
        check_length(self.config)
        self.metric = choose_metric(config, METRICS)

    def read(self, source: str, split: str) -> list[TextsExample]:
        return read_texts(self.config, source, split)

    def parse(self, value: object, where: str) -> TextsExample:
        """Returns the example of a text, which is a query, or of {"query": ...} or {"passage": ...}."""
        if isinstance(value, Mapping) and len(value) == 1:
            kind, text = next(iter(value.items()))
            if kind in ("query", "passage", "text") and isinstance(text, str):
                return TextsExample((text,), None, 0, where, is_passage=kind == "passage")
        if isinstance(value, (list, tuple)) and len(value) == 1:
            value = value[0]
        if not isinstance(value, str):
            raise InputError(
                f'{where}: {value!r:.60} is not a text; give a string, or {{"passage": "..."}}'
            )
        return TextsExample((value,), None, 0, where)

    def settle(self, examples: Sequence[TextsExample]) -> TaskConfig:
        """Returns the settings with the loss and the metric for the data. Raises: InputError if they do not fit."""
        graded = is_graded(examples)
        loss = self.config.embedding.loss or ("cosent" if graded else "infonce")
        if graded != (loss in ("cosent", "cosine")):
            kind, fitting = (
                ("graded pairs", "cosent or cosine")
                if graded
                else ("texts without scores", "infonce or triplet")
            )
            raise InputError(f"embedding.loss {loss} is not for {kind}; use {fitting}")
        if loss == "triplet" and not any(len(example.texts) > 2 for example in examples):
            raise InputError(
                "embedding.loss triplet needs hard negatives, and no example has one; use infonce"
            )
        if loss == "infonce" and len({example.texts[1] for example in examples}) < 2 < len(
            examples
        ):
            same = f"all {len(examples)} examples have the positive {examples[0].texts[1]!r:.60}"
            raise InputError(f"{examples[0].where}: {same}; check task.second_text_column")
        best = self.config.embedding.best_score
        for example in examples if loss == "cosine" else ():
            if abs(example.score or 0) > best:
                raise InputError(
                    f"{example.where}: score {example.score:g} is above embedding.best_score {best:g}"
                )
        metric = self.config.metric or getattr(examples, "metric", "")
        embedding = dataclasses.replace(self.config.embedding, loss=loss)
        return dataclasses.replace(self.config, metric=metric, embedding=embedding)

    def make_rows(
        self, examples: Sequence[TextsExample], tokenizer: Tokenizer, training: bool
    ) -> Rows:
        """Returns a row with a label for each example in training, or else a row for each distinct text."""
        counts = dict(getattr(examples, "counts", {}))
        fitted, cut = fit_prompted(self.config, _keys(examples), tokenizer)
        counts[CUT] = cut
        rows: list[Row] = []
        if not training:
            occurrences: dict[tuple[bool, str], list[tuple[int, int]]] = {}
            for number, example in enumerate(examples):
                for index, text in enumerate(example.texts):
                    occurrences.setdefault((example.is_query(index), text), []).append(
                        (number, index)
                    )
            for key, uses in occurrences.items():
                ids = fitted[key][0]
                rows.append(
                    Row(uses[0][0], ids, np.zeros(len(ids), np.uint8), (len(ids),), None, uses)
                )
            return Rows(rows, {reason: count for reason, count in counts.items() if count})
        numbers: dict[bytes, int] = {}
        same = 0
        for number, example in enumerate(examples):
            parts = [
                fitted[example.is_query(index), text] for index, text in enumerate(example.texts)
            ]
            texts = [numbers.setdefault(known, len(numbers)) for _, known in parts]
            same += texts[1] in texts[2:]
            ids = np.concatenate([part for part, _ in parts])
            lengths = tuple(len(part) for part, _ in parts)
            rows.append(
                Row(
                    number,
                    ids,
                    np.zeros(len(ids), np.uint8),
                    lengths,
                    (example.score or 0.0, *texts),
                )
            )
        counts[SAME] = counts.get(SAME, 0) + same
        return Rows(rows, {reason: count for reason, count in counts.items() if count})

    def decode(
        self, examples: Sequence[TextsExample], rows: Sequence[Row], outputs: Sequence[np.ndarray]
    ) -> list[Embedded]:
        by_example: list[list[np.ndarray]] = [
            [np.zeros(0)] * len(example.texts) for example in examples
        ]
        for row, vector in zip(rows, outputs):
            for number, index in row.detail:
                by_example[number][index] = np.asarray(vector, np.float32)
        return [Embedded(np.stack(vectors)) for vectors in by_example]

    def score(
        self, examples: Sequence[TextsExample], predictions: Sequence[Embedded]
    ) -> dict[str, float]:
        """Returns correlations of graded pairs, or else metrics of rankings."""
        if is_graded(examples):
            truth = [float(example.score or 0.0) for example in examples]
            return {
                name: metric(truth, _cosines(predictions))
                for name, metric in NUMBER_METRICS.items()
            }
        ranked = _rank(examples, predictions)
        return scores.ranking_scores(
            [grades for _, _, grades, _ in ranked], [truth for _, _, _, truth in ranked]
        )

    def show(self, prediction: Embedded) -> dict[str, object]:
        return {"embedding": [round(float(value), 6) for value in prediction.vectors[0]]}

    def write(
        self,
        directory: Place,
        split: str,
        examples: Sequence[TextsExample],
        predictions: Sequence[Embedded],
    ) -> None:
        """Writes the cosines of graded pairs to SPLIT.tsv, or rankings to SPLIT.trec, as trec_eval reads them."""
        if is_graded(examples) or all(
            len(example.texts) > 1 and example.relevant is None for example in examples
        ):
            ids = [example.id for example in examples]
            write_predictions(directory / f"{split}.tsv", ids, _cosines(predictions))
            return
        lines = [
            f"{query} Q0 {name} {rank} {cosine:.6f} bert_jax\n"
            for query, best, _, _ in _rank(examples, predictions)
            for rank, (name, cosine) in enumerate(best, 1)
        ]
        with atomic_path(directory / f"{split}.trec") as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")


def from_start(config: TaskConfig, start: TaskConfig | None) -> tuple[TaskConfig, list[str]]:
    """Returns the settings, with what they leave open as in an embedding model to start from, and lines about it."""
    usual = {name: getattr(EmbeddingConfig(), name) for name in _OF_START} | {"max_seq_length": 0}

    def settings_of(task: TaskConfig) -> dict[str, Any]:
        own = {name: getattr(task.embedding, name) for name in _OF_START}
        return own | {"max_seq_length": task.max_seq_length}

    given = settings_of(config)
    own = usual if start is None else settings_of(start)
    is_open = {
        name: config.embedding.from_start and value == usual[name] for name, value in given.items()
    }
    chosen = {name: own[name] if is_open[name] else value for name, value in given.items()}
    chosen["max_seq_length"] = chosen["max_seq_length"] or _USUAL_LENGTH
    taken = [
        f"{name} {shown(value)}"
        for name, value in chosen.items()
        if value == own[name] != usual[name]
    ]
    other = [
        f"{name} {shown(value)} (not {shown(own[name])})"
        for name, value in chosen.items()
        if value != own[name]
    ]
    lines = [f"from it: {', '.join(taken)}"] if taken else []
    lines += [f"from the settings: {', '.join(other)}"] if other and start is not None else []
    chosen["pooling"] = chosen["pooling"] or "mean"
    length = chosen.pop("max_seq_length")
    embedding = dataclasses.replace(config.embedding, **chosen)
    return dataclasses.replace(config, max_seq_length=length, embedding=embedding), lines


def are_alone(examples: Sequence[TextsExample]) -> bool:
    """Returns whether each text is its own positive, as in SimCSE."""
    return all(example.texts[:1] == example.texts[1:] for example in examples)


def _keys(examples: Sequence[TextsExample]) -> list[tuple[bool, str]]:
    """Returns (whether it is a query, text) for each distinct text."""
    return list(
        dict.fromkeys(
            (example.is_query(i), text)
            for example in examples
            for i, text in enumerate(example.texts)
        )
    )


def fit_prompted(
    config: TaskConfig, keys: Sequence[tuple[bool, str]], tokenizer: Tokenizer
) -> tuple[dict[tuple[bool, str], tuple[np.ndarray, bytes]], int]:
    """Returns [CLS] prompt text [SEP] of each text, the same bytes for texts of the same tokens, and how many were cut.

    Raises: InputError if a prompt leaves no room for a text.
    """
    prompts = {True: config.embedding.query_prompt, False: config.embedding.passage_prompt}
    counts = {kind: len(tokenizer.encode(prompt)) for kind, prompt in prompts.items()}
    for kind, count in counts.items():
        if count + 3 > config.max_seq_length:
            length = (
                f"task.max_seq_length {config.max_seq_length} leaves no room for a text after it"
            )
            raise InputError(f"the prompt {prompts[kind]!r:.60} has {count} tokens, and {length}")
    encoded = tokenizer.encode_batch([prompts[kind] + text for kind, text in keys])
    joined = [join_texts(tokenizer, ids, None, config.max_seq_length) for ids in encoded]
    # A prompt may end within a word of the text, so texts are compared by their own tokens, as far as there is room.
    alone = tokenizer.encode_batch([text for _, text in keys]) if any(prompts.values()) else encoded
    room = config.max_seq_length - 2 - max(counts.values())
    texts = {
        key: (row.token_ids, np.asarray(ids[:room], np.int32).tobytes())
        for key, row, ids in zip(keys, joined, alone)
    }
    return texts, sum(row.was_cut for row in joined)


def _cosines(predictions: Sequence[Embedded]) -> list[float]:
    pairs = np.stack([prediction.vectors[:2] for prediction in predictions]).astype(np.float64)
    pairs /= np.maximum(np.linalg.norm(pairs, axis=-1, keepdims=True), 1e-12)
    return np.sum(pairs[:, 0] * pairs[:, 1], axis=-1).tolist()


Ranked = tuple[int | str, list[tuple[int | str, float]], list[float], list[float]]


def _rank(examples: Sequence[TextsExample], predictions: Sequence[Embedded]) -> list[Ranked]:
    """Returns for each query its id, the ids and cosines of the best passages, their grades, and all grades above 0.

    A passage that is the query itself is not among its results, unless it is relevant to it.
    """
    queries: dict[int | str, np.ndarray] = {}
    truth: dict[int | str, dict[str, float]] = {}
    passages: dict[int | str, np.ndarray] = {}
    own: dict[int | str, set[str]] = {}
    if any(example.relevant is not None for example in examples):
        for example, (vectors,) in (
            (example, prediction.vectors) for example, prediction in zip(examples, predictions)
        ):
            if example.is_passage:
                passages[example.id] = vectors
            else:
                queries[example.id], truth[example.id] = vectors, dict(example.relevant or {})
                own[example.id] = set(example.own)
    else:  # the positives and hard negatives of all pairs, by their text
        for example, prediction in zip(examples, predictions):
            passages |= dict(zip(example.texts[1:], prediction.vectors[1:]))
            queries[example.texts[0]] = prediction.vectors[0]
            truth.setdefault(example.texts[0], {})[example.texts[1]] = 1.0
        own = {query: {str(query)} - grades.keys() for query, grades in truth.items()}
    names = list(passages)
    depth = _DEPTH + max(map(len, own.values()))
    results = nearest(
        np.stack(list(queries.values())), in_blocks(np.stack(list(passages.values()))), depth
    )
    ranked: list[Ranked] = []
    for query, cosines, numbers in zip(queries, results.cosines, results.numbers):
        found = [(names[n], float(cosine)) for cosine, n in zip(cosines, numbers) if n >= 0]
        best = [(name, cosine) for name, cosine in found if name not in own[query]][:_DEPTH]
        grades = truth[query]
        ranked.append(
            (query, best, [grades.get(name, 0.0) for name, _ in best], list(grades.values()))
        )
    return ranked
