# SPDX-License-Identifier: Apache-2.0
"""Small models, batches, corpora and files for tests, made from a seed; the message of an error."""

import dataclasses
import functools
import json
import random
from pathlib import Path

import jax
import numpy as np
import pytest

from bert_jax.batch import Batch
from bert_jax.batches.examples import choose_batching, train_batches
from bert_jax.checkpoints.pretrained import Pretrained, save_pretrained
from bert_jax.data.prepare import PrepareOptions, prepare
from bert_jax.devices.sharding import make_mesh
from bert_jax.errors import InputError
from bert_jax.model.heads.table import HEADS
from bert_jax.model.keys import root_key
from bert_jax.model.objective import init_params
from bert_jax.model.shapes import abstract_params
from bert_jax.settings.finetuning import (
    FinetuneConfig,
    FinetuneDataConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
    TaskConfig,
)
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    MaskingConfig,
    MeshConfig,
    OptimizerConfig,
    PretrainConfig,
    ReportConfig,
    TrainConfig,
)
from bert_jax.text.tokenizer import wordpiece_tokenizer
from bert_jax.tokenizing import load_tokenizer
from bert_jax.training.step import TrainState, abstract_state, init_state

CLS, SEP, MASK, FIRST_WORD = 2, 3, 4, 5


def tiny_model(**changes) -> ModelConfig:
    """Returns a model of two layers without dropout, with an odd vocabulary so that its table is padded."""
    model = ModelConfig(
        vocab_size=203,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        intermediate_size=64,
        max_positions=64,
        hidden_dropout_rate=0.0,
        attention_dropout_rate=0.0,
        unroll=1,
    )
    return dataclasses.replace(model, **changes)


