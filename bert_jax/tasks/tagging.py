# SPDX-License-Identifier: Apache-2.0
"""Tags of words, the entities they encode, and files with a tagged word per line.

Tags are read as conlleval reads them. This is right for IOB1, IOB2, BIOES, BMES and BILOU, with types or without, and
defined for invalid tags too: an entity begins at B and S (U), after E (L), S (U) or O, and where the type changes; it
ends where another begins, and at O. So the scheme need not be known, and may change within a file. Other tags, such as
parts of speech, are names: see `are_names`.

Source: conlleval of CoNLL-2000; the default mode of seqeval is equal.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bert_jax.errors import InputError
from bert_jax.storage import writing
from bert_jax.storage.places import Place
from bert_jax.tasks.readers import read_lines
from bert_jax.tasks.scores import accuracy, macro_f1, precision_recall_f1
from bert_jax.text.normalize import is_chinese, unicode_tables

OUTSIDE = "O"

_TYPED = re.compile(r"[BIESLUM]-\S(.*\S)?")
_BARE = frozenset("BIESLUM")  # tags without types
# tags of entities, but for capitals and the hyphen
_ALMOST = re.compile(r"[bieslum]([-_]\S.*)?|o", re.IGNORECASE)
# The number of a word, such as 3 or "3."; in CoNLL-U also "3-4" of two words, "3.1" of none.
_COUNT = re.compile(r"(\d{1,9})([-.]\d{1,9}|[.:)])?", re.ASCII)
_RANGE = re.compile(r"\d+[-.]\d+", re.ASCII)
_PREFIX = re.compile(r"[a-z]{2,3}(-[a-z]+)?:")  # WikiANN's language before each word


class Sentence(NamedTuple):
    """The words of a sentence and their columns."""

    words: list[str]
    tags: list[str] | None  # the last column; None in a file with one column
    document: int  # counts the -DOCSTART- lines before it
    place: str
    line: int  # of the first word

    @property
    def where(self) -> str:
        """Returns file and line of the first word."""
        return f"{self.place}:{self.line}"


class Entity(NamedTuple):
    """A run of words of one type."""

    type: str
    start: int  # the first word
    end: int  # one past the last


# Tags and entities


def entities(tags: Sequence[str]) -> list[Entity]:
    """Returns the entities of a sentence's tags, in order."""
    spans: list[Entity] = []
    open_type, start, ended = None, 0, False
    for index, tag in enumerate((*tags, OUTSIDE)):
        prefix, _, kind = tag.partition("-")
        if open_type is not None and (ended or prefix in ("O", "B", "S", "U") or kind != open_type):
            spans.append(Entity(open_type, start, index))
            open_type = None
        if prefix != OUTSIDE and open_type is None:
            open_type, start = kind, index
        ended = prefix in ("E", "S", "L", "U")
    return spans


def to_tags(found: Sequence[Entity], length: int, scheme: str = "IOB2") -> list[str]:
    """Returns the tags of entities in a sentence of `length` words; the scheme is IOB2, BIOES, BMES or BILOU."""
    tags = [OUTSIDE] * length
    inner, last, single = {"IOB2": "IIB", "BIOES": "IES", "BMES": "MES", "BILOU": "ILU"}[scheme]
    for entity in found:
        for index in range(entity.start, entity.end):
            tags[index] = f"{inner}-{entity.type}"
        tags[entity.start] = f"B-{entity.type}"
        tags[entity.end - 1] = f"{single if entity.end - entity.start == 1 else last}-{entity.type}"
    return [tag.removesuffix("-") for tag in tags]


def scheme_of(labels: Iterable[str]) -> str:
    """Returns the scheme of a model's labels."""
    prefixes = {label.partition("-")[0] for label in labels}
    schemes = {"M": "BMES", "E": "BIOES", "S": "BIOES", "L": "BILOU", "U": "BILOU"}
    return next((scheme for prefix, scheme in schemes.items() if prefix in prefixes), "IOB2")


def is_tag(tag: str) -> bool:
    """Returns whether a tag is O, or a prefix and a type, without characters that nobody sees."""
    return (tag == OUTSIDE or _TYPED.fullmatch(tag) is not None) and tag.isprintable()


