# SPDX-License-Identifier: Apache-2.0
"""Google's checkpoints: read, computed with as Google's code does, written, and read back the same.

`tests/reference/make_bundle_golden.py` made the golden numbers with Google's code on TensorFlow.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from builders import assert_same, change_json, message, tiny_model, write_vocab
from google_files import save_tf1, write_bundle
from hf_models import random_params
from read_models import load_tf1

from bert_jax.batch import Batch
from bert_jax.checkpoints.arrays import describe
from bert_jax.checkpoints.bundle import Bundle, data_path, index_path, read_index
from bert_jax.checkpoints.names import TABLE, to_params
from bert_jax.checkpoints.tf1 import find_checkpoint
from bert_jax.inference.pretrained import load_pretrained
from bert_jax.model.heads.pretraining import PRETRAINING
from bert_jax.model.objective import encode, forward
from bert_jax.storage.folder import open_folder
from bert_jax.tokenizing import load_tokenizer

# What optimizers save of each variable, and besides.
OPTIMIZER_SLOTS = ("adam_m", "adam_v", "lamb_m", "lamb_v", "Adam", "Adam_1")
OPTIMIZER_STATE = ("global_step", "beta1_power", "beta2_power", "current_loss_scale", "good_steps")
MODEL = tiny_model(unroll=0, vocab_size=167)  # as many words as `write_vocab` writes


@pytest.fixture(scope="module")
def google(shared_data) -> Path:
    """Returns a small checkpoint that run_pretraining.py wrote."""
    return shared_data / "tf1_checkpoint_tiny"


@pytest.fixture(scope="module")
def chinese(shared_data) -> Path:
    """Returns the index, and no more, of a base model that Google released."""
    return shared_data / "tf1_checkpoint_index_chinese"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    write_vocab(path)
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def params():
    """Returns random parameters of the encoder and every head, on the host."""
    return random_params(MODEL, 3)


@pytest.fixture
def saved(tmp_path, params, tokenizer) -> Path:
    """Returns a directory with the parts of pre-training, as Google releases them."""
    parts = {name: params[name] for name in ("encoder", "mlm", "next_sentence")}
    save_tf1(tmp_path / "saved", MODEL, parts, tokenizer)
    return tmp_path / "saved"


def assert_identical(ours, theirs) -> None:
    assert describe(ours) == describe(theirs)
    assert_same(ours, theirs)


def refusal(path: Path) -> str:
    """Returns the message with which loading fails."""
    return message(load_tf1, path)


# A checkpoint of Google's


def test_googles_checkpoint_is_read_whole(google):
    """The numbers of all its tensors are in those that the next test computes."""
    loaded = load_tf1(google)
    config = loaded.config
    assert loaded.task == "pretraining" and loaded.labels == () and loaded.tokenizer.vocab_size == 15
    assert (config.hidden_size, config.num_layers, config.num_heads, config.intermediate_size) == (4, 2, 4, 16)
    assert (config.max_positions, config.type_vocab_size) == (16, 2)
    assert config.activation == "gelu_tanh" and config.layer_norm_epsilon == 1e-12
    words = loaded.params["encoder"]["embeddings"]["word"]["embedding"]
    assert len(words) == config.padded_vocab_size and not words[15:].any()


def test_googles_checkpoint_computes_what_googles_code_computes(google, repository):
    loaded = load_tf1(google)
    with np.load(repository / "tests" / "golden" / "google_tiny_checkpoint.npz") as file:
        golden = {name: file[name] for name in file.files}
    batch = Batch(
        token_ids=golden["inputs/input_ids"],
        type_ids=golden["inputs/segment_ids"],
        sequence_ids=golden["inputs/input_mask"],
        cls_positions=np.zeros((3, 1), np.int32),
        sequence_weights=np.ones((3, 1), np.float32),
        mlm_positions=golden["inputs/masked_lm_positions"],
    )

    @jax.jit
    def both(params):
        output = forward(loaded.config, params, batch, PRETRAINING)
        shares = jax.nn.log_softmax(output.mlm_logits[..., :15]), jax.nn.log_softmax(output.next_sentence_logits[:, 0])
        return encode(loaded.config, params, batch, layers=True).layers, output.encoded.pooled[:, 0], *shares

    layers, pooled, words, sentences = jax.device_get(both(loaded.params))
    there = golden["inputs/input_mask"] > 0
    for ours, theirs in zip(layers, [golden["embedding_output"], *golden["all_encoder_layers"]], strict=True):
        np.testing.assert_allclose(ours[there], theirs[there], atol=2e-6)
    np.testing.assert_allclose(pooled, golden["pooled_output"], atol=2e-6)
    np.testing.assert_allclose(words.reshape(-1, 15), golden["masked_lm_log_probs"], atol=2e-6)
    np.testing.assert_allclose(sentences, golden["next_sentence_log_probs"], atol=2e-6)


def test_every_name_of_a_released_model_is_one_of_ours(chinese):
    """As many names, no more and no less; and `to_params` finds every shape to be the configuration's."""
    shapes = {name: entry.shape for name, entry in read_index(chinese / "bert_model.ckpt.index").entries.items()}
    tasks = ("classifier/", "span/")
    rows = [row for row in TABLE if not row.ours.startswith(tasks)]
    ours = {row.name("tf1", layer) for row in rows for layer in range(12)}
    assert shapes.keys() == ours and len(ours) == 206
    settings = json.loads((chinese / "bert_config.json").read_text())
    config = dataclasses.replace(
        MODEL, vocab_size=settings["vocab_size"], hidden_size=768, num_layers=12, num_heads=12,
        intermediate_size=3072, max_positions=512,
    )  # fmt: skip
    read: list[str] = []

    def stop_at_the_last(name: str) -> np.ndarray:
        read.append(name)
        return np.zeros((1,) * len(shapes[name]), np.float32)  # broadcast, so that nothing large is made

    to_params(stop_at_the_last, shapes, "tf1", config, "x")
    assert sorted(read) == sorted(shapes)


