# SPDX-License-Identifier: Apache-2.0
"""Rerankers: a score for each candidate of a query, learnt from all its candidates together.

A row of a table or an object of JSON is a query with its candidates:

    query, documents, labels      lists of candidates and of their grades; a teacher's scores are grades too
    query, positive, negative     texts, or lists of them, as `mine_negatives` writes them; grades are 1 and 0, or in
                                  training `scores`, a list in this order
    query, passage, label         one candidate a row: rows with the same query are its candidates

A dev or test set may also be a directory in BEIR's layout, whose passages another search has found: `ranking.run`.

What is trained is the model of a regression of pairs: it is saved, predicts and is exported as one.
Source: Nogueira and Cho 2019.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bert_jax.batch import Row
from bert_jax.errors import InputError
from bert_jax.model.heads.ranking import RANKING
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.base import (
    CUT,
    Rows,
    Task,
    choose_metric,
    single_row,
    split_names,
    without_zeros,
)
from bert_jax.tasks.candidates import CandidateRows
from bert_jax.tasks.embeddings.beir import beir_place, read_beir, read_run
from bert_jax.tasks.embeddings.prepared import PreparedPairs
from bert_jax.tasks.embeddings.read import NEGATIVE, NO_TEXT, SAME, find_prepared
from bert_jax.tasks.labels import label_number
from bert_jax.tasks.readers import Examples, Table, find_split_file, read_table
from bert_jax.tasks.records import Record, find_column, id_of, no_column
from bert_jax.tasks.scores import RANKING_METRICS, ranking_scores
from bert_jax.tasks.texts import check_length, write_predictions
from bert_jax.text.fitting import join_texts

_QUERIES = ("query", "anchor", "question", "text1", "sentence1")
_LISTS = ("documents", "candidates", "passages", "docs")
_POSITIVES = ("positive", "positives", "pos")
_PASSAGES = ("passage", "document", "text", "answer", "sentence2", "text2")
_GRADES = ("labels", "scores", "grades", "relevance")
_GRADE = ("label", "score", "grade", "relevance")
_IDS = ("id", "idx", "query_id", "query-id")
_ALIKE = "skipped: all candidates alike"
_NOT_FOUND = "relevant passages that the run misses"
_NO_CANDIDATE = "queries without a candidate"


class RankingExample(NamedTuple):
    """A query, its candidates and their grades."""

    query: str
    candidates: tuple[str, ...]
    grades: tuple[float, ...] = ()  # () if they are not known
    id: int | str = 0
    where: str = ""
    missed: tuple[float, ...] = ()  # grades of relevant passages that are no candidates


class Ranked(NamedTuple):
    """The scores of the candidates of a query."""

    scores: tuple[float, ...]


class RerankingTask(Task[RankingExample, Ranked]):
    """A score for each candidate of a query."""

    head = RANKING

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()) -> None:
        """Makes the task, which has no classes. Raises: InputError if a setting cannot be used."""
        super().__init__(config)
        check_length(config)
        self.metric = choose_metric(config, RANKING_METRICS)

    def read(self, source, split) -> Any:
        prepared = find_prepared(self.config, source, split)
        if prepared is not None:
            return prepared
        if split != "train" and (directory := beir_place(source, split)):
            return _of_run(self.config, directory, split)
        path = find_split_file(source, split)
        if not path:
            return Examples()
        if split != "train" and self.config.ranking.run:
            raise InputError(
                f"task.ranking.run has candidates of queries in BEIR's layout, and {path} has its own; leave it out"
            )
        found = _examples(self.config, read_table(path).filled(), split)
        if split == "test":
            return found
        asked = [each for each in found if each.query.strip()]
        # those have nothing to learn or to find
        told = [each for each in asked if len(set(each.grades)) > 1]
        if not told:
            raise InputError(
                f"{path}: no query has candidates of different grades; give each a better and a worse one"
            )
        left_out = {NO_TEXT: len(found) - len(asked), _ALIKE: len(asked) - len(told)}
        counts = found.counts | left_out
        return Examples(told, counts, found.columns)

    def parse(self, value, where):
        """Returns the example of an object such as {"query": ..., "documents": [...]}, or of a pair of texts."""
        if isinstance(value, Mapping):
            record = Record(value, where)
            (example,) = _examples(self.config, Table(where, tuple(record), [record]), "test")
            return example._replace(grades=())
        if isinstance(value, (list, tuple)) and len(value) == 2:
            query, passage = value
            if isinstance(query, str) and isinstance(passage, str):
                return RankingExample(query, (passage,), where=where)
        raise InputError(
            f'{where}: {value!r:.60} is not a query and a passage, nor like {{"query": "...", "documents": ["..."]}}'
        )

    def settle(self, examples):
        """Returns the settings. Raises: InputError if grades do not fit the loss."""
        loss = self.config.ranking.loss
        if isinstance(examples, PreparedPairs):
            if examples.is_graded and loss not in ("bce", "mse"):
                raise InputError(
                    f"{examples.place} has graded pairs, a candidate for each query, and ranking.loss {loss} compares "
                    "several; use mse, or bce for grades from 0 to 1"
                )
            if (
                not (examples.is_graded or examples.are_taught)
                and examples.smallest_score < examples.largest_score
            ):
                raise InputError(
                    f"{examples.place} has a teacher's scores of some queries, and none of others; prepare them apart"
                )
            if not examples.has_negatives and not examples.is_graded:
                raise InputError(
                    f"{examples.place} has no hard negatives, so no query has candidates of different grades; prepare "
                    "what mine_negatives writes"
                )
            grades = [(examples.place, (examples.smallest_score, examples.largest_score))]
        else:
            grades = ((example.where, example.grades) for example in examples)
        most = 1 if loss == "bce" else float("inf")
        for where, own in grades if loss in ("bce", "softmax") else ():
            if not all(0 <= grade <= most for grade in own):
                wrong = next(grade for grade in own if not 0 <= grade <= most)
                kinds = "from 0 to 1" if loss == "bce" else "0 or more"
                raise InputError(
                    f"{where}: grade {wrong:g} is not {kinds}, as ranking.loss {loss} has them; use margin_mse, mse, "
                    "listnet or ranknet"
                )
        return self.config

    def make_rows(self, examples, tokenizer, training):
        """Returns a row with all pairs of an example in training, or else a row for each pair."""
        if isinstance(examples, PreparedPairs):
            examples.check(tokenizer)
            candidates = CandidateRows(examples, tokenizer, self.config.max_seq_length)
            return Rows(candidates, without_zeros({_ALIKE: candidates.num_left_out}))
        counts = {CUT: 0, **getattr(examples, "counts", {})}
        rows = []
        for number, example in enumerate(examples):
            query = tokenizer.encode(example.query)
            passages = tokenizer.encode_batch(list(example.candidates))
            pairs = [
                join_texts(tokenizer, query, passage, self.config.max_seq_length)
                for passage in passages
            ]
            counts[CUT] += sum(pair.was_cut for pair in pairs)
            if not training:
                for place, pair in enumerate(pairs):
                    row = single_row(number, pair.token_ids, detail=place, type_ids=pair.type_ids)
                    rows.append(row)
                continue
            rows.append(
                Row(
                    example=number,
                    token_ids=np.concatenate([pair.token_ids for pair in pairs]),
                    type_ids=np.concatenate([pair.type_ids for pair in pairs]),
                    lengths=tuple(len(pair.token_ids) for pair in pairs),
                    label=(0.0, *example.grades),
                )
            )
        return Rows(rows, without_zeros(counts))

    def decode(self, examples, rows, outputs):
        scores = [[0.0] * len(example.candidates) for example in examples]
        for row, output in zip(rows, outputs):
            scores[row.example][row.detail] = float(np.ravel(output)[0])
        return [Ranked(tuple(each)) for each in scores]

    def score(self, examples, predictions):
        """Returns metrics of the rankings; of equal scores the worse candidate comes first."""
        rankings = []
        truth = []
        for example, said in zip(examples, predictions):
            scored = sorted((-score, grade) for score, grade in zip(said.scores, example.grades))
            ranking = [grade for _, grade in scored]
            if relevant := [grade for grade in (*ranking, *example.missed) if grade > 0]:
                rankings.append(ranking)
                truth.append(relevant)
        return ranking_scores(rankings, truth)

    def show(self, prediction):
        return {"scores": [round(score, 6) for score in prediction.scores]}

    def write(self, directory, split, examples, predictions):
        """Writes the scores of each query's candidates, in their order, separated by blanks."""
        values = (" ".join(f"{score:.6f}" for score in said.scores) for said in predictions)
        write_predictions(directory / f"{split}.tsv", zip(examples, values))

    def as_saved(self) -> TaskConfig:
        """Returns the settings of the regression that a trained model is."""
        learnt = "sigmoid" if self.config.ranking.loss == "bce" else self.config.activation
        return dataclasses.replace(
            self.config, name="regression", num_texts=2, metric="", activation=learnt
        )


