# SPDX-License-Identifier: Apache-2.0
"""Contenders of the benchmarks: training, fine-tuning, prediction, preparation, tokenizing and loading.

Each measures the code that the commands run: the compiled step with masking, dropout and optimizer, the loader that
feeds it, the predictions of `predict`, `prepare`. Rounds, medians and tables are those of `timing`.
"""

import contextlib
import dataclasses
import gzip
import itertools
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.timing import Clock, Contender, Round, peak_memory
from bert_jax.batch import Batch, Row
from bert_jax.batches import examples
from bert_jax.batches.examples import choose_batching
from bert_jax.batches.infer import inference_layouts
from bert_jax.batches.load import rows_to_batch, train_batches
from bert_jax.batches.make import batch_of_layout
from bert_jax.batches.order import train_rows
from bert_jax.batches.pack import layout_alone, sizes_of
from bert_jax.batches.shapes import length_step, padded_length, row_group
from bert_jax.data.prepare import PrepareOptions, prepare
from bert_jax.data.records import open_dataset
from bert_jax.devices.allocator import give_back_freed_memory
from bert_jax.devices.sharding import check_divisible, make_mesh, row_sharding
from bert_jax.errors import InputError
from bert_jax.model import flops
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.model.objective import Objective, PretrainingObjective, TaskObjective, init_params
from bert_jax.plan import hlo
from bert_jax.settings.finetuning import FinetuneDataConfig, TaskConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.phases import phases_of
from bert_jax.settings.pretraining import PretrainConfig, ResolvedConfig
from bert_jax.storage import files
from bert_jax.tasks.base import Task
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.evaluation import Split, make_inference, make_split, predict_split
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tokenizing import load_tokenizer
from bert_jax.training.choices import choose_precision
from bert_jax.training.phases import resolve
from bert_jax.training.program import Program
from bert_jax.training.step import abstract_state, init_state

CLS, SEP, MASK = 101, 102, 103  # of random rows, as in Google's vocabularies
NO_LABEL = -100  # as transformers writes it


class Bench(NamedTuple):
    """What is measured, and the batches that peers get to do the same."""

    contenders: list[Contender]
    batches: list[dict[str, np.ndarray]]  # of one round, named as transformers names them
    counts: dict[str, float]  # of these batches
    about: str  # a line that describes a round


class Counts:
    """The content of some batches: sequences, real tokens, and the FLOPs of real and of all tokens."""

    def __init__(self, model: ModelConfig, training: bool) -> None:
        self._model, self._flops = model, flops.train_flops if training else flops.forward_flops
        self.values: dict[str, float] = dict.fromkeys(
            ("steps", "sequences", "tokens", "useful_flops", "padded_flops"), 0.0
        )

    def add(
        self,
        shape: tuple[int, ...],
        places: int,
        tokens: float,
        squared: float,
        predictions: float,
        sequences: float,
    ) -> None:
        """Adds a batch of rows [B, L] with `places` predictions each, padding counted, and what is real in it."""
        rows, length = shape
        padded = self._flops(self._model, rows * length, rows * length**2, rows * places, rows)
        useful = self._flops(self._model, tokens, squared, predictions, sequences)
        for name, value in zip(self.values, (1, sequences, tokens, useful, padded)):
            self.values[name] += float(value)


# Training


def chosen(config: PretrainConfig) -> PretrainConfig:
    """Returns settings with the precision and attention of this device where they are open, and nothing recomputed."""
    config = choose_precision(config, jax.devices()[0])
    if config.model.remat != "auto":
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat="none"))


