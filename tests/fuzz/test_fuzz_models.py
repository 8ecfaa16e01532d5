# SPDX-License-Identifier: Apache-2.0
"""Damaged models of all formats: read, or refused in one line."""

import json
from functools import cache
from pathlib import Path
from unittest import mock

import jax
import numpy as np
from builders import change_json, tiny_model
from fuzzing import Reader, make_tests
from google_files import save_tf1
from hf_models import make_tokenizer, random_params
from read_models import load_hf, load_hf_tokenizer, load_tf1
from safetensors.numpy import load_file, save_file

from bert_jax.checkpoints.arrays import describe, save_tree
from bert_jax.checkpoints.hf import save_hf
from bert_jax.checkpoints.multi_vector import write_multi_vector
from bert_jax.checkpoints.pretrained import Pretrained, save_pretrained
from bert_jax.checkpoints.sealed import SEAL, seal
from bert_jax.checkpoints.sentence_transformers import write_pipeline
from bert_jax.checkpoints.sparse_encoder import write_sparse
from bert_jax.inference.pretrained import load_pretrained
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.storage import files
from bert_jax.storage.writing import write_json

LABELS = ("no", "yes", "maybe")


@cache
def model(task: str = "pretraining"):
    """Returns what the functions that save a model take."""
    config = tiny_model(vocab_size=96, num_layers=1, hidden_size=16, intermediate_size=32, max_positions=32)
    parts = {"pretraining": ("pooler", "mlm", "next_sentence"), "sequence_classification": ("pooler", "classifier")}
    params = random_params(config, parts=parts[task])
    return config, params, make_tokenizer(96), task, LABELS if task == "sequence_classification" else ()


def make_hf(directory: Path) -> None:
    save_hf(directory / "model", *model("sequence_classification"))


def make_shards(directory: Path) -> None:
    save_hf(directory / "model", *model(), max_shard_bytes=20_000)


def make_hf_backend(directory: Path) -> None:
    make_hf(directory)
    (directory / "model" / "vocab.txt").unlink()
    write_json(directory / "model" / "added_tokens.json", {"[PAD]": 0})


def make_own(directory: Path) -> None:
    bert = Pretrained(*model("sequence_classification"), task_settings={"name": "sst2"})
    save_pretrained(bert, directory / "model")


def make_modules(directory: Path) -> None:
    config, params, *rest = model()
    layer = {"kernel": np.ones((config.hidden_size, 8), np.float32), "bias": np.ones(8, np.float32)}
    settings = TaskConfig(name="embeddings", embedding=EmbeddingConfig(projection_size=8, query_prompt="a "))
    more = lambda there: write_pipeline(there, settings, params | {"projection": layer})  # noqa: E731
    save_hf(directory / "model", config, params, *rest, write_more=more)


def make_modules_of_tokens(directory: Path) -> None:
    config, params, *rest = model()
    layer = {"kernel": np.ones((config.hidden_size, 8), np.float32)}
    settings = TaskConfig(name="embeddings", embedding=EmbeddingConfig("multi_vector", projection_size=8))
    more = lambda there: write_multi_vector(there, settings, params | {"projection": layer})  # noqa: E731
    save_hf(directory / "model", config, params, *rest, write_more=more)


def make_modules_of_words(directory: Path) -> None:
    config, params, *rest = model()
    table = {"query_table": {"weight": np.ones(config.vocab_size, np.float32)}}
    settings = TaskConfig(name="embeddings", embedding=EmbeddingConfig("sparse", query_table=True))
    more = lambda there: write_sparse(there, settings, table, config.vocab_size)  # noqa: E731
    save_hf(directory / "model", config, params, *rest, write_more=more)
    (folder,) = (directory / "model").glob("query_*")
    write_json(folder / "config.json", {"frozen": True, "path": "idf.json"})
    write_json(folder / "idf.json", dict.fromkeys(rest[0].vocab, 1.0))


def make_colbert(directory: Path) -> None:
    config, params, *rest = model()
    save_hf(directory / "model", config, {"encoder": params["encoder"]}, *rest)
    tensors = {f"bert.{name}": each for name, each in load_file(directory / "model" / "model.safetensors").items()}
    tensors["linear.weight"] = np.ones((8, config.hidden_size), np.float32)
    save_file(tensors, directory / "model" / "model.safetensors")
    change_json(directory / "model" / "config.json", architectures=["HF_ColBERT"])
    about = {"dim": 8, "query_token_id": "word1", "doc_token_id": "word2", "doc_maxlen": 20, "similarity": "cosine"}
    write_json(directory / "model" / "artifact.metadata", about | {"mask_punctuation": True, "pool_factor": 1})


