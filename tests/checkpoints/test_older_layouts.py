# SPDX-License-Identifier: Apache-2.0
"""Models whose files remote code wrote: what NumPy computes of them, straight from their tensors."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from builders import assert_same, random_batch
from older_layouts import (
    ALIBI,
    BASES,
    CONFIGS,
    CONFIGS_OF_ALIBI,
    HEADS,
    NAMES,
    WIDTH,
    WORDS,
    hidden_states,
    write_older,
)
from read_models import load_hf
from safetensors.numpy import load_file, save_file

from bert_jax.batch import pad_rows
from bert_jax.checkpoints.families import FAMILIES, of_today
from bert_jax.checkpoints.hf import save_hf
from bert_jax.devices.sharding import make_mesh, row_sharding, tree_shardings
from bert_jax.errors import InputError
from bert_jax.model.objective import encode
from bert_jax.settings.pretraining import MeshConfig

IDS = np.random.default_rng(0).integers(5, 131, 41)
PLAIN = 90.0 ** (-np.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS))


def assert_computes(loaded, family, tensors, frequencies=PLAIN):
    batch = pad_rows([np.concatenate([IDS, IDS[:7]])], 64)
    batch.sequence_ids[0, 41:48] = 2  # a packed row: positions begin again
    config = dataclasses.replace(loaded.config, unroll=1)
    found = np.asarray(jax.jit(encode, static_argnums=0)(config, loaded.params, batch).hidden)[0]
    np.testing.assert_allclose(found[:41], hidden_states(family, tensors, IDS, frequencies), atol=3e-5)
    np.testing.assert_allclose(found[41:48], hidden_states(family, tensors, IDS[:7], frequencies), atol=3e-5)


@pytest.mark.parametrize("family", list(NAMES))
def test_an_older_directory_is_read_computed_and_written_as_today(tmp_path, family):
    tensors = write_older(tmp_path / "older", family)
    loaded = load_hf(tmp_path / "older")
    assert (loaded.config.family, loaded.config.rotary_theta, loaded.config.layer_norm_epsilon) == (family, 90.0, 1e-6)
    said = {"nomic_bert": "computed as a NomicBert", "jina_embeddings_v3": "has no pooler"}.get(family)
    assert [said in note for note in loaded.notes] == [True] * bool(said)
    assert_computes(loaded, family, tensors)
    save_hf(tmp_path / "today", *loaded[:5])
    about = json.loads((tmp_path / "today" / "config.json").read_text())
    assert about["model_type"] == family and about["rope_parameters"] == {"rope_type": "default", "rope_theta": 90.0}
    again = load_hf(tmp_path / "today")
    assert again.config == loaded.config
    assert_same(again.params, loaded.params)


@pytest.mark.parametrize("family", list(NAMES))
def test_names_with_the_base_that_a_head_puts_before_them(tmp_path, family):
    write_older(tmp_path / "bare", family)
    write_older(tmp_path / "based", family, BASES[family])
    bare, based = load_hf(tmp_path / "bare"), load_hf(tmp_path / "based")
    assert_same(bare.params, based.params)


@pytest.mark.parametrize("kind", list(ALIBI))
def test_models_with_alibi_are_read_computed_and_written_as_jina_has_them(tmp_path, kind):
    tensors = write_older(tmp_path / "theirs", kind)
    loaded = load_hf(tmp_path / "theirs")
    form = ("plain", "original") if kind == "original" else ("gated", "geglu")
    config = loaded.config
    assert (config.family, config.score_bias, config.feed_forward) == ("jina_bert", "alibi", form[0])
    said = ["is not run: it is computed as a JinaBert"] * (kind != "original") + ["has no pooler"]
    assert all(part in note for part, note in zip(said, loaded.notes, strict=True))
    assert_computes(loaded, kind, tensors)
    notes = save_hf(tmp_path / "ours", *loaded[:5])
    assert "it needs trust_remote_code=True" in notes[-1] and "loads it as a bert" in notes[-1]
    about = json.loads((tmp_path / "ours" / "config.json").read_text())
    found = about["model_type"], about["position_embedding_type"], about["feed_forward_type"]
    assert found == ("bert", "alibi", form[1]) and about["architectures"][0] in about["auto_map"]["AutoModel"]
    again = load_hf(tmp_path / "ours")
    assert again.config == config
    assert_same(again.params, loaded.params)
    if kind != "mosaic":  # whose queries, keys and values jina has apart
        assert_same(load_file(tmp_path / "ours" / "model.safetensors"), tensors)


def test_the_masked_head_of_dnabert(tmp_path):
    """Names with their base; the output bias is the decoder's alone, whose table is that of the words."""
    rng = np.random.default_rng(3)
    tensors = write_older(tmp_path / "hf", "mosaic", "bert.", architectures=["BertForMaskedLM"])
    shapes = {"transform.dense.weight": (WIDTH, WIDTH), "decoder.bias": (WORDS,)}
    shapes |= {f"transform.{name}": (WIDTH,) for name in ("dense.bias", "LayerNorm.weight", "LayerNorm.bias")}
    head = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    named = {f"cls.predictions.{name}": array for name, array in head.items()}
    named["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]
    save_file(tensors | named, tmp_path / "hf" / "model.safetensors")
    loaded = load_hf(tmp_path / "hf")
    assert loaded.task == "masked_lm"
    mlm = loaded.params["mlm"]
    assert_same(mlm["output_bias"][:WORDS], head["decoder.bias"])
    assert_same(mlm["transform"]["kernel"], head["transform.dense.weight"].T)
    assert_same(mlm["norm"]["scale"], head["transform.LayerNorm.weight"])


@pytest.mark.parametrize("family", ["nomic_bert", "geglu", pytest.param("jina_embeddings_v3", marks=pytest.mark.slow)])
def test_eight_devices_compute_what_one_computes(tmp_path, family):
    write_older(tmp_path / "older", family)
    config, params = load_hf(tmp_path / "older")[:2]
    config = dataclasses.replace(config, unroll=1)
    batch = random_batch(num_rows=8, row_length=40, num_sequences=2, vocab_size=WORDS)
    hidden = lambda params, batch: encode(config, params, batch).hidden  # noqa: E731
    expected = jax.jit(hidden)(params, batch)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with jax.set_mesh(mesh):
        divided = jax.device_put(params, tree_shardings(mesh, params))
        found = jax.jit(hidden)(divided, jax.device_put(batch, row_sharding(mesh)))
    real = batch.sequence_ids > 0
    np.testing.assert_allclose(np.asarray(found)[real], np.asarray(expected)[real], atol=2e-5)


def test_angles_of_another_base_are_computed_and_written(tmp_path):
    tensors = write_older(tmp_path / "older", "gte", rope_scaling={"type": "ntk", "factor": 2.0})
    loaded = load_hf(tmp_path / "older")
    size = WIDTH // HEADS
    assert_computes(loaded, "gte", tensors, 180.0 ** (-np.arange(0, size, 2) / size) / 2 ** (2 / size))
    save_hf(tmp_path / "today", *loaded[:5])
    about = json.loads((tmp_path / "today" / "config.json").read_text())["rope_parameters"]
    assert about == {"rope_type": "linear", "factor": pytest.approx(2 ** (1 / 3)), "rope_theta": 180.0}
    assert load_hf(tmp_path / "today").config == loaded.config


def test_of_angles_that_depend_on_a_batch_as_many_tokens_as_have_the_plain_ones(tmp_path):
    write_older(tmp_path / "dynamic", "nomic_bert", rotary_scaling_factor=2.0)
    write_older(tmp_path / "plain", "nomic_bert")
    loaded, plain = load_hf(tmp_path / "dynamic"), load_hf(tmp_path / "plain").config
    assert loaded.notes[0].startswith("beyond 2048 tokens its angles would depend on the longest row")
    assert loaded.config == dataclasses.replace(plain, max_positions=2048) and plain.max_positions == 8192


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gte", {"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.5}}, 'the rope_type "ntk"'),
        ("gte", {"logn_attention_scale": True}, "logn_attention_scale is true, which this Gte cannot compute"),
        ("nomic_bert", {"activation_function": "gelu"}, "activation_function"),
        ("geglu", {"feed_forward_type": "reglu"}, 'feed_forward_type is "reglu", which this JinaBert cannot compute'),
        ("mosaic", {"position_embedding_type": "relative_key"}, 'position_embedding_type is "relative_key"'),
    ],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path, family, changes, message):
    write_older(tmp_path / "older", family, **changes)
    with pytest.raises(InputError, match=message) as error:
        load_hf(tmp_path / "older")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "tensor", "message"),
    [
        ("jina_embeddings_v3", "encoder.layers.0.mixer.Wqkv.parametrizations.weight.0.lora_A", "of an adapter .LoRA."),
        # jina-embeddings-v2-base-code: other code, and its settings do not say so.
        ("geglu", "encoder.layer.0.attention.self.layer_norm_q.weight", r"is a norm of queries \(qk-post-norm"),
    ],
)
def test_tensors_of_other_code_are_refused(tmp_path, family, tensor, message):
    tensors = write_older(tmp_path / "older", family)
    save_file(tensors | {tensor: np.ones(WIDTH, np.float32)}, tmp_path / "older" / "model.safetensors")
    with pytest.raises(InputError, match=message):
        load_hf(tmp_path / "older")


@pytest.mark.parametrize(
    "settings", [{"model_type": "bert", "n_embd": 3}, {"model_type": "xlm-roberta"}, {}, {"model_type": ["new"]}]
)
def test_settings_of_other_families_stay_as_they_are(settings):
    assert of_today(settings) is settings


def test_settings_of_older_code_are_those_of_today():
    mosaic = CONFIGS_OF_ALIBI["mosaic"]
    signs = "alibi_starting_size", "auto_map"  # either says it
    apart = [{name: value for name, value in mosaic.items() if name != sign} for sign in signs]
    for config in (*CONFIGS_OF_ALIBI.values(), *apart):
        assert of_today(config)["model_type"] == "jina_bert" and of_today(config)["architectures"] == ["JinaBertModel"]
    for family, config in CONFIGS.items():
        today = of_today(config)
        assert today["model_type"] == family and today["architectures"] == [f"{FAMILIES[family].prefix}Model"]
        assert of_today(today) == today and today["rope_theta"] == 90.0
        unsaid = {name: value for name, value in config.items() if name not in ("rope_theta", "rotary_emb_base")}
        assert of_today(unsaid)["rope_theta"] == 10_000.0  # the default of each code