def train(
    config: PretrainConfig,
    length: int,
    steps: int,
    precisions: Sequence[str],
    program: Path | None = None,
    options: dict[str, bool | str] | None = None,
) -> Bench:
    """Returns pre-training: of `config.data.path`, loader included, or of random rows of `length` tokens.

    Of a run of two phases it is the first. A round is the first `steps` batches, each time. The text of the compiled
    program of the last precision is written to the file `program`, by gzip. `options` of XLA are those of `Program`.
    """
    mesh = make_mesh(config.mesh)
    dataset, ids, resolved = None, (CLS, SEP, MASK), ResolvedConfig(config)
    if config.data.path:
        dataset = open_dataset(config.data.path, verify=False)
        tokenizer = load_tokenizer(dataset.tokenizer_path)
        resolved = resolve(config, [dataset], tokenizer)
        ids = (tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id)
    config = phases_of(resolved)[0].config
    check_divisible(mesh, config.model, (config.data.batch_size, config.train.microbatches))
    size = config.data.batch_size

    def objective_of(model: ModelConfig) -> Objective:
        return PretrainingObjective(
            model, config.masking, ids[2], ids[:2], config.train.next_sentence
        )

    def batches() -> Iterator[Batch]:
        if dataset is not None:
            return train_batches(dataset.train, 0, size, config.data.seed, mesh)
        return itertools.repeat(on_device)

    on_device: Any = None
    if dataset is None:
        on_device = jax.device_put(
            random_batch(size, length, config.model.vocab_size, ids), row_sharding(mesh)
        )
    prepare_batch = jax.jit(objective_of(config.model).prepare)
    masked = [jax.device_get(prepare_batch(batch)) for batch in _first(batches(), steps)]
    counts = Counts(config.model, training=True)
    for batch in masked:
        _count(counts, batch)
    models = [
        dataclasses.replace(config.model, compute_dtype=precision) for precision in precisions
    ]
    contenders = [
        _training(
            config,
            model,
            objective_of(model),
            mesh,
            batches,
            steps,
            counts.values,
            program,
            options,
        )
        for model in models
    ]
    source = f"from {config.data.path}, loader included" if dataset else "random, on the device"
    about = f"{steps} steps of {size} rows of {masked[0].token_ids.shape[1]} tokens, {source}"
    packed = masked[0].cls_positions.shape[1] > 1  # peers cannot read it
    inputs = [] if packed else [_pretraining_inputs(batch) for batch in masked]
    return Bench(contenders, inputs, counts.values, about)


def finetune(
    config: PretrainConfig, rows: Sequence[Row], task: Task, steps: int, precisions: Sequence[str]
) -> Bench:
    """Returns fine-tuning of a classifier of two classes, the loader included. A round is one epoch of the rows.

    Ours are random batches, packed where that takes fewer FLOPs, as `finetune.py` makes them. Peers get the same rows
    sorted by length, in `steps` batches.
    """
    mesh = make_mesh(config.mesh)
    size = config.data.batch_size
    check_divisible(mesh, config.model, (size, config.train.microbatches))
    rows = [row._replace(label=number % 2) for number, row in enumerate(rows)]
    data = FinetuneDataConfig(batch_size=size, seed=config.data.seed)
    group = row_group(mesh, config.train.microbatches)
    batching = choose_batching(
        rows, data, config.model, group, "auto" if task.head.can_be_packed else "off", steps
    )

    def batches() -> Iterator[Batch]:
        return examples.train_batches(rows, task.head, 0, batching, mesh)

    ours, theirs = Counts(config.model, training=True), Counts(config.model, training=True)
    for batch in _first(batches(), steps):
        _count(ours, jax.device_get(batch))
    inputs, lengths = _of_like_lengths(rows, task, size, config.model, mesh, theirs)
    contenders = []
    for precision in precisions:
        model = dataclasses.replace(config.model, compute_dtype=precision)
        objective = TaskObjective(model, task.head, task.num_outputs)
        contenders.append(_training(config, model, objective, mesh, batches, steps, ours.values))
    shape = batching.shape
    how = f"ours in rows of {shape.length} tokens" if shape else "ours in rows of their own"
    about = f"{len(rows)} rows in {steps} batches, {how}, peers' padded to {lengths} tokens, loader included"
    return Bench(contenders, inputs, theirs.values, about)


def _of_like_lengths(
    rows: Sequence[Row], task: Task, size: int, model: ModelConfig, mesh: Mesh, counts: Counts
) -> tuple[list[dict[str, np.ndarray]], str]:
    """Returns rows sorted by length, in batches as peers take them, and the lengths of these. Adds to the counts."""
    sizes = sizes_of(rows)
    order = np.argsort(-sizes.tokens, kind="stable")
    inputs, lengths = [], set()
    for first in range(0, len(order), size):
        numbers = order[first : first + size]
        length = padded_length(int(sizes.tokens[numbers].max()), model.max_positions, length_step())
        widest = int(sizes.sequences.max(initial=1))
        layout = layout_alone(numbers.tolist(), size, length, widest)
        batch = jax.device_get(batch_of_layout(rows, layout, task.head, mesh))
        _count(counts, batch)
        lengths.add(batch.token_ids.shape[1])
        inputs.append(
            {name: array[: len(layout.bins)] for name, array in _task_inputs(batch).items()}
        )
    return inputs, _listed(sorted(lengths))


