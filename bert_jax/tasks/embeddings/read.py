# SPDX-License-Identifier: Apache-2.0
"""Reads texts that belong together: from tables, SQuAD's files and BEIR's directories.

The columns of a table or the keys of JSON decide what its rows are:

    anchor, positive [, negative, negative_2 ...]     a text, one that belongs to it, and hard negatives
    sentence1, sentence2, score                       a graded pair: the higher, the more alike
    premise, hypothesis, label                        pairs of NLI: a text that a premise entails belongs to it, a text
                                                      that contradicts it is a hard negative (Gao et al. 2021, "SimCSE")
    text                                              a text, which is its own positive under another dropout (ibid.);
                                                      also a .txt file with a text a line, without names of columns

Names are the usual ones, or the settings `text_column`, `second_text_column`, `label_column` and
`embedding.negative_columns`. `beir` reads directories of BEIR. SQuAD's questions belong to their paragraphs.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks import readers
from bert_jax.tasks.base import split_names
from bert_jax.tasks.classify import CLASS_COLUMNS
from bert_jax.tasks.columnar import classes_in
from bert_jax.tasks.embeddings.beir import OWN_TEXT, beir_place, read_beir
from bert_jax.tasks.labels import label_number
from bert_jax.tasks.squad.read import read_squad, read_squad_file
from bert_jax.tasks.texts import id_of, named_class

_PAIRS = (("anchor", "positive"), ("query", "positive"), ("query", "pos"), ("query", "passage"), ("query", "document"),
          ("query", "answer"), ("question", "answer"), ("question", "context"), ("question", "passage"),
          ("premise", "hypothesis"), ("sentence1", "sentence2"), ("sentence_a", "sentence_b"), ("text1", "text2"),
          ("question1", "question2"), ("sent0", "sent1"))  # fmt: skip
_TEXTS = ("text", "sentence", "content", "document")
_SCORES = (
    "score",
    "similarity_score",
    "relatedness_score",
    "similarity",
    "label",
    "gold_label",
    "is_duplicate",
)
_IDS = ("id", "idx", "index", "pair_id")
_NEGATIVE = re.compile(r"(hard_?)?neg(ative)?s?_?\d{0,9}")
_NLI = ("entailment", "neutral", "contradiction")
NO_TEXT, SAME = "skipped: a text is empty", "negatives equal to the positive"


class TextsExample(NamedTuple):
    """Texts that belong together, or a single query or passage."""

    texts: tuple[str, ...]  # an anchor or query, its positive, hard negatives
    score: float | None = None  # of a graded pair
    id: int | str = 0
    where: str = ""
    relevant: Mapping[str, float] | None = None  # of a query: its relevant passages, id -> grade
    is_passage: bool = False  # whether it is one of the passages to search
    # of a query: ids of passages that are the query itself, and never among its results
    own: Sequence[str] = ()

    def is_query(self, place: int) -> bool:
        """Returns whether a text takes the query's prompt; both texts of a pair without a direction do."""
        has_none = self.score is not None or self.texts[:1] == self.texts[1:]
        return not self.is_passage and (place == 0 or has_none)


class TextsExamples(readers.Examples):
    """Examples, and of training data the metric that fits the dev set."""

    metric = ""


def is_graded(examples: Sequence[TextsExample]) -> bool:
    """Returns whether these are graded pairs."""
    return any(example.score is not None for example in examples)


def read_texts(config: TaskConfig, source: str, split: str) -> TextsExamples:
    """Returns the examples of a split; [] if it is missing. Raises: InputError with file and line."""
    examples = _read(config, source, split)
    if not examples and (empty := examples.counts.get(NO_TEXT, 0)):
        names = " or ".join(examples.columns[:2])
        raise InputError(
            f"{split} of {source}: in all {empty} rows {names} is empty; name other columns in task"
        )
    if split == "train" and examples:
        is_searched = _is_squad(source) or beir_place(source, "dev")
        is_ranked = is_searched or not is_graded(_read(config, source, "dev") or examples)
        examples.metric = "ndcg@10" if is_ranked else "spearman"
    if (
        split == "dev"
        and examples
        and all(example.texts[:1] == example.texts[1:] for example in examples)
    ):
        raise InputError(
            f"{examples[0].where}: single texts score no vectors; give a dev set of pairs"
        )
    if split != "train" and not is_graded(examples):
        examples.counts |= _count_own(examples)
    if is_graded(examples) and split != "test" and len({example.score for example in examples}) < 2:
        raise InputError(
            f"{examples[0].where}: all pairs have one score; there must be two or more"
        )
    return examples


