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
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.batch import Row
from bert_jax.errors import InputError
from bert_jax.model.heads.tokens import TOKENS
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.storage.places import Place
from bert_jax.tasks import tagging
from bert_jax.tasks.base import CUT_WORDS, Rows, Task, choose_metric, split_names
from bert_jax.tasks.ner_read import WORD_COLUMNS, NerExample, read_sentences
from bert_jax.tasks.tagging import OUTSIDE
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


class NerTask(Task):
    """A tag for each word."""

    head = TOKENS

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()) -> None:
        """Makes the task with the tags of a trained model, or else the settings' types of entities (PER,LOC), or tags.

        Raises: InputError if a setting cannot be used.
        """
        super().__init__(config, [label.strip() for label in labels] or _labels_of(config))
        is_plain = tagging.are_names(self.labels)  # such as parts of speech, used as they are
        if is_plain is None or (
            any(map(tagging.is_tag, self.labels)) and OUTSIDE not in self.labels
        ):
            raise InputError(
                f"labels {', '.join(self.labels)[:120]} are not O, B-PER, I-PER and the like"
            )
        self.is_plain = is_plain
        metrics = (
            ("accuracy", "macro_f1") if is_plain else ("f1", "precision", "recall", "accuracy")
        )
        self.metric = choose_metric(config, metrics if self.labels else (*metrics, "macro_f1"))
        self._numbers = {label: index for index, label in enumerate(self.labels)}

    def read(self, source: str, split: str) -> list[NerExample]:
        return read_sentences(self.config, source, split)

    def parse(self, value: object, where: str) -> NerExample:
        """Returns the example of a text, a list of words, or an object with either."""
        named = (
            WORD_COLUMNS[0]
            if self.config.text_column.isdigit()
            else self.config.text_column or WORD_COLUMNS[0]
        )
        if isinstance(value, Mapping):
            value = next(
                (value[key] for key in (named, *WORD_COLUMNS, "text") if key in value), None
            )
        if isinstance(value, str):
            pieces = list(tagging.split_words(value))
            return NerExample(
                [word for word, _ in pieces],
                None,
                None,
                where,
                value,
                [start for _, start in pieces],
            )
        if isinstance(value, (list, tuple)) and all(isinstance(word, str) for word in value):
            return NerExample(list(value), None, None, where)
        raise InputError(
            f'{where}: give a text, a list of words, {{"text": "..."}} or {{"{named}": ["...", "..."]}}'
        )

    def find_labels(self, examples: Sequence[NerExample]) -> tuple[str, ...]:
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

    def make_rows(
        self, examples: Sequence[NerExample], tokenizer: Tokenizer, training: bool
    ) -> Rows:
        """Returns the rows of the sentences: several for a long sentence, none for a sentence without tokens."""
        if self.config.max_seq_length < 3:
            raise InputError(
                f"task.max_seq_length {self.config.max_seq_length} is below 3, [CLS] word [SEP]"
            )
        room = self.config.max_seq_length - 2
        rows: list[Row] = []
        counts = dict.fromkeys(
            ("words without token", CUT_WORDS, "cut into windows", "skipped: no token"), 0
        )
        memo: dict[str, list[int]] = {}

        def pieces_of(example: NerExample) -> list[list[int]]:
            if example.text and tokenizer.kind == DescribedPieces.kind:
                return _pieces_in_text(example, tokenizer)
            memo.update(
                {word: tokenizer.encode(word) for word in example.words if word not in memo}
            )
            return [memo[word] for word in example.words]

        def group(item: tuple[int, NerExample]) -> object:
            return (
                item[1].document
                if self.config.document_context and item[1].document is not None
                else (item[0],)
            )

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
                label_ids = self._label_ids(example, training)
                windows = _windows(offsets, first, first + len(example.words), room)
                counts["cut into windows"] += len(windows) > 1
                counts["skipped: no token"] += not windows
                for start, end in windows:
                    row = _row(tokenizer, tokens, offsets, start, end, room)
                    words = np.arange(start, end)[np.diff(offsets[start : end + 1]) > 0]
                    asked = Asked(
                        (offsets[words] - row[1] + 1).astype(np.int32),
                        (words - first).astype(np.int32),
                    )
                    target = None
                    if label_ids is not None:
                        target = np.full(len(row[0]), -1, np.int32)
                        target[asked.positions] = label_ids[asked.words]
                    rows.append(
                        Row(
                            number,
                            row[0],
                            np.zeros(len(row[0]), np.uint8),
                            (len(row[0]),),
                            target,
                            asked,
                        )
                    )
                first += len(example.words)
        return Rows(rows, {reason: count for reason, count in counts.items() if count})

    def _label_ids(self, example: NerExample, training: bool) -> np.ndarray | None:
        """Returns the label of each word, -1 for a type that the model does not know; None without tags.

        Raises: InputError in training, where tags and types must be known.
        """
        if example.tags is None:
            if training:
                raise InputError(f"{example.where} has no tags; training examples need them")
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

    def decode(
        self, examples: Sequence[NerExample], rows: Sequence[Row], outputs: Sequence[np.ndarray]
    ) -> list[Tagged]:
        """Returns the tags of each sentence, O for a word without a token, and its entities unless tags are names."""
        decoded = [[OUTSIDE] * len(example.words) for example in examples]
        for row, logits in zip(rows, outputs):
            best = np.asarray(logits)[row.detail.positions].argmax(axis=-1)
            for word, label in zip(row.detail.words.tolist(), best.tolist()):
                decoded[row.example][word] = self.labels[label]
        entities = [[] if self.is_plain else tagging.entities(tags) for tags in decoded]
        return list(map(_tagged, examples, decoded, entities))

    def score(
        self, examples: Sequence[NerExample], predictions: Sequence[Tagged]
    ) -> dict[str, float]:
        if missing := next((example for example in examples if example.tags is None), None):
            raise InputError(
                f"{missing.where} has no tags; predictions are scored where they are known"
            )
        truth = [self._in_scheme(example.tags or ()) for example in examples]
        return tagging.score_tags(
            truth, [self._in_scheme(prediction.tags) for prediction in predictions]
        )

    def show(self, prediction: Tagged) -> dict[str, object]:
        entities = (
            {}
            if self.is_plain
            else {"entities": [entity._asdict() for entity in prediction.entities]}
        )
        return {**entities, "words": prediction.words, "tags": prediction.tags}

    def write(
        self,
        directory: Place,
        split: str,
        examples: Sequence[NerExample],
        predictions: Sequence[Tagged],
    ) -> None:
        """Writes SPLIT.conll: the word, the true tag in IOB2 if it is known, and the predicted tag."""
        sentences = []
        for example, prediction in zip(examples, predictions):
            columns = [tags for tags in (example.tags, prediction.tags) if tags is not None]
            sentences.append(list(zip(example.words, *map(self._in_scheme, columns))))
        tagging.write_conll(directory / f"{split}.conll", sentences)

    def _in_scheme(self, tags: Sequence[str], scheme: str = "IOB2") -> list[str]:
        """Returns tags of entities in a scheme; tags that are names stay as they are."""
        return (
            list(tags)
            if self.is_plain
            else tagging.to_tags(tagging.entities(tags), len(tags), scheme)
        )