def _training(
    config: PretrainConfig, model: ModelConfig, objective: Objective, mesh: Mesh, batches: Any, steps: int,
    counts: dict[str, float], program: Path | None = None, options: dict[str, bool | str] | None = None,
) -> Contender:  # fmt: skip
    """Returns a contender that takes the first steps of `batches()` in each round."""
    settings = objective, config.optimizer, config.train
    state = init_state(*settings, abstract_state(*settings, mesh))
    step = Program(mesh, options).training(*settings, state)
    facts: dict[str, Any] = {"side": "ours", "precision": model.compute_dtype}
    (first,) = _first(batches(), 1)
    with jax.set_mesh(mesh):
        started = time.perf_counter()
        compiled = step.lower(state, first).compile()  # type: ignore[attr-defined]
        facts["compile_seconds"] = round(time.perf_counter() - started, 2)
    if text := compiled.as_text():
        if program:
            program.write_bytes(gzip.compress(text.encode()))
        # Kernels that XLA did not write itself.
        facts["kernels"] = sorted(set(re.findall(r'custom_call_target="([^"]+)"', text)))
        # A loop whose length is not written in the program, or a program of a compiler that we have not read yet.
        with contextlib.suppress(ValueError, LookupError, AssertionError, RuntimeError):
            facts["compiled_flops"] = hlo.flops(text)

    def run() -> Round:
        nonlocal state
        with (
            jax.set_mesh(mesh),
            contextlib.closing(_closable(batches())) as stream,
            Clock() as clock,
        ):
            for batch in itertools.islice(stream, steps):
                state, _ = compiled(state, batch, step.key)
                give_back_freed_memory()
            jax.block_until_ready(state)
        facts.update(peak_memory(mesh.devices.flat[0]))
        return clock.round(**counts)

    return Contender(f"ours {model.compute_dtype}", run, facts)


# Prediction


def infer(
    config: PretrainConfig,
    rows: Sequence[Row],
    task: Task,
    batch_size: int,
    precisions: Sequence[str],
) -> Bench:
    """Returns prediction as `predict` does it, from rows to classes; peers get rows of like lengths in a batch."""
    mesh = make_mesh(config.mesh)
    rows = [row._replace(label=None) for row in rows]
    split = Split("input", list(range(len(rows))), rows, {})
    ours, theirs = Counts(config.model, training=False), Counts(config.model, training=False)
    inputs, lengths = _of_like_lengths(rows, task, batch_size, config.model, mesh, theirs)
    params = jax.jit(lambda key: init_params(config.model, key, task.head, task.num_outputs))(
        jax.random.key(0)
    )
    pack = make_inference(config.model, task, mesh, params).pack
    layouts = list(inference_layouts(sizes_of(rows), config.model, pack, mesh, batch_size))
    for layout in layouts:
        _count(ours, jax.device_get(batch_of_layout(rows, layout, task.head, mesh)))
    ours.values["steps"] = theirs.values["steps"]  # a step is as many rows on both sides
    contenders = []
    for precision in precisions:
        model = dataclasses.replace(config.model, compute_dtype=precision)
        function = make_inference(model, task, mesh, params)
        ready = function.ready(params)
        facts: dict[str, Any] = {"side": "ours", "precision": precision}

        def run(
            function: Any = function, ready: Any = ready, facts: dict[str, Any] = facts
        ) -> Round:
            with Clock() as clock:
                predict_split(task, split, function, ready, batch_size, mesh)
            facts.update(peak_memory(mesh.devices.flat[0]))
            return clock.round(**ours.values)

        contenders.append(Contender(f"ours {precision}", run, facts))
    packed = any(len(members) > 1 for layout in layouts for members in layout.bins)
    how = f"ours in rows of {layouts[0].length} tokens" if packed else "ours in rows of their own"
    about = f"{len(rows)} rows in batches of {batch_size}, {how}, peers' padded to {lengths} tokens"
    return Bench(contenders, inputs, theirs.values, about)


