# SPDX-License-Identifier: Apache-2.0
"""A tag for each word, predicted at its first token: named entities, and tags that are names, as parts of speech are.

Data are files in columns (CoNLL, WNUT), JSON lines with lists of words and tags, Parquet or TFDS, with tags in any
scheme. A new classifier of entities learns IOB2; a model with its own labels keeps their scheme.

A row is [CLS] words [SEP]. A sentence that is too long is cut into windows at word boundaries. Each window predicts
some of its words and uses the others as context, so every word has one prediction. With `document_context` the
neighbouring sentences fill the row, with as many tokens before as after if possible; a file without -DOCSTART- lines
is one document, and so is one of JSON lines or a split of TFDS.

Source: paper, section 5.3.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from bert_jax.errors import InputError
from bert_jax.model.heads.tokens import TOKENS
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.storage.places import Place
from bert_jax.tasks import tagging
from bert_jax.tasks.base import CUT_WORDS, Row, Rows, Task, choose_metric, split_names
from bert_jax.tasks.columnar import Record, classes_in, is_tfds
from bert_jax.tasks.readers import find_column, find_split_file, plain_name, read_lines, read_table
from bert_jax.tasks.tagging import OUTSIDE
from bert_jax.tasks.texts import named_class
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.tokenizer_json import DescribedPieces

_WORDS = ("tokens", "words")
_TAGS = ("ner_tags", "ner", "tags", "labels")


class NerExample(NamedTuple):
    """A sentence."""

    words: Sequence[str]
    tags: Sequence[str] | None = None
    document: int | None = None  # consecutive sentences with the same number belong to one document
    where: str = ""
    text: str = ""  # the original text; "" means the words joined by blanks
    starts: Sequence[int] = ()  # of the words in the text, in characters


class FoundEntity(NamedTuple):
    """An entity in a text."""

    type: str
    text: str
    start: int  # characters of the text
    end: int  # one past the last


class Tagged(NamedTuple):
    """The tags predicted for a sentence."""

    words: list[str]
    tags: list[str]
    entities: list[FoundEntity]


class Asked(NamedTuple):
    """The words that a row predicts."""

    positions: np.ndarray  # of their first tokens in the row
    words: np.ndarray  # their indices in the sentence


def ner_task(config: TaskConfig, labels: Sequence[str] = ()) -> Task:
    """Returns the named entity recognition task.

    Args:
      config: its settings; `labels` there are types of entities (PER,LOC), or tags.
      labels: the tags of a trained model; they take precedence over those of the settings.
    Raises: InputError if a setting cannot be used.
    """
    labels = tuple(label.strip() for label in labels) or _labels_of(config)
    plain = tagging.are_names(labels)  # such as parts of speech, used as they are
    if plain is None or (any(map(tagging.is_tag, labels)) and OUTSIDE not in labels):
        raise InputError(
            f"labels {', '.join(labels)[:120]} are not O and tags such as B-PER, I-PER; use a model of that task, or "
            "set task.labels"
        )
    metrics = ("accuracy", "macro_f1") if plain else ("f1", "precision", "recall", "accuracy")
    return Task(
        config=config,
        head=TOKENS,
        labels=labels,
        metric=choose_metric(config, metrics if labels else (*metrics, "macro_f1")),
        read=partial(_read, config),
        parse=partial(_parse, config),
        make_rows=partial(_make_rows, config, labels, plain),
        decode=partial(_decode, labels, plain),
        score=partial(_score, plain),
        show=partial(_show, plain),
        write=partial(_write, plain),
        find_labels=(lambda examples: labels) if labels else find_labels,
    )


def _labels_of(config: TaskConfig) -> tuple[str, ...]:
    names = split_names(config.labels)
    return names if OUTSIDE in names or any(map(tagging.is_tag, names)) else _tags_of_types(names)


def _tags_of_types(types: Sequence[str]) -> tuple[str, ...]:
    return (OUTSIDE, *(f"{prefix}-{kind}".removesuffix("-") for kind in types for prefix in "BI")) if types else ()


def find_labels(examples: Sequence[NerExample]) -> tuple[str, ...]:
    """Returns O, and B- and I- of each entity type in the data, sorted; or the tags themselves if they are names.

    Raises: InputError if there are no entities.
    """
    tags = {tag for example in examples for tag in example.tags or ()}
    if not tags - {OUTSIDE}:
        where = examples[0].where if examples else "the training data"
        raise InputError(f"{where}: no word has a tag other than O; train on data with entities in the last column")
    if tagging.are_names(tags):
        return tuple(sorted(tags))
    return _tags_of_types(sorted({tag.partition("-")[2] for tag in tags - {OUTSIDE}}))


# Reading


def _read(config: TaskConfig, source: str, split: str) -> list[NerExample]:
    path = find_split_file(source, split)
    if not path:
        return []
    if is_tfds(path) or plain_name(path).endswith((".json", ".jsonl", ".ndjson", ".parquet")):
        examples = _read_records(config, path)
    else:
        examples = _read_columns(config, path)
    if not examples:
        raise InputError(f"{path} holds no sentence; give data, a word and its tag a line")
    examples = _with_names(config, examples)
    if split != "test" and (missing := next((example for example in examples if example.tags is None), None)):
        raise InputError(
            f"{missing.where} has no tags; write word and tag, with a tab between them, or correct task.label_column"
        )
    return examples


def _with_names(config: TaskConfig, examples: list[NerExample]) -> list[NerExample]:
    """Returns the examples, with tags of task.labels where they are the numbers of these, in their order.

    Raises: InputError if task.labels are not tags, or too few.
    """
    names = split_names(config.labels)
    given = {tag: example.where for example in examples for tag in example.tags or ()}
    if not given or not names or not all(tag.isdecimal() for tag in given) or set(given) & set(names):
        return examples
    if OUTSIDE not in names:
        raise InputError(
            f"{examples[0].where}: tags are numbers; write all tags in task.labels in the order of their numbers, such "
            "as O,B-PER,I-PER"
        )
    if beyond := next((tag for tag in given if int(tag) >= len(names)), None):
        raise InputError(f"{given[beyond]}: tag {beyond} is beyond the {len(names)} of task.labels; write all of them")
    return [
        example if example.tags is None else example._replace(tags=[names[int(tag)] for tag in example.tags])
        for example in examples
    ]


def _read_columns(config: TaskConfig, path: str) -> list[NerExample]:
    header = next(iter(read_lines(path)), "")
    is_csv = plain_name(path).endswith(".csv") and "\t" not in header and re.search("[,;]", header)
    if is_csv or "sentence #" in header.lower():
        raise InputError(
            f"{path} is a table with a word a row ({header!r:.60}), which ner does not read; write words and tags with "
            "a tab between them and a blank line after each sentence, or JSON lines with lists of tokens and tags"
        )
    word_column, tag_column = _number(config.text_column, "text_column"), _number(config.label_column, "label_column")
    if tag_column == (word_column or 1):
        raise InputError(f"task.label_column {tag_column} is the column of the words; give that of the tags")
    sentences = tagging.read_conll(path, word_column or 1, tag_column)
    if not word_column and sentences and sentences[0].tags is not None and tagging.are_counts(sentences):
        raise InputError(
            f"{sentences[0].where}: the first column counts the words; set task.text_column to the number of the "
            "column that has them, such as 2 (or 1 if these are the words)"
        )
    return [NerExample(sentence.words, sentence.tags, sentence.document, sentence.where) for sentence in sentences]


def _number(column: str, setting: str) -> int:
    """Returns the number of a column, counted from 1, of a file in columns; 0 if not given."""
    if column and not re.fullmatch("0*[1-9][0-9]{,8}", column):
        raise InputError(
            f"task.{setting} {column!r:.60} is not the number of a column, from 1; columns have no names here"
        )
    return int(column or 0)


def _read_records(config: TaskConfig, path: str) -> list[NerExample]:
    classes = classes_in(path)
    examples = []
    for record in read_table(path).records:
        words_key = config.text_column or find_column(_WORDS, list(record)) or _WORDS[0]
        tags_key = config.label_column or find_column(_TAGS, list(record)) or _TAGS[0]
        if words_key not in record:
            _check_no_spans(record)
        words, tags = _strings(record, words_key), None
        if record.get(tags_key) is not None:
            values = named_class(record[tags_key], classes.get(tags_key))
            if isinstance(values, list) and values and all(type(value) is int for value in values):
                if not config.labels:
                    raise InputError(
                        f"{record.where}: {tags_key!r} are numbers; write all tags in task.labels in the order of "
                        "their numbers, such as O,B-PER,I-PER"
                    )
                values = list(map(str, values))
            tags = [tag.strip() for tag in _strings(Record({tags_key: values}, record.where), tags_key)]
            if len(tags) != len(words) or not all(tags):
                problem = f"{len(words)} words have {len(tags)} tags" if all(tags) else "a tag is empty"
                raise InputError(f"{record.where}: {problem}; write one for each word: O, B-TYPE or I-TYPE")
        examples.append(NerExample(words, tags, 0, record.where))
    if (wrong := tagging.find_unlike(tag for example in examples for tag in example.tags or ())) is not None:
        where = next(example.where for example in examples if wrong in (example.tags or ()))
        raise InputError(f"{where}: tag {wrong!r:.60} is not one of an entity; write O, B-TYPE or I-TYPE")
    return examples


def _check_no_spans(record: Record) -> None:
    """Raises: InputError if a record is a text with spans of characters, as doccano and others write them."""
    is_text = any(isinstance(record.get(name), str) for name in ("text", "data", "content"))
    for name in ("label", "labels", "entities", "spans", "annotations") if is_text else ():
        if isinstance(record.get(name), list):
            raise InputError(
                f"{record.where} is a text with spans of characters in {name!r}, as doccano writes them, and ner reads "
                "a tag for each word; write lists of tokens and ner_tags, for example by spaCy's offsets_to_biluo_tags"
            )


def _strings(record: Mapping[str, object], key: str) -> list[str]:
    values = record.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        where = record.where if isinstance(record, Record) else ""
        raise InputError(f"{where}: {key!r} is {values!r:.60}, not a list of strings; write it so")
    return values


def _parse(config: TaskConfig, value: object, where: str) -> NerExample:
    """Returns the example of a user's input: a text, a list of words, or an object with either."""
    named = _WORDS[0] if config.text_column.isdigit() else config.text_column or _WORDS[0]
    if isinstance(value, Mapping):
        value = next((value[key] for key in (named, *_WORDS, "text") if key in value), None)
    if isinstance(value, str):
        pieces = list(tagging.split_words(value))
        return NerExample([word for word, _ in pieces], None, None, where, value, [start for _, start in pieces])
    if isinstance(value, (list, tuple)) and all(isinstance(word, str) for word in value):
        return NerExample(list(value), None, None, where)
    raise InputError(f'{where}: give a text, a list of words, or {{"text": "..."}} or {{"{named}": ["...", "..."]}}')