def are_names(tags: Iterable[str]) -> bool | None:
    """Returns whether all tags of a data set or a model are names, such as parts of speech, and none marks an entity.

    False for tags of entities, with types or without; None if some are of one kind and some of the other.
    """
    inside = set(tags) - {OUTSIDE}
    others = {tag for tag in inside if not is_tag(tag)}
    if not others or (others == inside <= _BARE and inside & {"B", "I"}):
        return False
    return True if others == inside and all(tag.isprintable() and tag for tag in inside) else None


def find_unlike(tags: Iterable[str]) -> str | None:
    """Returns the first tag that is not an entity's although others are; None if all are alike.

    Tags such as b-per and B_PER do not count as names, since no entity would be found.
    """
    inside = dict.fromkeys(tag for tag in tags if tag != OUTSIDE)
    names = are_names(inside)
    is_almost = any(tag[:1] in "bBiI" for tag in inside) and all(map(_ALMOST.fullmatch, inside))
    return (
        next(tag for tag in inside if not is_tag(tag))
        if names is None or (names and is_almost)
        else None
    )


def score_tags(truth: Sequence[Sequence[str]], said: Sequence[Sequence[str]]) -> dict[str, float]:
    """Returns precision, recall and F1 of entities over all sentences, the F1 of each type, and the accuracy of words.

    An entity is correct if its words and its type are; a word, if its tag is exactly the same. 0 / 0 counts as 0.0.
    For tags that are names: the accuracy of words, and the mean of the F1 of each name.
    """
    if are_names(itertools.chain(*truth)):
        expected, predicted = list(itertools.chain(*truth)), list(itertools.chain(*said))
        numbers = {tag: number for number, tag in enumerate(sorted({*expected, *predicted}))}
        pair = [numbers[tag] for tag in expected], [numbers[tag] for tag in predicted]
        return {"accuracy": accuracy(*pair), "macro_f1": macro_f1(*pair)}
    right, guessed, true = Counter[str](), Counter[str](), Counter[str]()
    num_words = num_right = 0
    for true_tags, predicted_tags in zip(truth, said, strict=True):
        expected, predicted = set(entities(true_tags)), set(entities(predicted_tags))
        true.update(entity.type for entity in expected)
        guessed.update(entity.type for entity in predicted)
        right.update(entity.type for entity in expected & predicted)
        num_right += sum(
            first == second for first, second in zip(true_tags, predicted_tags, strict=True)
        )
        num_words += len(true_tags)
    precision, recall, f1 = precision_recall_f1(right.total(), guessed.total(), true.total())
    metrics = {"f1": f1, "precision": precision, "recall": recall}
    metrics["accuracy"] = num_right / num_words if num_words else 0.0
    for kind in sorted({*true, *guessed}):
        metrics[f"f1_{kind}".removesuffix("_")] = precision_recall_f1(
            right[kind], guessed[kind], true[kind]
        )[2]
    return metrics


def split_words(text: str) -> Iterator[tuple[str, int]]:
    """Yields words and their start: split at blanks, with punctuation and Chinese characters as separate words."""
    punctuation, start = unicode_tables().punctuation, -1
    for index, char in enumerate(text):
        alone = ord(char) in punctuation or is_chinese(char)
        if start >= 0 and (alone or char.isspace()):
            yield text[start:index], start
            start = -1
        if alone:
            yield char, index
        elif start < 0 and not char.isspace():
            start = index
    if start >= 0:
        yield text[start:], start


# Files