def _of_run(config: TaskConfig, directory: str, split: str) -> Examples:
    """Returns the queries of a directory in BEIR's layout, with the passages that a search has found first."""
    if not config.ranking.run:
        raise InputError(
            f"{directory} has no candidates for its queries; give what a search has found as task.ranking.run"
        )
    found = read_beir(directory, split)
    ranked = read_run(config.ranking.run)
    passages = {each.id: each.texts[0] for each in found if each.is_passage}
    examples = []
    counts = {_NOT_FOUND: 0, _NO_CANDIDATE: 0}
    for query in found:
        if query.relevant is None:
            continue
        near = [name for name in ranked.get(str(query.id), ()) if name in passages]
        names = [name for name in near if name not in query.own][: config.ranking.candidates]
        missed = [grade for name, grade in query.relevant.items() if name not in names]
        counts[_NOT_FOUND] += len(missed)
        counts[_NO_CANDIDATE] += not names
        examples.append(
            RankingExample(
                query=query.texts[0],
                candidates=tuple(passages[name] for name in names),
                grades=tuple(query.relevant.get(name, 0.0) for name in names),
                id=query.id,
                where=query.where,
                missed=tuple(missed),
            )
        )
    if examples and counts[_NO_CANDIDATE] == len(examples):
        raise InputError(
            f"{config.ranking.run} has no passage for a query of {directory}; its ids are to be those of BEIR's files"
        )
    return Examples(examples, without_zeros({**found.counts, **counts}))