def make_classifier(length: int, name: str = "classification") -> Task:
    """Returns a task of telling two classes apart in texts of at most `length` tokens.

    Raises: InputError if the task of that name is another kind of task.
    """
    task = make_task(
        TaskConfig(name=name, max_seq_length=length), ("0", "1") if name == "classification" else ()
    )
    if task.head != SEQUENCES or task.num_outputs != 2:
        raise InputError(
            f"--task={name} has no two classes; use one that has, such as sst2, cola, mrpc, qqp, rte"
        )
    return task


def read_rows(task: Task, path: str, tokenizer: Tokenizer, most: int) -> Sequence[Row]:
    """Returns the rows of the first lines of a file; what follows a tab is left out."""
    texts = [line.partition("\t")[0] for line in itertools.islice(read_lines(path), most)]
    examples = [task.parse(text, f"{path}:{number}") for number, text in enumerate(texts, 1)]
    return make_split(task, tokenizer, "input", examples).rows


def task_rows(
    task: Task, data: str, tokenizer: Tokenizer, training: bool, most: int
) -> Sequence[Row]:
    """Returns a random sample of the rows of a task's training or first evaluation split, if it has one."""
    examples = [] if training else task.read(data, task.splits["eval"][0])
    examples = examples or task.read(data, "train")
    chosen = np.sort(np.random.default_rng(0).permutation(len(examples))[:most])
    return make_split(
        task, tokenizer, "input", [examples[index] for index in chosen], training
    ).rows


def random_rows(count: int, length: int, vocab_size: int) -> Sequence[Row]:
    """Returns full rows of random tokens."""
    batch = random_batch(count, length, vocab_size, (CLS, SEP, MASK))
    return [
        Row(number, token_ids.astype(np.int32), batch.type_ids[number], (length,))
        for number, token_ids in enumerate(batch.token_ids)
    ]


# Data


def load(path: str, batch_size: int, steps: int) -> Bench:
    """Returns reading the shuffled rows of a data set, and reading and making batches of them; in one thread."""
    split = open_dataset(path, verify=False).train
    places = np.arange(batch_size)

    def contender(name: str, to_batch: bool) -> Contender:
        numbers = itertools.count()

        def run() -> Round:
            tokens = 0
            with Clock() as clock:
                for _ in range(steps):
                    indices, epochs = train_rows(
                        next(numbers), places, batch_size, split.num_rows, seed=0
                    )
                    rows = split.gather(indices)
                    tokens += int(rows["lengths"].sum())
                    if to_batch:
                        rows_to_batch(rows, epochs)
            return clock.round(steps=steps, rows=steps * batch_size, tokens=tokens)

        return Contender(name, run, {})

    contenders = [contender("shuffled and read", False), contender("and made into batches", True)]
    length = split.dtype["token_ids"].shape[0]
    about = f"{steps} batches of {batch_size} rows of {length} tokens, of {split.num_rows:,} rows; one thread"
    return Bench(contenders, [], {}, about)


def prepare_text(inputs: str, tokenizer: str, options: PrepareOptions, workers: int) -> Bench:
    """Returns preparing a data set, all of it, in a folder that is removed again."""

    def run() -> Round:
        with tempfile.TemporaryDirectory(prefix="bert_jax_bench_") as folder:
            with Clock(children=True) as clock:
                manifest = prepare(inputs, tokenizer, str(Path(folder) / "data"), options, workers)
            splits = manifest["splits"].values()
            read = sum(split["text_bytes"] for split in splits)
            return clock.round(steps=1, bytes=read, tokens=sum(split["tokens"] for split in splits))

    about = f"{inputs} to rows of {options.max_seq_length}, {options.duplicates} times; {workers or 'all'} workers"
    return Bench([Contender("prepare_corpus", run, {})], [], {}, about)


def tokenize(path: str, tokenizer: str, most_bytes: int) -> Bench:
    """Returns turning lines of text into ids with a tokenizer that has seen no word yet; in one thread."""
    lines, size = [], 0
    for line in read_lines(path):
        lines.append(line)
        size += len(line.encode()) + 1
        if size >= most_bytes:
            break

    def run() -> Round:
        loaded = load_tokenizer(tokenizer)
        with Clock() as clock:
            encoded = loaded.encode_batch(lines)
        return clock.round(steps=1, bytes=size, tokens=sum(map(len, encoded)))

    return Bench(
        [Contender("encode_batch", run, {})],
        [],
        {},
        f"{size / 1e6:.1f} MB in {len(lines):,} lines; one thread",
    )


