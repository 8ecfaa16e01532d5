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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from bert_jax.errors import InputError
from bert_jax.storage import writing
from bert_jax.storage.places import Place
from bert_jax.tasks.readers import read_lines
from bert_jax.tasks.scores import Metrics, accuracy, macro_f1, precision_recall_f1
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


class NerExample(NamedTuple):
    """A sentence."""

    words: Sequence[str]
    tags: Sequence[str] | None = None
    document: int | None = None  # consecutive sentences with the same number belong to one document
    where: str = ""
    text: str = ""  # the original text; "" means the words joined by blanks
    starts: Sequence[int] = ()  # of the words in the text, in characters


class Entity(NamedTuple):
    """A run of words of one type."""

    type: str
    start: int  # the first word
    end: int  # one past the last


# Tags and entities


def entities(tags: Sequence[str]) -> list[Entity]:
    """Returns the entities of a sentence's tags, in order."""
    spans: list[Entity] = []
    open_type = None
    start = 0
    ended = False
    # one tag further, which ends the last entity of a sentence
    for index, tag in enumerate((*tags, OUTSIDE)):
        prefix, _, kind = tag.partition("-")
        if open_type is not None and (ended or prefix in ("O", "B", "S", "U") or kind != open_type):
            spans.append(Entity(open_type, start, index))
            open_type = None
        if prefix != OUTSIDE and open_type is None:
            open_type = kind
            start = index
        ended = prefix in ("E", "S", "L", "U")
    return spans


# the prefixes within an entity, of its last word, and of its only one
_SCHEMES = {"IOB2": "IIB", "BIOES": "IES", "BMES": "MES", "BILOU": "ILU"}


def to_tags(found: Sequence[Entity], length: int, scheme: str = "IOB2") -> list[str]:
    """Returns the tags of entities in a sentence of `length` words; the scheme is IOB2, BIOES, BMES or BILOU."""
    tags = [OUTSIDE] * length
    inner, last, single = _SCHEMES[scheme]
    for kind, start, end in found:
        prefixes = ["B", *inner * (end - start - 2), last] if end - start > 1 else [single]
        tags[start:end] = [f"{prefix}-{kind}".removesuffix("-") for prefix in prefixes]
    return tags


def scheme_of(labels: Iterable[str]) -> str:
    """Returns the scheme of a model's labels."""
    prefixes = {label.partition("-")[0] for label in labels}
    if "M" in prefixes:
        return "BMES"
    return "BIOES" if prefixes & {"E", "S"} else "BILOU" if prefixes & {"L", "U"} else "IOB2"


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


def check_alike(first: Mapping[str, tuple[str, str]]) -> None:
    """Raises: InputError if some tags mark entities and others do not. Each has the first of its words, and its place.

    Tags such as b-per and B_PER do not count as names, since no entity would be found.
    """
    inside = set(first) - {OUTSIDE}
    names = are_names(inside)
    is_almost = any(tag[:1] in "bBiI" for tag in inside) and all(map(_ALMOST.fullmatch, inside))
    for tag, (word, where) in first.items():
        if not is_tag(tag) and (names is None or (names and is_almost)):
            raise InputError(
                f"{where}: tag {tag!r:.60} of {word!r:.60} is not O, B-TYPE or I-TYPE (nor E-, S-, M-, L-, U-); "
                "correct it, or the column of the tags"
            )


def score_tags(truth: Sequence[Sequence[str]], said: Sequence[Sequence[str]]) -> Metrics:
    """Returns precision, recall and F1 of entities over all sentences, the F1 of each type, and the accuracy of words.

    An entity is correct if its words and its type are; a word, if its tag is exactly the same. 0 / 0 counts as 0.0.
    For tags that are names: the accuracy of words, and the mean of the F1 of each name.
    """
    expected = list(itertools.chain(*truth))
    predicted = list(itertools.chain(*said))
    if are_names(expected):
        numbers = {tag: number for number, tag in enumerate(sorted({*expected, *predicted}))}
        pair = [numbers[tag] for tag in expected], [numbers[tag] for tag in predicted]
        return {"accuracy": accuracy(*pair), "macro_f1": macro_f1(*pair)}
    counts = [Counter[str]() for _ in range(3)]  # of each type: right, predicted, true
    for true_tags, predicted_tags in zip(truth, said, strict=True):
        true = set(entities(true_tags))
        guessed = set(entities(predicted_tags))
        for count, found in zip(counts, (true & guessed, guessed, true)):
            count.update(entity.type for entity in found)
    num_right = sum(first == second for first, second in zip(expected, predicted, strict=True))
    precision, recall, f1 = precision_recall_f1(*(count.total() for count in counts))
    metrics = {"f1": f1, "precision": precision, "recall": recall}
    metrics["accuracy"] = num_right / len(expected) if expected else 0.0
    for kind in sorted({*counts[1], *counts[2]}):
        of_type = precision_recall_f1(*(count[kind] for count in counts))
        metrics[f"f1_{kind}".removesuffix("_")] = of_type[2]
    return metrics