# Rows


def _make_rows(
    config: TaskConfig,
    labels: Sequence[str],
    plain: bool,
    examples: Sequence[NerExample],
    tokenizer: Tokenizer,
    training: bool,
) -> Rows:
    """Returns the rows of the sentences: several for a long sentence, none for a sentence without tokens."""
    if config.max_seq_length < 3:
        raise InputError(f"task.max_seq_length {config.max_seq_length} is below 3, [CLS] word [SEP]; use like 128")
    room = config.max_seq_length - 2
    numbers = {label: index for index, label in enumerate(labels)}
    rows: list[Row] = []
    counts = dict.fromkeys(("words without token", CUT_WORDS, "cut into windows", "skipped: no token"), 0)
    memo: dict[str, list[int]] = {}

    def pieces_of(example: NerExample) -> list[list[int]]:
        if example.text and tokenizer.kind == DescribedPieces.kind:
            return _pieces_in_text(example, tokenizer)
        memo.update({word: tokenizer.encode(word) for word in example.words if word not in memo})
        return [memo[word] for word in example.words]

    def group(item: tuple[int, NerExample]) -> object:
        return item[1].document if config.document_context and item[1].document is not None else (item[0],)

    for _, members in itertools.groupby(enumerate(examples), key=group):
        members = list(members)
        pieces = [ids for _, example in members for ids in pieces_of(example)]
        counts["words without token"] += sum(not ids for ids in pieces)
        counts[CUT_WORDS] += sum(len(ids) > room for ids in pieces)
        pieces = [ids[:room] for ids in pieces]
        offsets = np.cumsum([0, *map(len, pieces)])  # of each word's tokens within the document
        tokens = np.fromiter(itertools.chain.from_iterable(pieces), np.int32, offsets[-1])
        first = 0
        for number, example in members:
            label_ids = _label_ids(example, labels, plain, numbers, training)
            windows = _windows(offsets, first, first + len(example.words), room)
            counts["cut into windows"] += len(windows) > 1
            counts["skipped: no token"] += not windows
            for start, end in windows:
                row = _row(tokenizer, tokens, offsets, start, end, room)
                words = np.arange(start, end)[np.diff(offsets[start : end + 1]) > 0]
                asked = Asked((offsets[words] - row[1] + 1).astype(np.int32), (words - first).astype(np.int32))
                target = None
                if label_ids is not None:
                    target = np.full(len(row[0]), -1, np.int32)
                    target[asked.positions] = label_ids[asked.words]
                rows.append(Row(number, row[0], np.zeros(len(row[0]), np.uint8), (len(row[0]),), target, asked))
            first += len(example.words)
    return Rows(rows, {reason: count for reason, count in counts.items() if count})