def read_lines(paths: str) -> Iterator[str]:
    """Yields the lines of files of UTF-8 text, plain or compressed; blank ones are left out.

    Raises: InputError if the file is missing or has no text.
    """
    has_text = False
    for path in files.expand_globs(paths):
        with files.open_binary(path) as stream:
            for line in stream:
                text = line.decode("utf-8", errors="replace").strip()
                if text:
                    has_text = True
                    yield text
    if not has_text:
        raise InputError(f"input {paths} has no text in it; give a file with a text a line")


# Batches


def random_batch(rows: int, length: int, vocab_size: int, ids: tuple[int, int, int]) -> Batch:
    """Returns rows of random tokens in which every third goes on with a word; none is padding."""
    cls_id, sep_id, mask_id = ids
    if vocab_size <= mask_id + 1 or length < 8:
        raise InputError(
            f"random rows need 8 tokens or more of a vocabulary above {mask_id + 1}; raise --length"
        )
    rng = np.random.default_rng(0)
    shape, middle = (rows, length), length // 2
    token_ids = rng.integers(mask_id + 1, vocab_size, shape)
    token_ids[:, 0], token_ids[:, middle], token_ids[:, -1] = cls_id, sep_id, sep_id
    return Batch(
        token_ids=token_ids.astype(np.min_scalar_type(vocab_size - 1)),
        type_ids=np.broadcast_to(np.arange(length) > middle, shape).astype(np.uint8),
        sequence_ids=np.ones(shape, np.uint8),
        cls_positions=np.zeros((rows, 1), np.int32),
        sequence_weights=np.ones((rows, 1), np.float32),
        next_sentence_labels=rng.integers(0, 2, (rows, 1)).astype(np.int32),
        sequence_numbers=np.arange(rows, dtype=np.uint32)[:, None],
        epochs=np.zeros(rows, np.int32),
        word_starts=rng.random(shape) < 2 / 3,
    )


def _count(counts: Counts, batch: Batch) -> None:
    lengths = (
        batch.sequence_ids[:, None, :] == np.arange(1, batch.cls_positions.shape[1] + 1)[:, None]
    ).sum(axis=-1)
    weights = batch.mlm_weights
    places = 0 if weights is None else weights.shape[1]
    predictions = 0 if weights is None else weights.sum()
    sequences = batch.sequence_weights.sum()
    counts.add(
        batch.token_ids.shape,
        places,
        lengths.sum(),
        (lengths.astype(float) ** 2).sum(),
        predictions,
        sequences,
    )


def _pretraining_inputs(batch: Batch) -> dict[str, np.ndarray]:
    """Returns a masked batch of one sequence a row as transformers' BertForPreTraining takes it."""
    labels = np.full(batch.token_ids.shape, NO_LABEL, np.int32)
    rows, places = np.nonzero(batch.mlm_weights)
    labels[rows, batch.mlm_positions[rows, places]] = batch.mlm_labels[rows, places]
    return _task_inputs(batch._replace(labels=labels)) | {
        "next_sentence_label": batch.next_sentence_labels[:, 0]
    }


def _task_inputs(batch: Batch) -> dict[str, np.ndarray]:
    """Returns a batch as transformers' BertForSequenceClassification takes it."""
    inputs = {
        "input_ids": batch.token_ids.astype(np.int32),
        "token_type_ids": batch.type_ids,
        "attention_mask": (batch.sequence_ids > 0).astype(np.uint8),
    }
    if batch.labels is None:
        return inputs
    return inputs | {"labels": batch.labels if batch.labels.shape[1] > 1 else batch.labels[:, 0]}


def _first(stream: Iterator[Any], count: int) -> list[Any]:
    with contextlib.closing(_closable(stream)) as batches:
        return list(itertools.islice(batches, count))


def _closable(stream: Iterable[Any]) -> Any:
    return stream if hasattr(stream, "close") else (item for item in stream)


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(map(str, lengths)) if len(lengths) < 6 else f"{lengths[0]} to {lengths[-1]}"