def _labels_of(config: TaskConfig) -> tuple[str, ...]:
    names = split_names(config.labels)
    return names if OUTSIDE in names or any(map(tagging.is_tag, names)) else _tags_of_types(names)


def _tags_of_types(types: Sequence[str]) -> tuple[str, ...]:
    return (
        (OUTSIDE, *(f"{prefix}-{kind}".removesuffix("-") for kind in types for prefix in "BI"))
        if types
        else ()
    )


def _pieces_in_text(example: NerExample, tokenizer: Tokenizer) -> list[list[int]]:
    """Returns the tokens of each word of a text as the text has them, with a blank before a word or without.

    A token of no more than a blank belongs to the word after it. A word within another's token has none.
    """
    ids, spans = tokenizer.encode_with_offsets(example.text)
    after, inside = (
        np.searchsorted(example.starts, spans[:, 0], side) for side in ("left", "right")
    )
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
    ids = np.concatenate([[tokenizer.cls_id], tokens[first:last], [tokenizer.sep_id]]).astype(
        np.int32
    )
    return ids, first


def _tagged(example: NerExample, tags: list[str], entities: list[tagging.Entity]) -> Tagged:
    words = list(example.words)
    text, starts = example.text, example.starts
    if entities and not text:
        text = " ".join(words)
        starts = list(itertools.accumulate((len(word) + 1 for word in words), initial=0))
    spans = [
        (ent.type, starts[ent.start], starts[ent.end - 1] + len(words[ent.end - 1]))
        for ent in entities
    ]
    return Tagged(
        words, tags, [FoundEntity(kind, text[start:end], start, end) for kind, start, end in spans]
    )