def drawn_like(shapes, stddev: float = 0.02):
    """Returns random parameters of these shapes, as `init_params` draws them, by NumPy, which compiles nothing."""
    rng = np.random.default_rng(3)

    def draw(path, leaf):
        name = path[-1].key
        is_matrix = name in ("embedding", "kernel")
        values = np.clip(rng.normal(0, stddev, leaf.shape), -2 * stddev, 2 * stddev) if is_matrix else name == "scale"
        return np.broadcast_to(values, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.lru_cache
def drawn_params(model: ModelConfig, task: str = "pretraining", num_classes: int = 0):
    """Returns random parameters of a model and a head of its family; shared, so not to be changed."""
    shapes, parts = abstract_params(model, num_classes), HEADS[task].parts_in(model)
    named = {name: shape for name, shape in shapes.items() if name in ("encoder", *parts)}
    params = drawn_like(named, model.initializer_stddev)
    params["encoder"]["embeddings"]["word"]["embedding"][model.vocab_size :] = 0
    if "pooler" not in parts:
        del params["encoder"]["pooler"]
    return params


def task_params(task: str, num_classes: int = 0):
    """Returns random parameters of `tiny_model()` for a task; shared, so not to be changed."""
    return drawn_params(tiny_model(), task, num_classes)


@functools.lru_cache
def pretraining_params():
    """Returns the random parameters of `tiny_model()` and seed 0 for pre-training; shared, so not to be changed."""
    return jax.device_get(jax.jit(functools.partial(init_params, tiny_model()))(root_key(0, "parameters")))


def random_batch(
    seed: int = 0, num_rows: int = 16, row_length: int = 32, num_sequences: int = 1, vocab_size: int = 203
) -> Batch:
    """Returns unmasked rows of [CLS] A [SEP] B [SEP] with padding; all lengths differ."""
    rng = np.random.default_rng(seed)
    room = row_length // num_sequences
    shape = (num_rows, row_length)
    batch = Batch(
        token_ids=np.zeros(shape, np.uint16),
        type_ids=np.zeros(shape, np.uint8),
        sequence_ids=np.zeros(shape, np.uint8),
        cls_positions=np.zeros((num_rows, num_sequences), np.int32),
        sequence_weights=np.ones((num_rows, num_sequences), np.float32),
        next_sentence_labels=rng.integers(0, 2, (num_rows, num_sequences)).astype(np.int32),
        sequence_numbers=np.arange(num_rows * num_sequences, dtype=np.uint32).reshape(num_rows, num_sequences),
        epochs=np.zeros(num_rows, np.int32),
        word_starts=np.ones(shape, bool),
    )
    for row in range(num_rows):
        start = 0
        for place in range(num_sequences):
            length = int(rng.integers(max(5, room // 3), room + 1))
            first = int(rng.integers(3, length - 1))
            stop = start + length
            batch.token_ids[row, start:stop] = rng.integers(FIRST_WORD, vocab_size, length)
            batch.token_ids[row, [start, start + first - 1, stop - 1]] = CLS, SEP, SEP
            batch.type_ids[row, start + first : stop] = 1
            batch.sequence_ids[row, start:stop] = place + 1
            batch.cls_positions[row, place] = start
            start = stop
    return batch


def fresh_state(objective, optimizer, train, mesh, params=None) -> TrainState:
    """Returns the state of step 0 on a mesh, from random parameters or from the given ones."""
    return init_state(objective, optimizer, train, abstract_state(objective, optimizer, train, mesh), params)


def write_corpus(path: Path, num_documents: int = 40, seed: int = 0) -> None:
    """Writes documents of a toy language, each about one of a few topics, a sentence a line."""
    rng = random.Random(seed)
    topics = [[f"{letter}{vowel}{ending}" for vowel in "aeiou" for ending in "nrst"] for letter in "bdfgklmp"]
    documents = []
    for _ in range(num_documents):
        words = rng.choice(topics)
        sentences = [
            " ".join(["the", *(rng.choice(words) for _ in range(rng.randint(3, 9))), "."])
            for _ in range(rng.randint(6, 20))
        ]
        documents.append("\n".join(sentences))
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")


def write_vocab(path: Path) -> None:
    """Writes a vocabulary that has every word of `write_corpus`."""
    words = [f"{letter}{vowel}{ending}" for letter in "bdfgklmp" for vowel in "aeiou" for ending in "nrst"]
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path.write_text("\n".join([*specials, ".", "the", *words]) + "\n", encoding="utf-8")


def make_dataset(directory: Path, row_length: int = 32, **options) -> Path:
    """Returns a data set prepared from a toy corpus below `directory`."""
    write_corpus(directory / "text.txt")
    write_vocab(directory / "vocab.txt")
    options = {"duplicates": 2, "holdout_rate": 0.1} | options
    prepare(
        str(directory / "text.txt"),
        str(directory / "vocab.txt"),
        str(directory / "data"),
        PrepareOptions(max_seq_length=row_length, **options),
        num_workers=1,
    )
    return directory / "data"


def tiny_run(path: Path, **sections) -> PretrainConfig:
    """Returns a run of 12 steps that evaluates every 6 and saves every 4."""
    config = PretrainConfig(
        model=tiny_model(vocab_size=0, hidden_dropout_rate=0.1, attention_dropout_rate=0.1),
        data=DataConfig(path=str(path), batch_size=16),
        masking=MaskingConfig(max_predictions=5),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=3),
        train=TrainConfig(num_steps=12),
        eval=EvalConfig(every_steps=6),
        checkpoint=CheckpointConfig(every_steps=4),
        report=ReportConfig(every_steps=1, tensorboard=False, progress=False),
    )
    return dataclasses.replace(config, **sections)


def make_pretrained(directory: Path, params_of=drawn_params, **changes) -> Path:
    """Returns a directory with an untrained model that knows every word of the toy language."""
    write_vocab(directory / "vocab.txt")
    tokenizer = load_tokenizer(directory / "vocab.txt")
    model = tiny_model(vocab_size=tokenizer.vocab_size, initializer_stddev=0.1, **changes)
    save_pretrained(Pretrained(model, params_of(model), tokenizer), directory / "pretrained")
    return directory / "pretrained"


@functools.lru_cache
def _initial(model: ModelConfig):
    """Returns the parameters that `init_params` draws."""
    return jax.device_get(init_params(model, jax.random.key(0)))


def make_learner(directory: Path, **changes) -> Path:
    """Returns what `make_pretrained` does, with parameters of which it is known how much tests' models learn."""
    return make_pretrained(directory, _initial, **changes)


def growing_bert(spare_rows: int = 0) -> Pretrained:
    """Returns a random model whose vocabulary splits "corona" and "banana" into pieces and has two unused places."""
    vocab = "[PAD] [unused0] [unused1] [UNK] [CLS] [SEP] [MASK] the . ban bas dar co ba ##ro ##na ##n ##a ##rt di"
    tokenizer = wordpiece_tokenizer(vocab.split(), lowercase=True)
    config = tiny_model(vocab_size=tokenizer.vocab_size + spare_rows, max_positions=16, vocab_multiple=8)
    shapes = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)
    for padded in (params["encoder"]["embeddings"]["word"]["embedding"], params["mlm"]["output_bias"]):
        padded[config.vocab_size :] = 0
    return Pretrained(config, params, tokenizer)


def write_topics(path: Path, num_rows: int, seed: int, labels: bool = True) -> None:
    """Writes a table of sentences of the toy language, each about one of three topics, which is its label."""
    rng = random.Random(seed)
    lines = ["sentence\tlabel"] if labels else ["sentence"]
    for _ in range(num_rows):
        topic = rng.choice("bdf")
        words = [f"{topic}{rng.choice('aeiou')}{rng.choice('nrst')}" for _ in range(rng.randint(3, 8))]
        others = [f"{rng.choice('glmp')}{rng.choice('aeiou')}{rng.choice('nrst')}" for _ in range(rng.randint(0, 3))]
        text = " ".join(rng.sample(words + others, len(words) + len(others)))
        lines.append(f"{text}\t{topic}" if labels else text)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_topics(directory: Path, num_train: int = 160, num_dev: int = 60) -> Path:
    """Returns a directory with the three parts of a classification task."""
    directory.mkdir(parents=True, exist_ok=True)
    write_topics(directory / "train.tsv", num_train, seed=0)
    write_topics(directory / "dev.tsv", num_dev, seed=1)
    write_topics(directory / "test.tsv", 20, seed=2, labels=False)
    return directory


def topics_run(source: Path, checkpoint: Path | str, **sections) -> FinetuneConfig:
    """Returns a short fine-tuning run on `make_topics`."""
    config = FinetuneConfig(
        task=TaskConfig(name="classification", max_seq_length=16),
        model=FinetuneModelConfig(hidden_dropout_rate=0.1, attention_dropout_rate=0.0),
        data=FinetuneDataConfig(source=str(source), batch_size=16),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=0, warmup_rate=0.1, bias_correction=True),
        train=FinetuneTrainConfig(num_epochs=3.0),
        mesh=MeshConfig(data=1),
        report=ReportConfig(every_steps=1, tensorboard=False, progress=False),
        init_checkpoint=str(checkpoint),
    )
    return dataclasses.replace(config, **sections)


def first_batches(rows, head, data, count, devices=2, pack="on", first=0):
    """Returns how batches of a task's rows are made on some devices, and some of them, as arrays of NumPy."""
    batching = choose_batching(rows, data, ModelConfig(), devices, pack, 100, True)
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    batches = train_batches(rows, head, first, batching, mesh)
    return batching, [jax.device_get(next(batches)) for _ in range(count)]


def tokens_at(batch: Batch, place: int) -> list[int]:
    """Returns the tokens of the sequence at a place among those of all rows of a batch."""
    row, index = divmod(int(place), batch.cls_positions.shape[1])
    return batch.token_ids[row][batch.sequence_ids[row] == index + 1].tolist()


def tokens_of(row) -> list[list[int]]:
    """Returns the tokens of each sequence of a task's row."""
    return [part.tolist() for part in np.split(row.token_ids, np.cumsum(row.lengths)[:-1])]


def computed(function, *arguments):
    """Returns what a function gives, compiled as one program, in arrays of NumPy."""
    return jax.device_get(jax.jit(function)(*arguments))


def write(path: Path, content: str | bytes) -> str:
    """Writes a file, and its directory if that is missing; returns its path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def change_json(path: Path, /, **values: object) -> None:
    """Sets keys of the object in a JSON file, which may be missing; ... removes one."""
    found = (json.loads(path.read_text()) if path.exists() else {}) | values
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not ...}))


def assert_same(ours, theirs) -> None:
    """Two trees have the same arrays, number by number."""
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def message(function, *arguments, **options) -> str:
    """Returns the message of the error that a call ends with: one line."""
    with pytest.raises(InputError) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)