def read_conll(place: str, word_column: int = 1, tag_column: int = 0) -> list[Sentence]:
    """Returns the sentences of a file with a word a line and blank lines between sentences.

    Columns are separated by tabs, or by blanks in lines without tabs; blanks around a tag are ignored. Columns are
    counted from 1; by default the word is in the first and its tag in the last (0). A line between sentences that
    begins with # and has no tag, or no word in the first column, is a comment. "#", a tab and a tag are a word. If
    words are in a later column, CoNLL-U's lines of several words (3-4) or of none (3.1) are skipped. A line -DOCSTART-
    begins a document. A language before every word of the file, as in WikiANN ("de:Haus"), is removed.

    Raises: InputError, with file and line, if the number of columns changes, or a tag is invalid.
    """
    sentences: list[Sentence] = []
    words, tags = [], []
    document, start, num_columns = 0, 1, 0

    def finish() -> None:
        if words:
            sentences.append(
                Sentence(list(words), list(tags) if tags else None, document, place, start)
            )
            words.clear()
            tags.clear()

    for number, line in enumerate(read_lines(place), 1):
        if not line.strip(" \t"):  # other blanks may be words
            finish()
            continue
        line = line.rstrip(" \t")
        columns = line.split("\t") if "\t" in line else [part for part in line.split(" ") if part]
        while len(columns) > 1 and not columns[-1].strip():
            columns.pop()
        tag = (
            columns[(tag_column or len(columns)) - 1] if 1 < len(columns) >= tag_column else OUTSIDE
        )
        if not words and line.startswith("#"):
            if word_column > 1 or not (
                is_tag(tag.strip()) or ("\t" in line and " " not in columns[0])
            ):
                continue
        if word_column > 1 and _RANGE.fullmatch(columns[0]):
            continue
        if columns[0] == "-DOCSTART-":
            finish()
            document += 1
            continue
        if len(columns) != (num_columns := num_columns or len(columns)):
            raise InputError(
                f"{place}:{number} has {len(columns)} columns ({line!r:.60}), not {num_columns}"
            )
        if word_column > num_columns:
            raise InputError(
                f"{place}:{number} has {num_columns} columns; correct task.text_column {word_column}"
            )
        if not words:
            start = number
        words.append(columns[word_column - 1])
        if not word_column != (tag_column or num_columns) <= num_columns:
            continue  # it has no tags
        tags.append(columns[tag_column - 1].strip())
    finish()
    if (
        wrong := find_unlike(tag for sentence in sentences for tag in sentence.tags or ())
    ) is not None:
        sent, at = next(
            (sent, sent.tags.index(wrong)) for sent in sentences if sent.tags and wrong in sent.tags
        )
        column = f"column {tag_column}" if tag_column else "the last column"
        given = f"tag {wrong!r:.60} of {sent.words[at]!r:.60} is not O, B-TYPE or I-TYPE (nor E-, S-, M-, L-, U-)"
        raise InputError(f"{place}:{sent.line + at}: {given}; correct {column}")
    return _without_prefix(sentences)


def are_counts(sentences: Sequence[Sentence]) -> bool:
    """Returns whether the column read as words holds their numbers, per sentence or throughout the file."""
    num_words = num_counts = last = 0
    for sentence in sentences:
        for index, word in enumerate(sentence.words):
            num_words += 1
            if count := _COUNT.fullmatch(word):
                number = int(count[1])
                num_counts += number in ((0, 1, last + 1) if not index else (last, last + 1))
                last = number
    return num_words > 1 and num_counts > 0.9 * num_words


def _without_prefix(sentences: list[Sentence]) -> list[Sentence]:
    """Returns the sentences without the language prefix of each word, if all words have the same."""
    match = _PREFIX.match(sentences[0].words[0]) if sentences else None
    prefix = match[0] if match else ""
    if not prefix or not all(
        word.startswith(prefix) for sentence in sentences for word in sentence.words
    ):
        return sentences
    return [
        sentence._replace(words=[word.removeprefix(prefix) for word in sentence.words])
        for sentence in sentences
    ]


def write_conll(path: Place, sentences: Iterable[Sequence[Sequence[str]]]) -> None:
    """Writes the columns of each word, separated by tabs, and a blank line after each sentence.

    Tabs and line ends within a column become blanks; other blanks stay, as they may be words.
    """
    with (
        writing.atomic_path(path) as temporary,
        open(temporary, "w", encoding="utf-8", newline="\n") as stream,
    ):
        for rows in sentences:
            stream.writelines(
                "\t".join(re.sub(r"[\t\r\n]", " ", column) for column in row) + "\n" for row in rows
            )
            stream.write("\n")


def score_files(data: str, predictions: str) -> dict[str, float]:
    """Returns the entity F1 of a file of predictions against a file of true tags; tags are in the last column.

    Raises: InputError, with file and line, if their words are not the same, or there are none.
    """
    truth, predicted = read_conll(data), read_conll(predictions)
    if not truth:
        raise InputError(f"{data} holds no sentence; give a file that has some")
    for gold, pred in itertools.zip_longest(truth, predicted):
        if gold is None or pred is None:
            where, other = (pred.where, data) if pred else (gold.where if gold else "", predictions)
            raise InputError(
                f"{where}: this sentence is missing in {other}; both files need the same words"
            )
        if gold.words != pred.words or gold.tags is None or pred.tags is None:
            raise InputError(
                f"{pred.where}: the sentence is not that of {gold.where}, or a word has no tag"
            )
    return score_tags(
        [sentence.tags or [] for sentence in truth], [sentence.tags or [] for sentence in predicted]
    )