# What earlier versions wrote


def test_import_of_an_export_is_the_identity(tmp_path, params, tokenizer):
    task, labels = "token_classification", ("O", "B-ÖRT", "I")
    config = dataclasses.replace(MODEL, hidden_dropout_rate=0.2, activation="gelu_exact", layer_norm_epsilon=1e-7)
    encoder = {name: part for name, part in params["encoder"].items() if name != "pooler"}
    parts = {"encoder": encoder, "classifier": params["classifier"]}
    save_tf1(tmp_path / "x", config, parts, tokenizer, task, labels)
    loaded = load_tf1(tmp_path / "x")
    assert (loaded.config, loaded.task, loaded.labels, loaded.notes) == (config, task, labels, ())
    assert loaded.tokenizer.fingerprint == tokenizer.fingerprint
    assert_identical(loaded.params, parts)


# Heads of fine-tuning, under the names of run_classifier.py and run_squad.py


@pytest.mark.parametrize(
    ("prefix", "head", "task"),
    [("", "classifier", "sequence_classification"), ("cls/squad/", "span", "question_answering")],
)
def test_fine_tuned_heads_come_in(saved, params, prefix, head, task):
    """In place of those of pre-training, and with what the optimizer saves."""
    opened = Bundle(saved / "bert_model.ckpt")
    tensors = {name: opened.read(name) for name in opened.entries if not name.startswith("cls/")}
    weights, bias = np.arange(64, dtype=np.float32).reshape(2, 32), np.ones(2, np.float32)
    new = {f"{prefix}output_weights": weights, f"{prefix}output_bias": bias}
    slots = {f"{name}/{slot}": value for name, value in new.items() for slot in OPTIMIZER_SLOTS}
    state = dict.fromkeys(OPTIMIZER_STATE, np.array(345))
    write_bundle(saved / "bert_model.ckpt", tensors | new | slots | state)
    loaded = load_tf1(saved)
    assert loaded.task == task
    assert_identical(loaded.params, {"encoder": params["encoder"], head: {"kernel": weights.T, "bias": bias}})


# Where the checkpoint is


def test_load_pretrained_takes_all_of_these(saved, params, monkeypatch):
    prefix = saved / "bert_model.ckpt"
    monkeypatch.chdir(saved)
    for path in (".", saved, prefix, str(prefix), "bert_model.ckpt", index_path(prefix), data_path(prefix)):
        loaded = load_pretrained(path)
        assert (loaded.config, loaded.task) == (MODEL, "pretraining") and len(loaded.notes) == 1
    assert_identical(loaded.params, {name: params[name] for name in ("encoder", "mlm", "next_sentence")})


def test_of_several_checkpoints_the_one_that_is_named(saved):
    prefix, steps = saved / "bert_model.ckpt", [saved / "model.ckpt-20", saved / "model.ckpt-100"]
    for step in steps:
        for path in (index_path, data_path):
            shutil.copy(path(prefix), path(step))
    for path in (index_path, data_path):
        path(prefix).unlink()
    state = saved / "checkpoint"
    assert "checkpoint names 'bert_model.ckpt', which is not there; give one of" in refusal(saved)
    state.write_text('model_checkpoint_path: "/elsewhere/model.ckpt-20"\nall_model_checkpoint_paths: "x"\n')
    assert find_checkpoint(open_folder(saved)) == steps[0].name
    state.write_text("model_checkpoint_path:\n")
    assert "names '', which is not there" in refusal(saved)
    state.unlink()
    told = refusal(saved)
    assert "has 2 checkpoints; give one of" in told and all(str(step) in told for step in steps)
    assert load_tf1(steps[1]).config == MODEL