def _read(config: TaskConfig, source: str, split: str) -> TextsExamples:
    if _is_squad(source):
        return _squad(read_squad(source, split), source)
    if directory := beir_place(source, split):
        return _of_beir(directory, split)
    path = readers.find_split_file(source, split)
    if not path:
        return TextsExamples()
    if _has_lines(config, path):
        return _of_lines(path)
    table = readers.read_table(path)
    if "paragraphs" in table.columns:
        return _squad(read_squad_file(path), path)
    if not table.records:
        raise InputError(f"{path} holds no example; give data, a row or object for each")
    return _of_table(config, table.records, table.columns, path)


def _is_squad(source: str) -> bool:
    return bool(
        re.search(r"\[-?\d*:-?\d*\]", source) or re.match(r"(train|dev|test)=|tfds:squad", source)
    )


def _squad(examples: Iterable, where: str) -> TextsExamples:
    pairs = (
        TextsExample((example.question, example.context), None, example.id, where)
        for example in examples
    )
    return _without_empty(pairs, ("question", "context"))


# Tables


def _has_lines(config: TaskConfig, path: str) -> bool:
    """Returns whether a file is a text a line: a .txt whose first line names no columns."""
    if not readers.plain_name(path).endswith(".txt") or config.text_column:
        return False
    return not _usual_texts([name.strip() for name in readers.first_row(path)])[0]


def _of_lines(path: str) -> TextsExamples:
    """Returns the texts of a file, one a line. Raises: InputError if each has a tab, so that they look like columns."""
    lines = [
        (f"{path}:{number}", line)
        for number, line in enumerate(readers.read_lines(path), 1)
        if line.strip()
    ]
    if len(lines) > 1 and all("\t" in line for _, line in lines):
        raise InputError(
            f"{path}: all lines have tabs; name the columns in a first line, such as anchor and positive"
        )
    texts = (
        TextsExample((line, line), None, number, where)
        for number, (where, line) in enumerate(lines)
    )
    return _without_empty(texts, ("lines",))


def _of_table(
    config: TaskConfig, rows: Sequence[readers.Record], columns: Sequence[str], path: str
) -> TextsExamples:
    first, second, negatives, label = _columns(config, columns, path)
    number = readers.find_column(_IDS, columns)
    names = classes_in(path).get(label)
    names = names or split_names(config.labels)

    def label_of(record: readers.Record) -> object:
        value = record.get(label)
        if isinstance(value, str) and value.strip().isdecimal() and len(value) < 9 and names:
            value = int(value)
        return named_class(value, names)

    is_nli = bool(label) and not negatives and any(str(label_of(record)) in _NLI for record in rows)
    if label and not is_nli and (first.lower(), second.lower()) == ("premise", "hypothesis"):
        given = f"label {rows[0].get(label)!r:.40}"
        raise InputError(
            f"{rows[0].where}: {given} is not one of {', '.join(_NLI)}; or set task.labels"
        )
    others = [name for name in columns if name not in (first, second, *negatives)]
    examples = []
    for position, record in enumerate(rows):
        positive = record.get(second or first)
        against: list[Any] = []
        for name in negatives:
            value = record.get(name)
            against += (
                value if isinstance(value, list) else [value] if value not in (None, "") else []
            )
        score = label_number(record.get(label), record.where) if label and not is_nli else None
        if label and not is_nli and score is None:
            raise InputError(
                f"{record.where} has no {label!r}; give each pair a score, or remove it"
            )
        id_ = id_of(record.get(number), position)
        # a pair per list item
        for partner in positive if isinstance(positive, list) and positive else [positive]:
            texts = [record.get(first), partner, *against]
            for text, name in zip(
                texts, (first, second or first, *negatives, *negatives[-1:] * len(texts))
            ):
                if not isinstance(text, str | None):
                    raise InputError(f"{record.where}: {name!r} is {text!r:.60}, not a text")
            example = TextsExample(tuple(text or "" for text in texts), score, id_, record.where)
            examples.append((example, label_of(record)))
    columns = (first, second, *negatives, label)
    if is_nli:
        pairs, counts = _of_nli(examples)
        return _without_empty(pairs, columns, counts)
    unused = "" if label else readers.find_column((*_SCORES, *CLASS_COLUMNS), others)
    counts = (
        {f"{unused!r} is not used with {'negatives' if second else 'texts alone'}:": len(rows)}
        if unused
        else {}
    )
    return _without_empty((example for example, _ in examples), columns, counts)


