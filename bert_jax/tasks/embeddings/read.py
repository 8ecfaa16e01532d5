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

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from bert_jax.errors import InputError
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks import readers
from bert_jax.tasks.base import split_names
from bert_jax.tasks.classify import CLASS_COLUMNS
from bert_jax.tasks.columnar import classes_in
from bert_jax.tasks.embeddings.beir import (
    OWN_TEXT,
    TextsExample,
    TextsExamples,
    beir_place,
    read_beir,
)
from bert_jax.tasks.embeddings.prepared import PreparedPairs, is_prepared, open_pairs
from bert_jax.tasks.labels import label_number
from bert_jax.tasks.records import (
    Record,
    find_column,
    find_columns,
    id_of,
    listed_columns,
    named_class,
    no_column,
)
from bert_jax.tasks.squad.read import SquadExample, read_squad, read_squad_file

_PAIRS = (("anchor", "positive"), ("query", "positive"), ("query", "pos"), ("query", "passage"), ("query", "document"),
          ("query", "answer"), ("question", "answer"), ("question", "context"), ("question", "passage"),
          ("premise", "hypothesis"), ("sentence1", "sentence2"), ("sentence_a", "sentence_b"), ("text1", "text2"),
          ("question1", "question2"), ("sent0", "sent1"))  # fmt: skip
_TEXTS = ("text", "sentence", "content", "document")
_COLUMNS = (*_PAIRS, *((name,) for name in _TEXTS))
_SCORES = (
    "score",
    "similarity_score",
    "relatedness_score",
    "similarity",
    "label",
    "gold_label",
    "is_duplicate",
)
_TAUGHT = ("scores",)  # a teacher's, of positives and then of negatives, in a list
_IDS = ("id", "idx", "index", "pair_id")
_VERSIONED = {
    split: (*stems, *(rf"{stem}-v\d\.\d" for stem in stems))
    for split, stems in readers.SPLITS.items()
}
NEGATIVE = re.compile(r"(hard_?)?neg(ative)?s?_?\d{0,9}", re.IGNORECASE)
_NLI = ("entailment", "neutral", "contradiction")
_UNAGREED = ("-", None)  # hidden, or people did not agree
NO_TEXT = "skipped: a text is empty"
SAME = "negatives equal to the positive"


def is_graded(examples: Sequence[TextsExample] | PreparedPairs) -> bool:
    """Returns whether these are graded pairs."""
    if isinstance(examples, PreparedPairs):
        return examples.is_graded
    return any(example.score is not None for example in examples)


def are_alone(examples: Sequence[TextsExample] | PreparedPairs) -> bool:
    """Returns whether each text is its own positive, as in SimCSE."""
    if isinstance(examples, PreparedPairs):
        return examples.are_alone
    return all(example.texts[:1] == example.texts[1:] for example in examples)


def are_taught(examples: Sequence[TextsExample] | PreparedPairs) -> bool:
    """Returns whether all have a teacher's scores."""
    if isinstance(examples, PreparedPairs):
        return examples.are_taught
    return all(example.scores for example in examples)


def read_prepared(
    config: TaskConfig, source: str, split: str
) -> PreparedPairs | TextsExamples | None:
    """Returns what `find_prepared` does, with the metric that fits the dev set."""
    pairs = find_prepared(config, source, split)
    if isinstance(pairs, PreparedPairs) and pairs.place != source:
        # The best is chosen on dev, which may be graded where training data are not.
        if dev := _read(config, source, "dev"):
            pairs.metric = "spearman" if is_graded(dev) else "ndcg@10"
    return pairs


def find_prepared(
    config: TaskConfig, source: str, split: str
) -> PreparedPairs | TextsExamples | None:
    """Returns the prepared pairs of a split, [] for a split that they have not; None if the source is no such data.

    Raises: InputError as `open_pairs`, or if another split than "train" is prepared.
    """
    place = "" if is_squad(source) else readers.part_of(source, split)
    if not is_prepared(place):
        return None
    if split != "train":
        if place != source:
            raise InputError(f"{place} is prepared to train on; give a table as {split}")
        return TextsExamples()
    return open_pairs(place, config)


def read_texts(config: TaskConfig, source: str, split: str) -> TextsExamples:
    """Returns the examples of a split; [] if it is missing. Raises: InputError with file and line."""
    examples = _read(config, source, split)
    if not examples and (empty := examples.counts.get(NO_TEXT, 0)):
        names = " or ".join(examples.columns[:2]) or "a text"
        raise InputError(
            f"{split} of {source}: in all {empty} rows {names} is empty; name other columns in task"
        )
    if not examples:
        return examples
    where = examples[0].where
    graded = is_graded(examples)
    if split == "dev" and are_alone(examples):
        raise InputError(f"{where}: single texts score no vectors; give a dev set of pairs")
    if split == "train":
        if not is_squad(source) and not beir_place(source, "dev"):
            # The best is chosen on dev, which may be graded where training data are not.
            graded = is_graded(_read(config, source, "dev") or examples)
        examples.metric = "spearman" if graded else "ndcg@10"
    elif not graded:  # anchors among the texts to search, that do not belong to themselves
        searched = {text for pair in examples for text in pair.texts[1:]}
        belongs = {pair.texts[0] for pair in examples if pair.texts[:1] == pair.texts[1:2]}
        if own := {pair.texts[0] for pair in examples} & searched - belongs:
            examples.counts[OWN_TEXT] = len(own)
    return examples