def use_sealed_anew(path: Path) -> None:
    """Reads a model whose files were changed before their checksums were taken."""
    sealed = (path / "model" / SEAL).read_bytes()
    try:
        seal(path / "model", {"arrays": json.loads(sealed)["arrays"]})
        load_pretrained(path / "model")
    finally:
        (path / "model" / SEAL).write_bytes(sealed)


def make_workdir(directory: Path) -> None:
    config, params, tokenizer, *_ = model()
    run = directory / "run"
    checkpoint = run / "checkpoints" / "00000004"
    state = {"params": params, "step": jax.numpy.zeros((), "int32")}
    save_tree(checkpoint / "state", state)
    seal(
        checkpoint,
        {"step": 4, "metric": None, "arrays": describe(state), "notes": {"unreported": {"loss": [1.5, 2.0]}}},
    )
    exported = make_pretrained_config(directory)
    write_json(run / "config.json", {"format": 1, "model": exported["model"]})
    tokenizer.save(run / "tokenizer")


def make_pretrained_config(directory: Path) -> dict:
    save_pretrained(Pretrained(*model()), directory / "exported")
    return json.loads((directory / "exported" / "config.json").read_text())


def make_tf1(directory: Path) -> None:
    save_tf1(directory / "model", *model("sequence_classification"))


def load_unchecked(path: Path) -> None:
    """Reads a checkpoint of Google's as if every checksum were right."""
    with mock.patch.object(files, "masked_crc32c", lambda data: mock.ANY):  # which equals everything
        load_tf1(path)


READERS = [
    Reader("hf-config", make_hf, lambda path: load_hf(path / "model"), ("model/config.json",), 600),
    Reader(
        "sentence-transformers",
        make_modules,
        lambda path: load_hf(path / "model"),
        ("model/modules.json", "model/*sentence*.json", "model/[12]_*/*"),
        200,
    ),
    Reader(
        "multi-vector",
        make_modules_of_tokens,
        lambda path: load_hf(path / "model"),
        ("model/modules.json", "model/*sentence*.json", "model/[123]_*/*"),
        200,
    ),
    Reader(
        "colbert", make_colbert, lambda path: load_hf(path / "model"), ("model/*.metadata", "model/config.json"), 200
    ),
    Reader(
        "sparse-encoder",
        make_modules_of_words,
        lambda path: load_hf(path / "model"),
        ("model/modules.json", "model/router_config.json", "model/*sentence*.json", "model/*_S*/*"),
        200,
    ),
    Reader("hf-tensors", make_hf, lambda path: load_hf(path / "model"), ("model/*.safetensors",), 400),
    Reader(
        "hf-shards",
        make_shards,
        lambda path: load_hf(path / "model"),
        ("model/*index.json", "model/*.safetensors"),
        200,
    ),
    Reader(
        "hf-tokenizer",
        make_hf,
        lambda path: load_hf_tokenizer(path / "model"),
        ("model/vocab.txt", "model/tokenizer*.json"),
        250,
    ),
    Reader(
        "tokenizer.json",
        make_hf_backend,
        lambda path: load_hf_tokenizer(path / "model"),
        ("model/*token*.json",),
        400,
    ),
    Reader("tf1", make_tf1, lambda path: load_tf1(path / "model"), ("model/*",), 400),
    Reader("tf1-unchecked", make_tf1, lambda path: load_unchecked(path / "model"), ("model/*.index",), 300),
    Reader("own", make_own, lambda path: load_pretrained(path / "model"), ("model/*.json", "model/tokenizer/*"), 200),
    Reader("own-anew", make_own, use_sealed_anew, ("model/config.json", "model/tokenizer/*"), 150),
    Reader(
        "workdir",
        make_workdir,
        lambda path: load_pretrained(path / "run"),
        ("run/*.json", "run/tokenizer/*", "run/checkpoints/*/*.json"),
        250,
    ),
]

test_some_damage, test_much_damage = make_tests(READERS)