def _examples(config: TaskConfig, table: Table, split: str) -> Examples:
    """Returns the queries of a table. Raises: InputError, with file and line, if it has no such columns."""
    columns = table.columns

    def column(set_: str, usual: Sequence[str]) -> str:
        return set_ or find_column(usual, columns)

    query = column(config.text_column, _QUERIES)
    if not query:
        raise no_column(table.place, "query", columns)
    listed = find_column(_LISTS, columns)
    positive = find_column(_POSITIVES, columns)
    negatives = split_names(config.embedding.negative_columns)
    negatives = negatives or tuple(name for name in columns if NEGATIVE.fullmatch(name))
    number = find_column(_IDS, columns)
    if not listed and not positive:
        passage = column(config.second_text_column, _PASSAGES)
        grade = column(config.label_column, _GRADE)
        for name, found in (("documents, positive or passage", passage), ("label", grade)):
            if not found:
                raise no_column(table.place, name, columns)
        return _grouped(table, query, passage, grade, number)
    grades = column(config.label_column, _GRADES)
    if grades == "scores" and not listed and split != "train":
        grades = ""  # a teacher's; what is relevant is known
    examples = []
    same = 0
    for place, record in enumerate(table.records):
        texts = _texts(record, listed) if listed else _texts(record, positive)
        count = len(texts)
        if not listed:
            for name in negatives:
                texts += _texts(record, name)
        given = record.get(grades) if grades else None
        if given is None and not listed:
            given = [1.0] * count + [0.0] * (len(texts) - count)
        listed_grades = given if isinstance(given, list | None) else [given]
        values = [label_number(each, record.where) for each in listed_grades or ()]
        known = [value for value in values if value is not None]
        if given is not None and not len(known) == len(values) == len(texts):
            raise InputError(
                f"{record.where} has {len(known)} {grades} for {len(texts)} candidates; give each one"
            )
        # a negative that is a positive too would have two grades
        is_one = [n < count or text not in texts[:count] for n, text in enumerate(texts)]
        same += not all(is_one)
        examples.append(
            RankingExample(
                query="" if record.get(query) is None else record.get_as(query, str),
                candidates=tuple(itertools.compress(texts, is_one)),
                grades=tuple(itertools.compress(known, is_one)),
                id=id_of(record.get(number), place),
                where=record.where,
            )
        )
    names = (query, listed, *(() if listed else (positive, *negatives)), grades)
    return Examples(examples, {SAME: same}, names)


def _grouped(table: Table, query: str, passage: str, grade: str, number: str) -> Examples:
    """Returns the queries of rows with one candidate each."""
    groups: dict[str, list[Record]] = {}
    for record in table.records:
        groups.setdefault(record.get_as(query, str), []).append(record)
    examples = []
    for place, (text, records) in enumerate(groups.items()):
        grades = [label_number(record.get(grade), record.where) for record in records]
        known = tuple(value for value in grades if value is not None)
        if known and len(known) < len(grades):
            raise InputError(
                f"{records[grades.index(None)].where} has no {grade!r}, and other candidates of its query have one; "
                "add it, or remove the row"
            )
        examples.append(
            RankingExample(
                query=text,
                candidates=tuple(record.get_as(passage, str) for record in records),
                grades=known,
                id=id_of(records[0].get(number), place),
                where=records[0].where,
            )
        )
    return Examples(examples, columns=(query, passage, grade))


def _texts(record: Record, name: str) -> list[str]:
    """Returns the text or the list of texts of a column, without what is missing."""
    value: Any = record.get(name)
    texts = [text for text in (value if isinstance(value, list) else [value]) if text is not None]
    if not all(isinstance(text, str) for text in texts):
        raise record.wrong(name, "a text or a list of texts")
    return [text for text in texts if text]