def _read(config: TaskConfig, source: str, split: str) -> TextsExamples:
    if is_squad(source):
        return _of_pairs(read_squad(source, split), source)
    if directory := beir_place(source, split):
        found = read_beir(directory, split)
        return _without_empty(found, counts=found.counts) if split == "train" else found
    path = find_table(source, split)
    if not path:
        return TextsExamples()
    if _is_text(config, path):
        return _of_lines(path)
    table = readers.read_table(path)
    if "paragraphs" in table.columns:
        return _of_pairs(read_squad_file(path), path)
    return _of_table(config, table.filled())


def find_table(source: str, split: str) -> str:
    """Returns the file of a split, as `readers.find_split_file`; of a directory also SQuAD's, named by its version."""
    place = readers.part_of(source, split)
    is_folder = place and not readers.is_one_place(place)
    return readers.find_split_file(source, split, _VERSIONED if is_folder else readers.SPLITS)


def read_parts(config: TaskConfig, place: str, most: int) -> Iterator[TextsExamples]:
    """Yields the examples to train on of a place: of a table of lines or of Parquet at most `most` of its rows at once.

    A table of NLI is read whole, since the rows of a premise need not follow one another.

    Raises: InputError with file and line; also if a part of a table has other columns than the first.
    """
    if is_squad(place) or beir_place(place, "train"):
        yield _read(config, place, "train")
        return
    if _is_text(config, place):
        yield _of_lines(place)
        return
    first: tuple[Sequence[str], Sequence[str], str] | None = None
    for table in readers.read_tables(place, most):
        if "paragraphs" in table.columns:
            yield _of_pairs(read_squad_file(place), place)
            return
        columns = _columns(config, table.columns, place)
        if first is None:
            first = columns
        if columns != first:
            before, now = (listed_columns([*own[0], *own[1]]) for own in (first, columns))
            raise InputError(
                f"{table.records[0].where}: from here on the columns are {now}, and before it {before}; write all in "
                "every row, null or [] where there is none"
            )
        examples = _of_table(config, table)
        if examples.is_nli:  # the hypotheses of a premise are anywhere in the file
            yield _of_table(config, readers.read_table(place))
            return
        yield examples


def _is_text(config: TaskConfig, path: str) -> bool:
    """Returns whether a file has a text a line, and no columns."""
    if not readers.plain_name(path).endswith(".txt") or config.text_column:
        return False
    return not find_columns(_COLUMNS, map(str.strip, readers.first_row(path)))


def is_squad(source: str) -> bool:
    """Returns whether a source is of SQuAD, as only its articles have ranges."""
    return source.startswith("tfds:squad") or bool(re.search(r"\[-?\d*:-?\d*\]", source))


def _of_pairs(questions: Iterable[SquadExample], where: str) -> TextsExamples:
    pairs = (
        TextsExample(
            texts=(each.question, each.context),
            id=each.id,
            where=where,
        )
        for each in questions
    )
    return _without_empty(pairs, ("question", "context"))


# Tables


def _of_lines(path: str) -> TextsExamples:
    """Returns the texts of a file, one a line. Raises: InputError if each has a tab, so that they look like columns."""
    lines = readers.numbered_lines(path)
    if len(lines) > 1 and all("\t" in line for _, line in lines):
        raise InputError(
            f"{path}: all lines have tabs; name the columns in a first line, such as anchor and positive"
        )
    texts = (
        TextsExample(
            texts=(line, line),
            id=number,
            where=where,
        )
        for number, (where, line) in enumerate(lines)
    )
    return _without_empty(texts, ("lines",))


def _of_table(config: TaskConfig, table: readers.Table) -> TextsExamples:
    names, negatives, label = _columns(config, table.columns, table.place)
    columns = (*names, *negatives, label)
    number = find_column(_IDS, table.columns)
    labels = _labels(config, table, label)
    taught = find_column(_TAUGHT, table.columns) if negatives else ""
    is_nli = not negatives and any(value in _NLI for value in labels)
    if label and tuple(map(str.lower, names)) == ("premise", "hypothesis") and not negatives:
        is_nli = True
    examples: list[TextsExample] = []
    given: list[object] = []
    for position, record in enumerate(table.records):
        score = None
        if label and not is_nli:
            score = label_number(record.get(label), record.where)
            if score is None:
                raise InputError(
                    f"{record.where} has no {label!r}; give each pair a score, or remove it"
                )
        anchor = "" if record.get(names[0]) is None else record.get_as(names[0], str)
        against = [text for name in negatives for text in _texts(record, name)]
        # One without a partner stays for now, to be counted with the empty ones.
        partners = _texts(record, names[-1]) or [""]
        scores = _scores_of(record, taught, len(partners) + len(against))
        for place, partner in enumerate(partners):  # a pair per list item
            example = TextsExample(
                texts=(anchor, partner, *against),
                score=score,
                scores=(*scores[place : place + 1], *scores[len(partners) :]),
                id=id_of(record.get(number), position),
                where=record.where,
            )
            examples.append(example)
            given.append(labels[position])
    if is_nli:
        pairs, counts = _of_nli(examples, given)
        found = _without_empty(pairs, columns, counts)
        found.is_nli = True
        return found
    counts = {}
    rest = [name for name in table.columns if name not in (*columns, taught)]
    if not label and (unused := find_column((*_SCORES, *CLASS_COLUMNS), rest)):
        kind = "negatives" if len(names) > 1 else "texts alone"
        counts[f"{unused!r} is not used with {kind}:"] = len(table.records)
    return _without_empty(examples, columns, counts)


