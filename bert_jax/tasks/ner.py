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
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.batch import Row
from bert_jax.errors import InputError
from bert_jax.model.heads.tokens import TOKENS
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks import tagging
from bert_jax.tasks.base import (
    CUT_WORDS,
    Rows,
    Task,
    choose_metric,
    single_row,
    split_names,
    without_zeros,
)
from bert_jax.tasks.labels import check_labelled
from bert_jax.tasks.ner_read import WORD_COLUMNS, read_sentences
from bert_jax.tasks.tagging import OUTSIDE, NerExample
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.tokenizer_json import DescribedPieces


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


class NerTask(Task[NerExample, Tagged]):
    """A tag for each word."""

    head = TOKENS

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()) -> None:
        """Makes the task with the tags of a trained model, or else the settings' types of entities (PER,LOC), or tags.

        Raises: InputError if a setting cannot be used.
        """
        names: Sequence[str] = [label.strip() for label in labels]
        if not names:
            names = split_names(config.labels)
            if OUTSIDE not in names and not any(map(tagging.is_tag, names)):
                names = _tags_of_types(names)
        super().__init__(config, names)
        is_plain = tagging.are_names(self.labels)  # such as parts of speech, used as they are
        has_tags = any(map(tagging.is_tag, self.labels))
        if is_plain is None or (has_tags and OUTSIDE not in self.labels):
            raise InputError(
                f"labels {', '.join(self.labels)[:120]} are not O, B-PER, I-PER and the like"
            )
        self.is_plain = is_plain
        metrics = ("f1", "precision", "recall", "accuracy", "macro_f1")
        if self.labels:  # it is known what they are
            metrics = ("accuracy", "macro_f1") if is_plain else metrics[:-1]
        self.metric = choose_metric(config, metrics)
        self._numbers = {label: index for index, label in enumerate(self.labels)}

    def read(self, source, split):
        return read_sentences(self.config, source, split)

    def parse(self, value, where):
        """Returns the example of a text, a list of words, or an object with either."""
        column = self.config.text_column
        named = WORD_COLUMNS[0] if column.isdigit() else column or WORD_COLUMNS[0]
        if isinstance(value, Mapping):
            keys = [key for key in (named, *WORD_COLUMNS, "text") if key in value]
            value = value[keys[0]] if keys else None
        if isinstance(value, str):
            pieces = list(tagging.split_words(value))
            words = [word for word, _ in pieces]
            starts = [start for _, start in pieces]
            return NerExample(
                words=words,
                where=where,
                text=value,
                starts=starts,
            )
        if isinstance(value, (list, tuple)) and all(isinstance(word, str) for word in value):
            return NerExample(
                words=list(value),
                where=where,
            )
        raise InputError(
            f'{where}: give a text, a list of words, {{"text": "..."}} or {{"{named}": ["...", "..."]}}'
        )

    def find_labels(self, examples):
        """Returns O, and B- and I- of each entity type in the data, sorted; or the tags themselves if they are names.

        Raises: InputError if there are no entities.
        """
        if self.labels:
            return self.labels
        tags = {tag for example in examples for tag in example.tags or ()}
        if not tags - {OUTSIDE}:
            where = examples[0].where if examples else "the training data"
            raise InputError(
                f"{where}: no word has a tag other than O; train on data with entities in the last column"
            )
        if tagging.are_names(tags):
            return tuple(sorted(tags))
        return _tags_of_types(sorted({tag.partition("-")[2] for tag in tags - {OUTSIDE}}))

    # Rows

    def make_rows(self, examples, tokenizer, training):
        """Returns the rows of the sentences: several for a long sentence, none for a sentence without tokens."""
        room = self.config.max_seq_length - 2
        if room < 1:
            raise InputError(
                f"task.max_seq_length {self.config.max_seq_length} is below 3, [CLS] word [SEP]"
            )
        if training:
            check_labelled(examples, "tags")
        counts = Counter[str]()
        rows: list[Row] = []
        # words repeat, and each is encoded once
        memo: dict[str, list[int]] = {}

        def document_of(number: int) -> object:
            document = examples[number].document if self.config.document_context else None
            # a document of its own, equal to no other's number
            return (number,) if document is None else document

        for _, members in itertools.groupby(range(len(examples)), document_of):
            numbers = list(members)
            pieces = []
            for number in numbers:
                pieces += _pieces(examples[number], tokenizer, memo)
            counts["words without token"] += sum(not ids for ids in pieces)
            counts[CUT_WORDS] += sum(len(ids) > room for ids in pieces)
            document = _Document(tokenizer, [ids[:room] for ids in pieces], room)
            first = 0
            for number in numbers:
                last = first + len(examples[number].words)
                label_ids = self._label_ids(examples[number], training)
                windows = document.windows(first, last)
                counts["cut into windows"] += len(windows) > 1
                counts["skipped: no token"] += not windows
                for start, end in windows:
                    ids, words, positions = document.row(start, end)
                    asked = Asked(positions, words - first)
                    target = None
                    if label_ids is not None:
                        target = np.full(len(ids), -1, np.int32)
                        target[positions] = label_ids[asked.words]
                    rows.append(single_row(number, ids, target, asked))
                first = last
        return Rows(rows, without_zeros(counts))

    def _label_ids(self, example: NerExample, training: bool) -> np.ndarray | None:
        """Returns the label of each word, -1 for a type that the model does not know; None without tags.

        Raises: InputError in training, where types must be known.
        """
        if example.tags is None:
            return None
        tags = self._in_scheme(example.tags, tagging.scheme_of(self.labels))
        ids = [self._number(tag) for tag in tags]
        if training and -1 in ids:
            unknown = tags[ids.index(-1)]
            raise InputError(
                f"{example.where}: tag {unknown!r:.60} is not one of {', '.join(self.labels)[:200]}"
            )
        return np.array(ids, np.int32)

    def _number(self, tag: str) -> int:
        """Returns the index of a tag, or -1. B-TYPE is I-TYPE for a model that does not distinguish them."""
        if tag not in self._numbers and tag[:2] == "B-":
            tag = f"I-{tag[2:]}"
        return self._numbers.get(tag, -1)

    # Predictions

    def decode(self, examples, rows, outputs):
        """Returns the tags of each sentence, O for a word without a token, and its entities unless tags are names."""
        decoded = [[OUTSIDE] * len(example.words) for example in examples]
        for row, logits in zip(rows, outputs):
            best = np.asarray(logits)[row.detail.positions].argmax(axis=-1)
            for word, label in zip(row.detail.words, best):
                decoded[row.example][word] = self.labels[label]
        predictions = []
        for example, tags in zip(examples, decoded):
            entities = [] if self.is_plain else _find_entities(example, tags)
            predictions.append(
                Tagged(
                    words=list(example.words),
                    tags=tags,
                    entities=entities,
                )
            )
        return predictions

    def score(self, examples, predictions):
        check_labelled(examples, "tags")
        truth = [self._in_scheme(example.tags or ()) for example in examples]
        said = [self._in_scheme(prediction.tags) for prediction in predictions]
        return tagging.score_tags(truth, said)

    def show(self, prediction):
        shown: dict[str, object] = {"words": prediction.words, "tags": prediction.tags}
        if self.is_plain:
            return shown
        return {"entities": [entity._asdict() for entity in prediction.entities], **shown}

    def write(self, directory, split, examples, predictions):
        """Writes SPLIT.conll: the word, the true tag in IOB2 if it is known, and the predicted tag."""
        sentences = []
        for example, prediction in zip(examples, predictions):
            columns = [tags for tags in (example.tags, prediction.tags) if tags is not None]
            sentences.append(list(zip(example.words, *map(self._in_scheme, columns))))
        tagging.write_conll(directory / f"{split}.conll", sentences)

    def _in_scheme(self, tags: Sequence[str], scheme: str = "IOB2") -> list[str]:
        """Returns tags of entities in a scheme; tags that are names stay as they are."""
        if self.is_plain:
            return list(tags)
        return tagging.to_tags(tagging.entities(tags), len(tags), scheme)