def _pieces_in_text(example: NerExample, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the tokens of each word of a text as the text has them, with a blank before a word or without.

    A token of no more than a blank belongs to the word after it. A word within another's token has none.
    """
    ids, spans = tokenizer.encode_with_offsets(example.text)
    after, inside = (np.searchsorted(example.starts, spans[:, 0], side) for side in ("left", "right"))
    pieces: list[list[int]] = [[] for _ in example.words]
    for index, word in zip(ids, np.where(spans[:, 0] == spans[:, 1], after, inside - 1)):
        if 0 <= word < len(pieces):
            pieces[word].append(index)
    return pieces


def _windows(offsets: np.ndarray, start: int, end: int, room: int) -> list[tuple[int, int]]:
    """Returns windows of words [start, end) of similar length, each with at most `room` tokens; [] without tokens."""
    total = int(offsets[end] - offsets[start])
    if not total:
        return []
    if total <= room:
        return [(start, end)]
    most = -(-total // -(-total // room))  # tokens of a part, if words were no longer than a token
    parts, first = [], start
    while first < end:
        last = int(np.searchsorted(offsets, offsets[first] + most, "right")) - 1
        if last == first or offsets[last] == offsets[first]:  # a single word that is longer
            last = int(np.searchsorted(offsets, offsets[first], "right"))
        last = min(last, end)
        if offsets[last] > offsets[first]:
            parts.append((first, last))
        first = last
    return parts


def _row(
    tokenizer: Tokenizer, tokens: np.ndarray, offsets: np.ndarray, start: int, end: int, room: int
) -> tuple[np.ndarray, int]:
    """Returns the token ids of [CLS] context words context [SEP], and the first one's position in the document."""
    first, last = int(offsets[start]), int(offsets[end])
    spare, after = room - (last - first), int(offsets[-1]) - last
    before = min(first, max(spare // 2, spare - after))
    first = int(offsets[np.searchsorted(offsets, first - before, "left")])  # at the start of a word
    last = int(offsets[np.searchsorted(offsets, last + min(after, spare - before), "right") - 1])
    ids = np.concatenate([[tokenizer.cls_id], tokens[first:last], [tokenizer.sep_id]]).astype(np.int32)
    return ids, first


def _label_ids(
    example: NerExample, labels: Sequence[str], plain: bool, numbers: Mapping[str, int], training: bool
) -> np.ndarray | None:
    """Returns the label of each word, -1 for a type that the model does not know; None without tags.

    Raises: InputError in training, where tags and types must be known.
    """
    if example.tags is None:
        if training:
            raise InputError(
                f"{example.where} has no tags; training examples need them: correct or remove the sentence"
            )
        return None
    tags = _in_scheme(plain, example.tags, tagging.scheme_of(labels))
    if training and (unknown := next((tag for tag in tags if _known(tag, numbers) < 0), None)):
        raise InputError(
            f"{example.where}: tag {unknown!r:.60} is not one of {', '.join(labels)[:200]}; correct it "
            "or set task.labels"
        )
    return np.array([_known(tag, numbers) for tag in tags], np.int32)


def _known(tag: str, numbers: Mapping[str, int]) -> int:
    """Returns the index of a tag, or -1. B-TYPE is I-TYPE for a model that does not distinguish them."""
    return numbers.get(tag, numbers.get(f"I-{tag[2:]}", -1) if tag[:2] == "B-" else -1)


# Predictions


def _decode(
    labels: Sequence[str],
    plain: bool,
    examples: Sequence[NerExample],
    rows: Sequence[Row],
    outputs: Sequence[np.ndarray],
) -> list[Tagged]:
    """Returns the tags of each sentence, O for a word without a token, and its entities unless tags are `plain`."""
    decoded = [[OUTSIDE] * len(example.words) for example in examples]
    for row, logits in zip(rows, outputs):
        best = np.asarray(logits)[row.detail.positions].argmax(axis=-1)
        for word, label in zip(row.detail.words.tolist(), best.tolist()):
            decoded[row.example][word] = labels[label]
    return [_tagged(example, tags, [] if plain else tagging.entities(tags)) for example, tags in zip(examples, decoded)]


def _tagged(example: NerExample, tags: list[str], entities: list[tagging.Entity]) -> Tagged:
    words = list(example.words)
    text, starts = example.text, example.starts
    if entities and not text:
        text = " ".join(words)
        starts = list(itertools.accumulate((len(word) + 1 for word in words), initial=0))
    spans = [(ent.type, starts[ent.start], starts[ent.end - 1] + len(words[ent.end - 1])) for ent in entities]
    return Tagged(words, tags, [FoundEntity(kind, text[start:end], start, end) for kind, start, end in spans])


def _score(plain: bool, examples: Sequence[NerExample], predictions: Sequence[Tagged]) -> dict[str, float]:
    if missing := next((example for example in examples if example.tags is None), None):
        raise InputError(f"{missing.where} has no tags; predictions are scored where they are known")
    truth = [_in_scheme(plain, example.tags or ()) for example in examples]
    return tagging.score_tags(truth, [_in_scheme(plain, prediction.tags) for prediction in predictions])


def _show(plain: bool, prediction: Tagged) -> dict[str, object]:
    entities = {} if plain else {"entities": [entity._asdict() for entity in prediction.entities]}
    return {**entities, "words": prediction.words, "tags": prediction.tags}


def _write(
    plain: bool, directory: Place, split: str, examples: Sequence[NerExample], predictions: Sequence[Tagged]
) -> None:
    """Writes SPLIT.conll: the word, the true tag in IOB2 if it is known, and the predicted tag."""
    tagging.write_conll(
        directory / f"{split}.conll",
        (
            list(
                zip(example.words, *(_in_scheme(plain, tags) for tags in (example.tags, pred.tags) if tags is not None))
            )
            for example, pred in zip(examples, predictions)
        ),
    )


def _in_scheme(plain: bool, tags: Sequence[str], scheme: str = "IOB2") -> list[str]:
    return list(tags) if plain else tagging.to_tags(tagging.entities(tags), len(tags), scheme)