def split_words(text: str) -> Iterator[tuple[str, int]]:
    """Yields words and their start: split at blanks, with punctuation and Chinese characters as separate words."""
    punctuation = unicode_tables().punctuation
    start = 0
    for index, char in enumerate(f"{text} "):
        is_alone = ord(char) in punctuation or is_chinese(char)
        if is_alone or char.isspace():
            if start < index:
                yield text[start:index], start
            start = index + 1
        if is_alone:
            yield char, index


# Files


def read_conll(place: str, word_column: int = 1, tag_column: int = 0) -> list[NerExample]:
    """Returns the sentences of a file with a word a line and blank lines between sentences.

    Columns are separated by tabs, or by blanks in lines without tabs; blanks around a tag are ignored. Columns are
    counted from 1; by default the word is in the first and its tag in the last (0). A line between sentences that
    begins with # and has no tag, or no word in the first column, is a comment. "#", a tab and a tag are a word. If
    words are in a later column, CoNLL-U's lines of several words (3-4) or of none (3.1) are skipped. A line -DOCSTART-
    begins a document. A language before every word of the file, as in WikiANN ("de:Haus"), is removed.

    Raises: InputError, with file and line, if the number of columns changes, or a tag is invalid.
    """
    sentences: list[NerExample] = []
    words = []
    tags = []
    where = ""
    first_of: dict[str, tuple[str, str]] = {}  # word and place of each tag
    document = 0
    num_columns = 0
    # a blank line more, which ends the last sentence
    for number, line in enumerate([*read_lines(place), ""], 1):
        here, line = f"{place}:{number}", line.rstrip(" \t")
        columns = line.split("\t") if "\t" in line else [part for part in line.split(" ") if part]
        while len(columns) > 1 and not columns[-1].strip():
            columns.pop()
        is_document = columns[:1] == ["-DOCSTART-"]
        if is_document or not line:  # other blanks may be words
            if words:
                sentences.append(NerExample(words, tags or None, document, where))
            document += is_document
            words = []
            tags = []
            continue
        if word_column > 1 and _RANGE.fullmatch(columns[0]):
            continue
        if line.startswith("#") and not words:
            tag = columns[tag_column - 1] if 1 < len(columns) >= tag_column else OUTSIDE
            is_word = is_tag(tag.strip()) or ("\t" in line and " " not in columns[0])
            if word_column > 1 or not is_word:
                continue
        num_columns = num_columns or len(columns)
        if len(columns) != num_columns or word_column > num_columns:
            raise InputError(
                f"{here} has {len(columns)} columns ({line!r:.60}), not {max(num_columns, word_column)}"
            )
        where = where if words else here
        words.append(columns[word_column - 1])
        if word_column != (tag_column or num_columns) <= num_columns:
            tags.append(columns[tag_column - 1].strip())
            first_of.setdefault(tags[-1], (words[-1], here))
    check_alike(first_of)
    match = _PREFIX.match(sentences[0].words[0]) if sentences else None
    every = [word for sentence in sentences for word in sentence.words]
    if not match or not all(word.startswith(match[0]) for word in every):
        return sentences
    return [
        sentence._replace(words=[word.removeprefix(match[0]) for word in sentence.words])
        for sentence in sentences
    ]


def are_counts(sentences: Sequence[NerExample]) -> bool:
    """Returns whether the column read as words holds their numbers, per sentence or throughout the file."""
    num_words = num_counts = last = 0
    for sentence in sentences:
        num_words += len(sentence.words)
        for index, word in enumerate(sentence.words):
            if count := _COUNT.fullmatch(word):
                number = int(count[1])
                num_counts += number in ((last, last + 1) if index else (0, 1, last + 1))
                last = number
    return num_words > 1 and num_counts > 0.9 * num_words


def write_conll(path: Place, sentences: Iterable[Sequence[Sequence[str]]]) -> None:
    """Writes the columns of each word, separated by tabs, and a blank line after each sentence.

    Tabs and line ends within a column become blanks; other blanks stay, as they may be words.
    """
    with (
        writing.atomic_path(path) as temporary,
        open(temporary, "w", encoding="utf-8", newline="\n") as stream,
    ):
        for rows in sentences:
            for row in rows:
                stream.write("\t".join(re.sub(r"[\t\r\n]", " ", column) for column in row) + "\n")
            stream.write("\n")


def score_files(data: str, predictions: str) -> Metrics:
    """Returns the entity F1 of a file of predictions against a file of true tags; tags are in the last column.

    Raises: InputError, with file and line, if their words are not the same, or there are none.
    """
    truth = read_conll(data)
    predicted = read_conll(predictions)
    for gold, pred in itertools.zip_longest(truth, predicted):
        if not gold or not pred or gold.words != pred.words or not gold.tags or not pred.tags:
            places = [each.where for each in (gold, pred) if each]
            raise InputError(
                f"{' and '.join(places)}: {data} and {predictions} need the same words here, each with a tag"
            )
    return score_tags([each.tags or [] for each in truth], [each.tags or [] for each in predicted])