# Casing


@pytest.mark.parametrize(
    ("name", "lowercase", "words"),
    [
        ("uncased_L-2_H-32_A-4", True, "as uncased_L-2_H-32_A-4 says by its name"),
        ("cased_L-2_H-32_A-4", False, "text is not lower-cased, as cased_L-2"),
        ("multilingual_L-2_H-32_A-4", True, "by its name"),
        ("chinese_model", True, "text is lower-cased, to judge by the capitals of its vocabulary"),
    ],
)
def test_casing_by_googles_names_of_directories(saved, tmp_path, name, lowercase, words):
    (saved / "tokenizer_config.json").unlink()
    saved.rename(tmp_path / name)
    loaded = load_tf1(tmp_path / name)
    assert loaded.tokenizer.lowercase == loaded.tokenizer.strip_accents == lowercase
    assert any(words in note for note in loaded.notes)


def test_casing_by_the_options_and_by_capitals(saved, tmp_path):
    change_json(saved / "tokenizer_config.json", do_lower_case=False, strip_accents=False)
    uncased = saved.rename(tmp_path / "uncased_L-2")
    assert not load_tf1(uncased).tokenizer.lowercase
    (uncased / "tokenizer_config.json").unlink()
    uncased.rename(saved)
    (saved / "vocab.txt").write_text((saved / "vocab.txt").read_text().replace("the\n", "The\n"))
    assert not load_tf1(saved).tokenizer.lowercase


# The configuration


def test_gelu_is_tanh_unless_it_is_said_to_be_erf(saved):
    loaded = load_tf1(saved)
    assert loaded.config.activation == "gelu_tanh" and any("older code, which has erf" in note for note in loaded.notes)
    change_json(saved / "bert_config.json", bert_jax={"activation": "gelu_exact"})
    exact = load_tf1(saved)
    assert exact.config.activation == "gelu_exact" and not any("erf" in note for note in exact.notes)


def test_settings_that_are_not_given_are_googles_defaults(saved):
    given = json.loads((saved / "bert_config.json").read_text())
    names = ("hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range", "directionality")
    change_json(saved / "bert_config.json", **dict.fromkeys(names, ...), pooler_type="first_token_transform", extra=1)
    loaded = load_tf1(saved)
    assert loaded.config == dataclasses.replace(MODEL, hidden_dropout_rate=0.1, attention_dropout_rate=0.1)
    assert [note for note in loaded.notes if "extra" in note] == [
        "bert_config.json: extra is nothing that Google's BERT reads, and is not used"
    ]
    change_json(saved / "bert_config.json", **given | {"type_vocab_size": ...})
    assert "token_type_embeddings has shape (2, 32)" in refusal(saved)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_act": "relu"}, 'hidden_act is "relu"'),
        ({"vocab_size": 1999}, "167 tokens and the table of words 1999 rows"),
        ({"num_hidden_layers": 3}, "lacks 16 tensors of this model: bert/encoder/layer_2/"),
        ({"intermediate_size": 65}, "the configuration beside it"),
        ({"bert_jax": {"labels": "ab"}}, "labels are 2"),
        ({"bert_jax": {"labels": ["a"]}}, "and the classifier has"),
    ],
)
def test_configurations_that_do_not_fit(saved, changes, problem):
    change_json(saved / "bert_config.json", **changes)
    told = refusal(saved)
    assert problem in told and ("bert_config.json" in told or "bert_model.ckpt.index" in told)


# Damage


def test_missing_and_damaged_files_are_named(saved):
    data = data_path(saved / "bert_model.ckpt")
    content = data.read_bytes()
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    data.write_bytes(changed)
    assert "(tensor bert/encoder/layer_0/intermediate/dense/kernel has another checksum)" in refusal(saved)
    data.write_bytes(content)
    (saved / "vocab.txt").rename(saved / "vocab")
    assert "holds none of vocab.txt" in refusal(saved)
    (saved / "vocab").rename(saved / "vocab.txt")
    (saved / "bert_config.json").write_text("[]")
    assert "another kind of file" in refusal(saved)
    (saved / "bert_config.json").unlink()
    assert "bert_config.json does not exist" in refusal(saved)
