# SPDX-License-Identifier: Apache-2.0
"""What is not a model, or more than one, in a directory of Hugging Face's: named for what it is."""

import json

import pytest
from builders import change_json, message, tiny_model
from hf_models import make_tokenizer, random_params
from safetensors.numpy import load_file, save_file

from bert_jax import load_pretrained
from bert_jax.checkpoints.hf import save_hf
from bert_jax.checkpoints.hf_extras import find_prefix


@pytest.fixture
def model(tmp_path):
    """Returns a directory of an encoder."""
    save_hf(tmp_path / "model", tiny_model(), random_params(parts=("pooler",)), make_tokenizer(203), "encoder", ())
    return tmp_path / "model"


PACKAGE = "sentence_transformers.models."


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def test_an_adapter_is_no_model(model):
    write(model / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "org/base"})
    (note,) = load_pretrained(model).notes
    assert "adapter_config.json: an adapter of PEFT lies beside the model, and is not applied" in note
    (model / "model.safetensors").rename(model / "adapter_model.safetensors")
    for kept in (True, False):
        if not kept:
            (model / "config.json").unlink()
        assert "adapter of" in message(load_pretrained, model)
    (model / "adapter_model.safetensors").rename(model / "adapter_model.bin")
    assert "adapter of" in message(load_pretrained, model)


@pytest.mark.parametrize(
    "name", ["model.fp16.safetensors", "pytorch_model.fp16.bin", "model.fp16-00001-of-2.safetensors"]
)
def test_a_variant_is_named(model, name):
    (model / "model.safetensors").rename(model / name)
    assert "and no model.safetensors; rename it" in message(load_pretrained, model)


def test_a_model_beside_its_variant_is_loaded(model):
    (model / "model.fp16.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    assert load_pretrained(model).notes == ()


def test_a_prefix_is_that_of_every_name():
    known = lambda names: "words" in list(names)  # noqa: E731
    for prefix in ("", "module.model.", "0.auto_model."):
        assert find_prefix([f"{prefix}words", f"{prefix}b"], known) == prefix
    assert find_prefix(["module.words", "b"], known) == find_prefix([], known) == ""


def test_a_model_that_peft_changed_is_named(model):
    tensors = load_file(model / "model.safetensors")
    save_file({f"base_model.model.{name}": array for name, array in tensors.items()}, model / "model.safetensors")
    assert "base_model.model." in message(load_pretrained, model)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["model_head.pkl"], "model_head.pkl: a classifier of SetFit lies beside the model, and is not read"),
        (["sparse_linear.pt", "colbert_linear.pt"], "colbert_linear.pt and sparse_linear.pt, as BGE-M3 has them"),
        (["idf.json"], "idf.json: weights of words in queries, as OpenSearch's models have them, are not read"),
    ],
)
def test_heads_beside_the_model_are_said(model, names, said):
    for name in names:
        (model / name).write_bytes(b"")
    (note,) = load_pretrained(model).notes
    assert said in note


def test_code_of_a_model_of_vectors_is_said(model):
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    write(model / "modules.json", [{"path": path, "type": PACKAGE + kind} for path, kind in kinds.items()])
    write(model / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    change_json(model / "config.json", auto_map={"AutoModel": "x.Y"})
    loaded = load_pretrained(model)
    assert loaded.task == "sentence_embedding" and "(auto_map), which is not run" in loaded.notes[0]


def test_the_model_in_a_folder_of_sentence_transformers(model, tmp_path):
    write(tmp_path / "st" / "modules.json", [{"path": "0_Transformer", "type": PACKAGE + "Transformer"}])
    inner = model.rename(tmp_path / "st" / "0_Transformer")
    told = message(load_pretrained, inner.parent)
    assert f"is of sentence-transformers, with the model in a folder; give {inner}" in told
    assert "has the modules Transformer, in this order, which cannot be computed here" in message(
        load_pretrained, inner
    )
