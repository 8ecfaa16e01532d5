# SPDX-License-Identifier: Apache-2.0
"""Prepares the inputs of a fine-tuning run from its settings: the task, the model to start from, and the rows."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.batch import Row
from bert_jax.batches.examples import mix_of
from bert_jax.batches.pack import StoredRows
from bert_jax.checkpoints.pretrained import Pretrained, read_pretrained
from bert_jax.checkpoints.warm_start import params_digest
from bert_jax.errors import InputError
from bert_jax.model.heads.ranking import RANKING
from bert_jax.model.heads.table import HEADS
from bert_jax.model.heads.tokens import TOKENS
from bert_jax.model.inputs import check_rows
from bert_jax.settings.finetuning import FinetuneConfig, TaskConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import TrainConfig
from bert_jax.settings.rules import to_dict
from bert_jax.storage.resolve import resolve
from bert_jax.tasks.base import Example, Task
from bert_jax.tasks.catalog import USUAL, Own, make_task
from bert_jax.tasks.embeddings.prepared import PreparedPairs
from bert_jax.tasks.embeddings.read import are_alone
from bert_jax.tasks.embeddings.task import EmbeddingTask, from_start
from bert_jax.tasks.evaluation import Data, Split, make_split
from bert_jax.tasks.hooks import check_kind, told
from bert_jax.tasks.results import listed
from bert_jax.tasks.trial import try_own
from bert_jax.text.hf_tokenizer import with_prompt_tokens


class TaskInputs(NamedTuple):
    """The settings of a run, completed from its data, and what they name."""

    config: FinetuneConfig
    task: Task
    start: Pretrained  # without a head of another task
    data: Data
    model: ModelConfig
    train: TrainConfig  # epochs in steps

    def without_params(self) -> "TaskInputs":
        """Returns the same, without the parameters to start from."""
        return self._replace(start=dataclasses.replace(self.start, params={}))


@told()
def open_task(config: FinetuneConfig, own: Own = USUAL) -> TaskInputs:
    """Returns the inputs of a run, and its settings completed from the data.

    Raises: InputError if the model or the data cannot be read, or do not fit each other or the task.
    """
    config, start = completed(config)
    task, start, data = prepare(config, start, own)
    model = dataclasses.replace(
        start.config.computing_in(config.model.compute_dtype), **to_dict(config.model)
    )
    model.validate()
    is_simcse = isinstance(task, EmbeddingTask) and are_alone(data.train.examples)
    if is_simcse and not model.hidden_dropout_rate and not model.attention_dropout_rate:
        model = dataclasses.replace(model, hidden_dropout_rate=0.1, attention_dropout_rate=0.1)
        note = "texts alone differ from themselves by dropout only, and model has none: both its rates are 0.1"
        start = dataclasses.replace(start, notes=(*start.notes, note))
    if config.task.probe.features in ("weighted_last4", "concat_last4") and model.num_layers < 4:
        raise InputError(
            f"task.probe.features of 4 layers, and the model has {model.num_layers}; use weighted_all"
        )
    try_own(task, data, model, start.tokenizer, config)
    return TaskInputs(
        config=config.resolved(),
        task=task,
        start=start,
        data=data,
        model=model,
        train=train_config(config, data),
    )


def completed(config: FinetuneConfig) -> tuple[FinetuneConfig, Pretrained]:
    """Returns the settings with what embeddings take from the model to start from, and that model, which says so."""
    start = load_start(config.init_checkpoint)
    if config.task.name != "embeddings":
        return config, start
    task, lines = from_start(config.task, start.embedding)
    params = dict(start.params)
    kernel = params.get("projection", {}).get("kernel")
    size = start.config.hidden_size * len(task.embedding.poolings())
    is_other = start.embedding is not None and start.embedding.embedding.kind != task.embedding.kind
    if kernel is not None and (is_other or kernel.shape != (size, task.embedding.projection_size)):
        del params["projection"]
        lines.append(
            f"its projection, from {kernel.shape[0]} to {kernel.shape[1]} numbers, is not used"
        )
    tokenizer = start.tokenizer
    embedding = task.embedding
    if embedding.kind == "multi_vector":  # whose prompts are tokens, where the vocabulary has them
        prompts = embedding.query_prompt, embedding.passage_prompt
        tokenizer = with_prompt_tokens(tokenizer, prompts)
    notes = (*start.notes, *lines)
    start = dataclasses.replace(start, params=params, tokenizer=tokenizer, notes=notes)
    return dataclasses.replace(config, task=task), start


def load_start(init_checkpoint: str) -> Pretrained:
    """Returns the model to start from; "random:PATH" is an untrained model of the same shape."""
    start = read_pretrained(resolve(init_checkpoint.removeprefix("random:")))
    if not init_checkpoint.startswith("random:"):
        return start
    notes = ("every parameter starts at random",)
    return dataclasses.replace(
        start, params={"encoder": {}}, task="pretraining", labels=(), notes=notes
    )


def prepare(
    config: FinetuneConfig, start: Pretrained, own: Own = USUAL
) -> tuple[Task, Pretrained, Data]:
    """Returns the task, the model to start from without a head of another task, and the data.

    Raises: InputError if the data cannot be read or fits no task, or the model cannot be fine-tuned.
    """
    task = make_task(config.task, own=own)
    if not task.splits.get("train"):
        raise InputError(
            f"task {config.task.name} has no training data, only a test; fine-tune mnli for ax"
        )
    if task.head is RANKING:  # what is exported cuts pairs so
        start = dataclasses.replace(start, tokenizer=start.tokenizer.cutting_as_hub())
    if task.head is TOKENS:  # its texts are lists of words
        start = dataclasses.replace(start, tokenizer=start.tokenizer.with_blanks())
    if config.task.max_seq_length > start.config.max_positions:
        long = f"task.max_seq_length {config.task.max_seq_length} is above the {start.config.max_positions} positions"
        raise InputError(
            f"{long} of {config.init_checkpoint}; lower it, or lengthen the model with grow_model"
        )
    source = config.data.source or config.data.path
    examples = task.read(source, task.splits["train"][0])
    if isinstance(examples, PreparedPairs):
        examples.as_set(config.data)
    elif config.data.stream == "on":
        raise InputError(
            f"data.stream=on reads prepared pairs while a run trains, and {source} is read whole; leave it out, or "
            "prepare the data with prepare_pairs"
        )
    check_kind(task, "read", examples, (list, tuple, PreparedPairs), "a list of examples")
    if not examples:
        raise InputError(
            f"{source} has no training examples for task {config.task.name}; give data that has some"
        )
    labels = task.labels or task.find_labels(examples)
    for label in labels:
        check_kind(task, "find_labels", label, str, "texts, the names of classes")
    is_own = start.task not in HEADS  # whose parts are not known here
    known = start.params.keys() - {"encoder"} if is_own else start.params.keys() & {"classifier"}
    if known:
        classes = 0 if is_own else start.params["classifier"]["bias"].shape[0]
        name = task.head.saved_as or task.head.name
        is_same = start.task == name and sorted(start.labels) == sorted(labels)
        if is_same and not start.problem and classes in (0, len(labels) or task.num_outputs):
            labels = start.labels  # the head is kept, so its order is too
        else:
            about = f"of {', '.join(start.labels)}" if start.labels else f"of {classes} classes"
            note = f"its {start.task if is_own else f'classifier, {about},'} is not used"
            params = {name: part for name, part in start.params.items() if name not in known}
            start = dataclasses.replace(start, params=params, notes=(*start.notes, note))
    settings = task.settle(examples)
    check_kind(task, "settle", settings, TaskConfig, "settings, a TaskConfig")
    if (settings, labels) != (task.config, task.labels):
        task = task.remade(settings, labels)
    train = make_split(task, start.tokenizer, task.splits["train"][0], examples, training=True)
    if not train.rows:
        raise InputError(f"no training example of {source} has a row: {listed(train.counts)}")
    others: dict[str, list[Split]] = {"eval": [], "test": []}
    for kind, splits in others.items():
        for name in task.splits.get(kind, ()):
            if found := task.read(source, name):
                splits.append(make_split(task, start.tokenizer, name, found))
    for split in (train, *others["eval"], *others["test"]):
        # rows that are stored have the ids of the model's own tokenizer, and lengths of its settings
        if not isinstance(split.rows, StoredRows):
            check_rows(start.config, split.rows, f"{split.name} of {source}")
    return task, start, Data(train, others["eval"], others["test"])


def train_config(config: FinetuneConfig, data: Data) -> TrainConfig:
    """Returns the training settings, with epochs converted to steps; a partial batch is a step."""
    num_steps = round(
        mix_of(data.train.rows, config.data).num_steps(config.data.batch_size)
        * config.train.num_epochs
    )
    train = config.train
    return TrainConfig(
        num_steps=max(1, num_steps),
        accumulate=train.accumulate,
        seed=train.seed,
        steps_per_call=train.steps_per_call,
        zero1="off",
    )


def compared(start: Pretrained, data: Data) -> dict[str, object]:
    """Returns digests of the model, of all rows and of what they are scored by, for several processes to compare."""
    splits = (data.train, *data.evaluation, *data.test)
    return {
        "parameters of init_checkpoint": params_digest(start.params),
        "rows": {split.name: fingerprint(split.rows) for split in splits},
        "examples": {
            split.name: _content(split.examples)
            for split in splits
            if not isinstance(split.examples, PreparedPairs)
        },
    }


def _content(examples: Sequence[Example]) -> str:
    """Returns a sha256 over what the examples of our own tasks say, as the grades of passages, which no row has.

    Where they were read may differ between processes.
    """
    digest = hashlib.sha256()
    for example in examples:
        if "where" in getattr(example, "_fields", ()):
            digest.update(repr(example._replace(where="")).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def fingerprint(rows: Sequence[Row]) -> str:
    """Returns a sha256 over the inputs and labels of the rows."""
    if isinstance(rows, StoredRows):
        return rows.fingerprint
    digest = hashlib.sha256()
    for row in rows:
        digest.update(row.token_ids.tobytes() + row.type_ids.tobytes())
        weight = () if row.weight == 1 else (row.weight,)
        label = row.label
        if isinstance(label, tuple) and label and isinstance(label[0], tuple):
            label = (*label[0], *label[1:])  # a teacher's scores, before the numbers of texts
        digest.update(repr((row.lengths, np.asarray(label).tolist(), *weight)).encode())
    return digest.hexdigest()
