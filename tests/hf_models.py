# SPDX-License-Identifier: Apache-2.0
"""Directories of Hugging Face's for tests: those of the golden models, and small ones made from a seed."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from builders import tiny_model
from safetensors.numpy import save_file

from bert_jax.batch import Batch
from bert_jax.checkpoints.hf import save_hf
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.model.objective import Params
from bert_jax.model.shapes import abstract_params
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.rules import to_dict
from bert_jax.text.tokenizer import Tokenizer, wordpiece_tokenizer

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_tokenizer(vocab_size: int, lowercase: bool = True, pad_id: int = 0) -> Tokenizer:
    """Returns a tokenizer of letters, `##` letters and made-up words."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocab = [*SPECIALS[1 : pad_id + 1], SPECIALS[0], *SPECIALS[pad_id + 1 :]]
    vocab += [*letters, *(f"##{letter}" for letter in letters)]
    vocab += [f"word{index}" for index in range(max(0, vocab_size - len(vocab)))]
    return wordpiece_tokenizer(vocab[:vocab_size], lowercase)


def random_params(config=None, num_classes: int = 3, seed: int = 0, parts: tuple[str, ...] | None = None) -> Params:
    """Returns random parameters, biases too, of the encoder and the named parts; of all of them if none are named."""
    config = config or tiny_model()
    rng = np.random.default_rng(seed)
    shapes = abstract_params(config, num_classes)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.2, leaf.shape).astype(np.float32), shapes)
    params["encoder"]["embeddings"]["word"]["embedding"][config.vocab_size :] = 0
    mlm = params["mlm"]
    (mlm["words"]["embedding"] if "words" in mlm else mlm["output_bias"])[config.vocab_size :] = 0
    if parts is not None:
        if "pooler" not in parts:
            params["encoder"].pop("pooler", None)
        params = {name: value for name, value in params.items() if name == "encoder" or name in parts}
    return params


def unpack(golden: np.lib.npyio.NpzFile, name: str) -> dict[str, np.ndarray]:
    """Returns the arrays that make_hf_goldens.py packed."""
    shapes = json.loads(str(golden[f"{name}_shapes"]))
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes.values()])
    parts = np.split(golden[name], ends[:-1])
    return {key: part.reshape(shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)}


def write_golden(directory: Path, golden: np.lib.npyio.NpzFile, name: str) -> Path:
    """Writes a golden model as transformers would, with a vocabulary."""
    directory.mkdir(parents=True)
    config = json.loads(str(golden[f"{name}/config"]))
    (directory / "config.json").write_text(json.dumps(config))
    save_file(unpack(golden, f"{name}/state"), directory / "model.safetensors", metadata={"format": "pt"})
    make_tokenizer(config["vocab_size"]).save(directory)
    return directory


def golden_batch(golden: np.lib.npyio.NpzFile) -> Batch:
    """Returns the inputs of the golden models; every token is predicted, and those with a label have a weight."""
    inputs = {key: golden[f"inputs/{key}"] for key in ("input_ids", "attention_mask", "types", "labels")}
    rows, length = inputs["input_ids"].shape
    labels = inputs["labels"]
    return Batch(
        token_ids=inputs["input_ids"].astype(np.int32),
        type_ids=inputs["types"].astype(np.int32),
        sequence_ids=inputs["attention_mask"].astype(np.int32),
        cls_positions=np.zeros((rows, 1), np.int32),
        sequence_weights=np.ones((rows, 1), np.float32),
        next_sentence_labels=golden["inputs/next_sentence_label"].astype(np.int32)[:, None],
        mlm_positions=np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)),
        mlm_labels=np.maximum(labels, 0).astype(np.int32),
        mlm_weights=(labels >= 0).astype(np.float32),
    )


def vectors_of(task: str, embedding: EmbeddingConfig, **heads) -> Pretrained:
    """Returns a model of vectors of texts or tokens with random parameters, beside those of its own heads."""
    params = random_params(parts=("mlm",) if task == "sparse_embedding" else ()) | heads
    settings = to_dict(TaskConfig(name="embeddings", max_seq_length=20, embedding=embedding))
    return Pretrained(tiny_model(), params, make_tokenizer(203), task, task_settings=settings)


def save_vectors(directory: Path, bert: Pretrained, write_modules: Callable, *more) -> Path:
    """Writes such a model as transformers has it, with the modules of a library around it."""
    shared = {name: bert.params[name] for name in ("encoder", "mlm") if name in bert.params}
    model = bert.config, shared, bert.tokenizer, bert.task, ()
    save_hf(directory, *model, write_more=lambda there: write_modules(there, bert.embedding, bert.params, *more))
    return directory
