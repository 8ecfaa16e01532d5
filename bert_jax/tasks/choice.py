# SPDX-License-Identifier: Apache-2.0
"""Multiple choice: which ending fits best. SWAG, CODAH, and your own data with any number of choices.

A row holds [CLS] context [SEP] choice [SEP] for each choice of an example, one after the other. They do not attend to
each other. The model scores each choice, and the softmax over the example's scores gives their probabilities.

It reads tables and JSON with the columns or keys of SWAG (sent1, sent2, ending0 .. ending3, label), where an ending
continues sent2; JSON with a list of choices; the hub's choices with names (as of ARC and CommonsenseQA, whose
answerKey is the name of one); and CODAH's tables without header (category, prompt, endings, label).
A question next to a context or premise is appended to it, such as the "cause" or "effect" of COPA.

Source: paper, section 4.4.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.batch import Row
from bert_jax.errors import InputError
from bert_jax.model.heads.choice import CHOICES
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.storage.places import Place
from bert_jax.tasks import scores
from bert_jax.tasks.base import CUT, Rows, Task, choose_metric
from bert_jax.tasks.labels import as_number, check_labelled
from bert_jax.tasks.readers import (
    Examples,
    Record,
    Table,
    find_column,
    find_split_file,
    first_row,
    is_tsv,
    read_table,
)
from bert_jax.tasks.texts import check_length, id_of, labelled, softmax, write_predictions
from bert_jax.text.fitting import join_texts
from bert_jax.text.tokenizer import Tokenizer

_CONTEXTS = ("context", "sent1", "premise", "question", "prompt", "ctx", "startphrase")
_CHOICES = ("choices", "endings", "options", "answers")
_LABELS = ("label", "answer", "gold", "answerkey")
_IDS = ("id", "idx", "index")
_ENDING = re.compile(r"(ending|choice|option|answer)_?\d{1,18}", re.IGNORECASE)


class ChoiceExample(NamedTuple):
    """A context and choices. One of them follows best."""

    context: str
    choices: tuple[str, ...]
    label: int | None = None
    id: int | str = 0
    where: str = ""


class Columns(NamedTuple):
    """The columns or keys of an example; "" if missing."""

    context: str
    question: str  # appended to the context
    choices: str  # a list of them
    start: str  # begins each ending
    endings: tuple[str, ...]  # or one column per ending
    label: str


class Chosen(NamedTuple):
    """The predicted choice, counted from 0, and the probability of each choice."""

    choice: int
    text: str
    probabilities: tuple[float, ...]


class ChoiceTask(Task):
    """The choice that fits best."""

    head = CHOICES

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()) -> None:
        """Makes the task, which has no labels. Raises: InputError if a setting cannot be used."""
        if labels or config.labels:
            raise InputError(
                "task.labels are for classes; choices are counted from 0: leave it empty"
            )
        super().__init__(config)
        self.metric = choose_metric(config, ("accuracy",))

    def read(self, source: str, split: str) -> list[ChoiceExample]:
        path = find_split_file(source, split)
        if not path:
            return []
        table = _table(path)
        if not table.records:
            raise InputError(f"{path} holds no example; give data, a row or object for each")
        columns = _columns(self.config, table.records[0])
        return Examples(
            (
                _example(self.config, record, number, split != "test")
                for number, record in enumerate(table.records)
            ),
            columns=(
                columns.context,
                columns.question,
                columns.choices,
                *columns.endings,
                columns.label,
            ),
        )

    def parse(self, value: object, where: str) -> ChoiceExample:
        """Returns the example of an object as in JSON files, or of context and choices separated by tabs."""
        if isinstance(value, str):
            value = value.split("\t")
        if isinstance(value, (list, tuple)):
            if len(value) < 3 or not all(isinstance(text, str) for text in value):
                raise InputError(
                    f"{where}: {value!r:.60} is not a context and two or more choices; part them by tabs"
                )
            return ChoiceExample(value[0], tuple(value[1:]), None, 0, where)
        if not isinstance(value, Mapping):
            raise InputError(
                f'{where}: {value!r:.60} is not like {{"context": "...", "choices": ["...", "..."]}}'
            )
        return _example(self.config, value, 0, False, where)._replace(label=None)

    def make_rows(
        self, examples: Sequence[ChoiceExample], tokenizer: Tokenizer, training: bool
    ) -> Rows:
        """Returns a row for each example with one sequence per choice, each truncated to `max_seq_length`."""
        check_length(self.config)
        if training:
            check_labelled(examples)
        rows, truncated, empty = [], 0, 0
        for number, example in enumerate(examples):
            context = tokenizer.encode(example.context)
            endings = tokenizer.encode_batch(example.choices)
            sequences = [
                join_texts(tokenizer, context, ending, self.config.max_seq_length)
                for ending in endings
            ]
            truncated += any(cut for _, _, cut in sequences)
            empty += not all(endings)
            token_ids = np.concatenate([ids for ids, _, _ in sequences])
            type_ids = np.concatenate([types for _, types, _ in sequences])
            rows.append(
                Row(
                    number,
                    token_ids,
                    type_ids,
                    tuple(len(ids) for ids, _, _ in sequences),
                    example.label,
                )
            )
        counts = {CUT: truncated, "no token": empty}
        return Rows(rows, {reason: count for reason, count in counts.items() if count})

    def decode(
        self, examples: Sequence[ChoiceExample], rows: Sequence[Row], outputs: Sequence[np.ndarray]
    ) -> list[Chosen]:
        """Returns the most likely choice of each example; ties go to the first."""
        predictions = []
        for row, logits in zip(rows, outputs):
            probabilities = softmax(np.asarray(logits).reshape(-1)[: len(row.lengths)])
            choice = int(probabilities.argmax())
            predictions.append(
                Chosen(choice, examples[row.example].choices[choice], tuple(probabilities.tolist()))
            )
        return predictions

    def score(
        self, examples: Sequence[ChoiceExample], predictions: Sequence[Chosen]
    ) -> dict[str, float]:
        labels = [labelled(example.label, example.where) for example in examples]
        return {
            "accuracy": scores.accuracy(labels, [prediction.choice for prediction in predictions])
        }

    def show(self, prediction: Chosen) -> dict[str, object]:
        return {**prediction._asdict(), "probabilities": list(prediction.probabilities)}

    def write(
        self,
        directory: Place,
        split: str,
        examples: Sequence[ChoiceExample],
        predictions: Sequence[Chosen],
    ) -> None:
        ids, values = (
            [example.id for example in examples],
            [prediction.choice for prediction in predictions],
        )
        write_predictions(directory / f"{split}.tsv", ids, values)


# Reading


def _table(path: str) -> Table:
    """Returns the table of a file. A file of CODAH has no header: its first line ends in a label."""
    if is_tsv(path):
        row = first_row(path)
        if len(row) >= 5 and row[-1].strip().isdecimal():
            endings = (f"ending{number}" for number in range(len(row) - 3))
            return read_table(path, ("category", "prompt", *endings, "label"))
    return read_table(path)


def _columns(config: TaskConfig, record: Mapping[str, object]) -> Columns:
    """Returns the columns of a record: those of the settings, or else the first usual names present."""
    keys = [key for key in record if isinstance(key, str)]
    context, question = (
        config.text_column or find_column(_CONTEXTS, keys),
        find_column(("question",), keys),
    )
    has_question = (
        not config.text_column and question != context and isinstance(record.get(question), str)
    )
    choices = config.second_text_column or find_column(_CHOICES, keys)
    # Numbers have no fixed width, and columns are not always in the order of their numbers.
    endings = sorted(filter(_ENDING.fullmatch, keys), key=lambda key: int(re.sub(r"\D", "", key)))
    label = config.label_column or find_column(_LABELS, keys)
    start = "" if choices else find_column(("sent2",), keys)
    return Columns(
        context,
        question if has_question else "",
        choices,
        start,
        () if choices else tuple(endings),
        label,
    )


def _example(
    config: TaskConfig, record: Mapping[str, object], number: int, labelled: bool, where: str = ""
) -> ChoiceExample:
    where = record.where if isinstance(record, Record) else where
    columns = _columns(config, record)
    context = record.get(columns.context)
    if not isinstance(context, str):
        raise _missing(
            where, columns.context or "context or sent1", "the text that goes on", record
        )
    if columns.question:
        context = f"{context} {record[columns.question]}"
    right = record.get(columns.label)
    if columns.choices:
        choices, start = record.get(columns.choices), ""
        if isinstance(choices, Mapping) and isinstance(choices.get("text"), list):
            names = choices.get("label")  # such as A, B, C
            right = names.index(right) if isinstance(names, list) and right in names else right
            choices = choices["text"]
    else:
        choices, start = [record[key] for key in columns.endings], record.get(columns.start) or ""
        # a table has as many columns as the longest row
        while choices and choices[-1] in ("", None):
            choices.pop()
    if not isinstance(choices, list) or not all(
        isinstance(text, str) for text in (*choices, start)
    ):
        raise _missing(where, columns.choices or "choices or ending0", "a list of texts", record)
    if len(choices) < 2:
        raise InputError(f"{where} has {len(choices)} choices; there must be two or more")
    choices = tuple(f"{start} {choice}".strip() for choice in choices)
    label = _label(right, len(choices), where)
    if label is None and labelled:
        raise _missing(
            where, columns.label or "label", "the number of the right choice, from 0", record
        )
    own_id = record.get(find_column(_IDS, [key for key in record if isinstance(key, str)]))
    return ChoiceExample(context, choices, label, id_of(own_id, number), where)


def _missing(where: str, key: str, kind: str, record: Mapping[str, object]) -> InputError:
    if key in record:
        return InputError(f"{where}: {key!r} is {record[key]!r:.60}, not {kind}; correct it")
    keys = ", ".join(repr(str(name)[:40]) for name in list(record)[:20]) or "nothing"
    return InputError(
        f"{where} has no {key}, {kind}, but {keys}; add it, or name its column in the settings of task"
    )


def _label(value: object, num_choices: int, where: str) -> int | None:
    number = as_number("" if value is None else str(value).strip())  # 1.0 too, as pandas writes it
    if number in ("", -1):
        return None
    if isinstance(number, str) or number not in range(num_choices):
        raise InputError(
            f"{where}: label {value!r:.60} is not the number of a choice, 0 to {num_choices - 1}"
        )
    return int(number)