def _scores_of(record: Record, name: str, count: int) -> tuple[float, ...]:
    """Returns a teacher's scores of `count` texts, () without. Raises: InputError if there are more or fewer."""
    given = record.get(name) if name else None
    if given is None:
        return ()
    values = given if isinstance(given, list) else [given]
    numbers = [label_number(value, record.where) for value in values]
    known = tuple(number for number in numbers if number is not None)
    if not len(known) == len(numbers) == count:
        raise InputError(
            f"{record.where} has {len(known)} {name} for {count} positives and negatives; give each one, and no text "
            "that is empty"
        )
    return known


def _labels(config: TaskConfig, table: readers.Table, label: str) -> list[object]:
    """Returns the labels of a table, with the names of classes where they are known."""
    classes = classes_in(table.place).get(label) or split_names(config.labels)
    labels = []
    for record in table.records:
        value = record.get(label)
        if isinstance(value, str) and value.strip().isdecimal() and len(value) < 9 and classes:
            value = int(value)
        labels.append(named_class(value, classes))
    return labels


def _texts(record: Record, name: str) -> list[str]:
    """Returns the text or the list of texts of a column, without what is missing."""
    value = record.get(name)
    texts = [text for text in (value if isinstance(value, list) else [value]) if text is not None]
    if not all(isinstance(text, str) for text in texts):
        raise record.wrong(name, "a text")
    return [text for text in texts if text]


def _columns(
    config: TaskConfig, columns: Sequence[str], path: str
) -> tuple[Sequence[str], Sequence[str], str]:
    """Returns the columns of the text or the pair, of hard negatives, and of the label or ""."""
    named = split_names(config.embedding.negative_columns)
    for name in (config.text_column, config.second_text_column, config.label_column, *named):
        if name and name not in columns:
            raise no_column(path, name, columns)
    first = config.text_column
    second = config.second_text_column
    usual = find_columns(_COLUMNS, columns)
    if not first and not usual:
        raise no_column(path, "anchor, positive or another of texts", columns)
    names = [first] if first else list(usual)
    names = [names[0], second] if second else names
    if len(names) < 2:
        return names, (), ""
    negatives = named or [
        name for name in columns if NEGATIVE.fullmatch(name) and name not in names
    ]
    label = config.label_column or ("" if negatives else find_column(_SCORES, columns))
    return names, negatives, label


def _of_nli(
    examples: Sequence[TextsExample],
    labels: Sequence[object],
) -> tuple[list[TextsExample], dict[str, int]]:
    """Returns each premise with a text it entails and, if any, one that contradicts it; and counts of unused pairs."""
    by_premise: dict[str, dict[object, list[TextsExample]]] = {}
    for example, label in zip(examples, labels):
        if label not in (*_NLI, *_UNAGREED):
            raise InputError(
                f"{example.where}: label {label!r:.40} is not one of {', '.join(_NLI)}; or set task.labels"
            )
        by_premise.setdefault(example.texts[0], {}).setdefault(label, []).append(example)
    triplets = []
    for groups in by_premise.values():
        against = [example.texts[1:] for example in groups.get("contradiction", ())]
        for number, example in enumerate(groups.get("entailment", ())):
            # in turn, so that all are used
            negative = against[number % len(against)] if against else ()
            triplets.append(example._replace(texts=(*example.texts, *negative)))
    return triplets, {"pairs that are not entailment": len(examples) - len(triplets)}


def _without_empty(
    examples: Iterable[TextsExample],
    columns: Sequence[str] = (),
    counts: Mapping[str, int] | None = None,
) -> TextsExamples:
    """Returns the examples with an anchor and a positive, without negatives that are empty or equal to the positive."""
    kept = []
    empty = 0
    same = 0
    for example in examples:
        anchor, positive, *against = example.texts
        if not anchor.strip() or not positive.strip():
            empty += 1
            continue
        # One that is the positive would push away what belongs to the anchor.
        is_one = [bool(text.strip()) and text != positive for text in against]
        same += positive in against
        negatives = itertools.compress(against, is_one)
        scores = (*example.scores[:1], *itertools.compress(example.scores[1:], is_one))
        kept.append(example._replace(texts=(anchor, positive, *negatives), scores=scores))
    return TextsExamples(kept, {**(counts or {}), NO_TEXT: empty, SAME: same}, columns)