def _columns(
    config: TaskConfig, columns: Sequence[str], path: str
) -> tuple[str, str, tuple[str, ...], str]:
    """Returns the columns of the first text, the second, hard negatives and the label; "" if missing."""
    named = split_names(config.embedding.negative_columns)
    for name in (config.text_column, config.second_text_column, config.label_column, *named):
        if name and name not in columns:
            raise readers.no_column(path, name, columns)
    first, second = config.text_column, config.second_text_column
    if not first:
        first, usual = _usual_texts(columns)
        second = second or usual
    if not first:
        raise readers.no_column(path, "anchor, positive or another of texts", columns)
    usual = [
        name
        for name in columns
        if _NEGATIVE.fullmatch(name.lower()) and name not in (first, second)
    ]
    negatives = tuple(named or usual) if second else ()
    if config.label_column and not second:
        raise InputError(
            f"{path}: task.label_column is of a pair; name the second text in task.second_text_column"
        )
    label = config.label_column or (
        "" if negatives or not second else readers.find_column(_SCORES, columns)
    )
    return first, second, negatives, label


def _usual_texts(columns: Sequence[str]) -> tuple[str, str]:
    """Returns the columns of a pair with usual names, or of a text and ""; "" for both if there are none."""
    pairs = ([readers.find_column((name,), columns) for name in pair] for pair in _PAIRS)
    first, second = next(
        (pair for pair in pairs if all(pair)), (readers.find_column(_TEXTS, columns), "")
    )
    return first, second


def _of_nli(
    examples: Sequence[tuple[TextsExample, object]],
) -> tuple[list[TextsExample], dict[str, int]]:
    """Returns each premise with a text it entails and, if any, one that contradicts it; and counts of unused pairs."""
    by_premise: dict[str, dict[str, list[TextsExample]]] = {}
    for example, label in examples:
        if label not in (*_NLI, "-", None):  # hidden, or people did not agree
            raise InputError(
                f"{example.where}: label {label!r:.40} is not one of {', '.join(_NLI)}; write one of them"
            )
        by_premise.setdefault(example.texts[0], {}).setdefault(str(label), []).append(example)
    triplets = []
    for groups in by_premise.values():
        against = [example.texts[1] for example in groups.get("contradiction", ())]
        for number, example in enumerate(groups.get("entailment", ())):
            negative = (against[number % len(against)],) if against else ()
            triplets.append(example._replace(texts=(*example.texts, *negative)))
    return triplets, {"pairs that are not entailment": len(examples) - len(triplets)}


def _without_empty(
    examples: Iterable[TextsExample],
    columns: Sequence[str] = (),
    counts: Mapping[str, int] | None = None,
) -> TextsExamples:
    """Returns the examples with an anchor and a positive, without negatives that are empty or equal to the positive."""
    kept, empty, same = [], 0, 0
    for example in examples:
        texts = example.texts
        if not all(text.strip() for text in texts[:2]):
            empty += 1
            continue
        negatives = tuple(text for text in texts[2:] if text.strip() and text != texts[1])
        same += texts[1] in texts[2:]
        kept.append(example._replace(texts=(*texts[:2], *negatives)))
    return TextsExamples(kept, {**(counts or {}), NO_TEXT: empty, SAME: same}, columns)


def _count_own(pairs: Sequence[TextsExample]) -> dict[str, int]:
    """Returns the number of anchors that are among the texts to search, and do not belong to themselves."""
    searched = {text for pair in pairs for text in pair.texts[1:]}
    belongs = {pair.texts[0] for pair in pairs if pair.texts[:1] == pair.texts[1:2]}
    count = len({pair.texts[0] for pair in pairs} & searched - belongs)
    return {OWN_TEXT: count} if count else {}


# BEIR


def _of_beir(place: str, split: str) -> TextsExamples:
    """Returns pairs to train on, or the queries of a split with their relevant passages, and all passages."""
    data = read_beir(place, split)
    if data is None:
        return TextsExamples()
    if split == "train":
        pairs = (
            TextsExample((query.text, data.passages[name]), None, query.id, query.where)
            for query in data.queries
            for name in query.relevant
            if name in data.passages
        )
        return _without_empty(pairs, counts=data.counts)
    queries = [
        TextsExample((query.text,), None, query.id, query.where, query.relevant, own=query.own)
        for query in data.queries
    ]
    where = queries[0].where
    passages = (
        TextsExample((text,), None, name, where, None, True) for name, text in data.passages.items()
    )
    return TextsExamples([*queries, *passages], data.counts)
