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
from bert_jax.tasks import scores
from bert_jax.tasks.base import CUT, Rows, Task, choose_metric, without_zeros
from bert_jax.tasks.labels import as_number, check_labelled
from bert_jax.tasks.readers import Examples, Table, find_split_file, first_row, is_tsv, read_table
from bert_jax.tasks.records import Record, find_column, id_of
from bert_jax.tasks.texts import check_length, softmax, write_predictions
from bert_jax.text.fitting import join_texts

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


class Chosen(NamedTuple):
    """The predicted choice, counted from 0, and the probability of each choice."""

    choice: int
    text: str
    probabilities: tuple[float, ...]


class ChoiceTask(Task[ChoiceExample, Chosen]):
    """The choice that fits best."""

    head = CHOICES

    def __init__(self, config: TaskConfig, labels: Sequence[str] = ()) -> None:
        super().__init__(config)
        self.metric = choose_metric(config, ("accuracy",))

    def read(self, source, split):
        path = find_split_file(source, split)
        if not path:
            return Examples()
        records = _table(path).filled().records
        found = [_example(self.config, record, number) for number, record in enumerate(records)]
        examples = [example for example, _ in found]
        if split != "test":
            check_labelled(examples)
        return Examples(examples, columns=found[0][1])

    def parse(self, value, where):
        """Returns the example of an object as in JSON files, or of context and choices separated by tabs."""
        if isinstance(value, Mapping):
            return _example(self.config, Record(value, where))[0]._replace(label=None, id=0)
        parts = value.split("\t") if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)) or not all(isinstance(text, str) for text in parts):
            parts = ()
        if len(parts) < 3:
            raise InputError(
                f"{where}: {value!r:.60} is not a context and two or more choices, with tabs between them, nor like "
                '{"context": "...", "choices": ["...", "..."]}'
            )
        return ChoiceExample(
            context=parts[0],
            choices=tuple(parts[1:]),
            where=where,
        )

    def make_rows(self, examples, tokenizer, training):
        """Returns a row for each example with one sequence per choice, each truncated to `max_seq_length`."""
        check_length(self.config)
        if training:
            check_labelled(examples)
        rows = []
        counts = {CUT: 0, "no token": 0}
        for number, example in enumerate(examples):
            context = tokenizer.encode(example.context)
            endings = tokenizer.encode_batch(example.choices)
            made = [
                join_texts(tokenizer, context, ending, self.config.max_seq_length)
                for ending in endings
            ]
            counts[CUT] += any(sequence.was_cut for sequence in made)
            counts["no token"] += not all(endings)
            token_ids = np.concatenate([sequence.token_ids for sequence in made])
            type_ids = np.concatenate([sequence.type_ids for sequence in made])
            lengths = tuple(len(sequence.token_ids) for sequence in made)
            rows.append(
                Row(
                    example=number,
                    token_ids=token_ids,
                    type_ids=type_ids,
                    lengths=lengths,
                    label=example.label,
                )
            )
        return Rows(rows, without_zeros(counts))

    def decode(self, examples, rows, outputs):
        """Returns the most likely choice of each example; ties go to the first."""
        predictions = []
        for row, logits in zip(rows, outputs):
            probabilities = softmax(np.asarray(logits).reshape(-1)[: len(row.lengths)])
            choice = int(probabilities.argmax())
            predictions.append(
                Chosen(
                    choice=choice,
                    text=examples[row.example].choices[choice],
                    probabilities=tuple(probabilities.tolist()),
                )
            )
        return predictions

    def score(self, examples, predictions):
        check_labelled(examples)
        labels = [example.label or 0 for example in examples]
        return {"accuracy": scores.accuracy(labels, [said.choice for said in predictions])}

    def show(self, prediction):
        return {**prediction._asdict(), "probabilities": list(prediction.probabilities)}

    def write(self, directory, split, examples, predictions):
        values = [prediction.choice for prediction in predictions]
        write_predictions(directory / f"{split}.tsv", zip(examples, values))


# Reading


def _table(path: str) -> Table:
    """Returns the table of a file. A file of CODAH has no header: its first line ends in a label."""
    if is_tsv(path):
        row = first_row(path)
        if len(row) >= 5 and row[-1].strip().isdecimal():
            endings = (f"ending{number}" for number in range(len(row) - 3))
            return read_table(path, ("category", "prompt", *endings, "label"))
    return read_table(path)


def _example(
    config: TaskConfig, record: Record, number: int = 0
) -> tuple[ChoiceExample, list[str]]:
    """Returns the example of a record, and the columns that are read: those of the settings, or usual names.

    Raises: InputError, with its place, if it has no context or no choices.
    """
    texts = [config.text_column or find_column(_CONTEXTS, record) or "context"]
    question = find_column(["question"], record)
    if question not in ("", *texts) and not config.text_column and type(record[question]) is str:
        texts.append(question)
    context = " ".join(record.get_as(name, str) for name in texts)
    label_column = config.label_column or find_column(_LABELS, record)
    right = record.get(label_column) if label_column else None
    start = ""
    if name := config.second_text_column or find_column(_CHOICES, record):
        choices = record
        columns = [name]
        if isinstance(record.get(name), Mapping):  # on the hub choices have names, such as A, B, C
            choices, name = Record(record[name], record.where), "text"
            names = choices.get("label")
            right = names.index(right) if isinstance(names, list) and right in names else right
        endings = choices.texts(name)
    else:
        # Numbers have no fixed width, and columns are not always in the order of their numbers.
        columns = [key for key in map(str, record) if _ENDING.fullmatch(key)]
        columns.sort(key=lambda key: int(re.sub(r"\D", "", key)))
        # a table has as many columns as the longest row
        while columns and record[columns[-1]] in ("", None):
            columns.pop()
        endings = [record.get_as(name, str) for name in columns]
        if start_column := find_column(["sent2"], record):
            start = record[start_column] or ""
    if len(endings) < 2:
        raise InputError(f"{record.where} has {len(endings)} choices; there must be two or more")
    endings = tuple(f"{start} {ending}".strip() for ending in endings)
    # 1.0 is 1, as pandas writes it
    label = as_number("" if right is None else str(right).strip())
    if label not in ("", -1) and (isinstance(label, str) or label not in range(len(endings))):
        raise InputError(
            f"{record.where}: label {right!r:.60} is not the number of a choice, 0 to {len(endings) - 1}"
        )
    example = ChoiceExample(
        context=context,
        choices=endings,
        label=None if label in ("", -1) else int(label),
        id=id_of(record.get(find_column(_IDS, record)), number),
        where=record.where,
    )
    return example, [*texts, *columns, label_column]