def _tags_of_types(types: Sequence[str]) -> tuple[str, ...]:
    tags = [f"{prefix}-{kind}".removesuffix("-") for kind in types for prefix in "BI"]
    return (OUTSIDE, *tags) if tags else ()


def _pieces(
    example: NerExample, tokenizer: Tokenizer, memo: dict[str, list[int]]
) -> list[list[int]]:
    """Returns the tokens of each word; of a text those that the text has, with a blank before a word or without.

    A token of no more than a blank belongs to the word after it. A word within another's token has none.
    """
    if not example.text or tokenizer.kind != DescribedPieces.kind:
        for word in example.words:
            if word not in memo:
                memo[word] = tokenizer.encode(word)
        return [memo[word] for word in example.words]
    ids, spans = tokenizer.encode_with_offsets(example.text)
    after = np.searchsorted(example.starts, spans[:, 0], "left")
    inside = np.searchsorted(example.starts, spans[:, 0], "right") - 1
    pieces: list[list[int]] = [[] for _ in example.words]
    for index, word in zip(ids, np.where(spans[:, 0] == spans[:, 1], after, inside)):
        if 0 <= word < len(pieces):
            pieces[word].append(index)
    return pieces


class _Document:
    """The tokens of the words of a document, each word of at most `room` tokens, from which rows are cut."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        pieces: list[list[int]],
        room: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.room = room
        self.offsets = np.cumsum([0, *map(len, pieces)])  # of each word's tokens
        self.tokens = np.array([index for ids in pieces for index in ids], np.int32)

    def windows(self, start: int, end: int) -> list[tuple[int, int]]:
        """Returns windows of words [start, end) of similar length, each of at most `room` tokens; [] without tokens."""
        offsets = self.offsets
        total = int(self.offsets[end] - self.offsets[start])
        # tokens of a part, if words were no longer than a token
        most = -(-total // -(-total // self.room)) if total else 0
        parts = []
        first = start
        while first < end:
            last = int(np.searchsorted(offsets, offsets[first] + most, "right")) - 1
            if offsets[last] == offsets[first]:  # a single word that is longer
                last = int(np.searchsorted(offsets, offsets[first], "right"))
            last = min(last, end)
            if offsets[last] > offsets[first]:
                parts.append((first, last))
            first = last
        return parts

    def row(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the token ids of [CLS] context words context [SEP]; the words that have tokens, and where they begin.

        There are as many tokens of context before as after, if possible.
        """
        offsets = self.offsets
        first = int(offsets[start])
        last = int(offsets[end])
        spare = self.room - (last - first)
        after = int(offsets[-1]) - last
        before = min(first, max(spare // 2, spare - after))
        # at the start and the end of a word
        first = int(offsets[np.searchsorted(offsets, first - before, "left")])
        end_of_row = last + min(after, spare - before)
        last = int(offsets[np.searchsorted(offsets, end_of_row, "right") - 1])
        cls = self.tokenizer.cls_id
        sep = self.tokenizer.sep_id
        ids = np.array([cls, *self.tokens[first:last], sep], np.int32)
        words = start + np.flatnonzero(np.diff(offsets[start : end + 1])).astype(np.int32)
        return ids, words, (offsets[words] - first + 1).astype(np.int32)


def _find_entities(example: NerExample, tags: list[str]) -> list[FoundEntity]:
    words = example.words
    text = example.text
    starts = example.starts
    if not text:
        text = " ".join(words)
        starts = list(itertools.accumulate((len(word) + 1 for word in words), initial=0))
    found = []
    for kind, first, end in tagging.entities(tags):
        start = starts[first]
        stop = starts[end - 1] + len(words[end - 1])
        found.append(
            FoundEntity(
                type=kind,
                text=text[start:stop],
                start=start,
                end=stop,
            )
        )
    return found
