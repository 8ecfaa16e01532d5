# SPDX-License-Identifier: Apache-2.0
"""Directories of sentence-transformers: what is read and written around a model, and what is refused by name."""

import dataclasses
import json

import numpy as np
import pytest
from builders import tiny_model
from hf_models import make_tokenizer, random_params
from safetensors.numpy import save_file

from bert_jax import InputError, load_pretrained, save_pretrained, sentence_embeddings
from bert_jax.checkpoints.hf import save_hf
from bert_jax.checkpoints.hf_extras import MODULES
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.checkpoints.sentence_transformers import write_pipeline
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.rules import to_dict

MODEL = tiny_model()
OLD = "sentence_transformers.models."
NEW = {
    "Transformer": "sentence_transformers.base.modules.transformer.",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.",
    "Dense": "sentence_transformers.base.modules.dense.",
    "Normalize": "sentence_transformers.base.modules.normalize.",
}


def make(**settings):
    """Returns a model of embeddings with random parameters."""
    embedding = EmbeddingConfig(**settings)
    rng = np.random.default_rng(0)
    params = random_params(parts=())
    if size := embedding.projection_size:
        kernel, bias = rng.normal(size=(MODEL.hidden_size, size)), rng.normal(size=size)
        params["projection"] = {"kernel": kernel.astype(np.float32), "bias": bias.astype(np.float32)}
    task = TaskConfig(name="embeddings", max_seq_length=20, embedding=embedding)
    return Pretrained(MODEL, params, make_tokenizer(203), "sentence_embedding", task_settings=to_dict(task))


def write(bert, directory):
    params = {"encoder": bert.params["encoder"]}
    save_hf(
        *(directory, bert.config, params, bert.tokenizer, bert.task, ()),
        write_more=lambda there: write_pipeline(there, bert.embedding, bert.params),
    )
    return directory


@pytest.fixture
def directory(tmp_path):
    return write(make(projection_size=8, query_prompt="ba: "), tmp_path / "st")


def change(path, **values):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | values))


TEXTS = ["".join(chr(97 + (number * place) % 26) for place in range(9)) for number in range(1, 6)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pooling": "cls", "normalize": False},
        {"pooling": "last", "projection_size": 8, "projection_activation": "none", "passage_prompt": "a "},
        {"projection_size": 8, "query_prompt": "ba: "},
    ],
)
def test_what_is_written_is_read_back(tmp_path, settings):
    bert = make(**settings)
    found = load_pretrained(write(bert, tmp_path / "st"))
    assert (found.task, found.embedding) == (bert.task, bert.embedding)
    save_pretrained(found, tmp_path / "own")
    for kind in ("", "query", "passage"):
        expected = sentence_embeddings(bert, TEXTS, kind=kind)
        assert expected.shape == (5, settings.get("projection_size", 32))
        for again in (found, load_pretrained(tmp_path / "own")):
            np.testing.assert_allclose(sentence_embeddings(again, TEXTS, kind=kind), expected, atol=1e-6)


def test_both_spellings_of_types_and_options(directory):
    before = load_pretrained(directory)
    modules = json.loads((directory / MODULES).read_text())
    assert [each["type"] for each in modules] == [
        OLD + kind for kind in ("Transformer", "Pooling", "Dense", "Normalize")
    ]
    for each in modules:
        kind = each["type"].removeprefix(OLD)
        each["type"] = NEW[kind] + kind
    (directory / MODULES).write_text(json.dumps(modules))
    (directory / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 32, "pooling_mode": "mean"}')
    change(directory / "sentence_bert_config.json", max_seq_length=None)
    change(directory / "tokenizer_config.json", model_max_length=20)
    assert load_pretrained(directory).embedding == before.embedding


def test_a_layer_without_bias_and_prompts_of_other_names(directory):
    kernel = np.ones((8, 32), np.float32)
    save_file({"linear.weight": kernel}, directory / "2_Dense" / "model.safetensors")
    change(
        directory / "config_sentence_transformers.json",
        prompts={"passage": "p ", "clustering": "c "},
        default_prompt_name="clustering",
        similarity_fn_name="euclidean",
    )
    bert = load_pretrained(directory)
    assert not bert.params["projection"]["bias"].any() and bert.embedding.embedding.passage_prompt == "p "
    assert [note.partition(" is not")[0].partition(" are not")[0] for note in bert.notes] == [
        "the prompts clustering",
        'default_prompt_name "clustering"',
        'similarity_fn_name "euclidean"',
    ]


@pytest.mark.parametrize(
    ("file", "values", "problem"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "max"}, r'pooling \["max"\] cannot be computed here, only mean'),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, r'pooling \["cls", "mean"\] cannot be computed'),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling .*max_tokens.* cannot be computed here"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt false, pooling without the prompt"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.GELU"}, 'activation_function "torch.nn.GELU" cannot'),
        ("2_Dense/config.json", {"use_residual": True}, "use_residual true cannot be computed here"),
        (
            "2_Dense/config.json",
            {"module_input_name": "token_embeddings"},
            'module_input_name "token_embeddings" cannot',
        ),
        ("2_Dense/config.json", {"module_output_name": "other"}, 'module_output_name "other" cannot be computed here'),
        ("3_Normalize/config.json", {"module_input_name": "token_embeddings"}, 'module_input_name "token_embeddings"'),
        ("2_Dense/config.json", {"in_features": 5}, "in_features 5 cannot be computed here"),
        ("2_Dense/config.json", {"out_features": 9}, "has no linear.weight and linear.bias of 9 outputs"),
        ("2_Dense/config.json", {"out_features": "8"}, 'has no linear.weight and linear.bias of "8" outputs'),
        ("2_Dense/config.json", {"activation_function": [1]}, r"activation_function \[1\] cannot be computed here"),
        ("1_Pooling/config.json", {"pooling_mode": [{"cls": 1}]}, "pooling .*cls.* cannot be computed here"),
        ("sentence_bert_config.json", {"max_seq_length": float("nan")}, "max_seq_length NaN is not a number of tokens"),
        (
            "sentence_bert_config.json",
            {"do_lower_case": True},
            "do_lower_case true beside a cased tokenizer cannot",
        ),
        ("sentence_bert_config.json", {"max_seq_length": "x"}, 'max_seq_length "x" is not a number of tokens'),
        ("config_sentence_transformers.json", {"prompts": {"query": 5}}, "prompts .* are not texts by name"),
    ],
)
def test_what_cannot_be_computed_is_named(tmp_path, directory, file, values, problem):
    if "do_lower_case" in values:  # what an uncased tokenizer does anyway
        change(directory / file, **values)
        load_pretrained(directory)
        directory = write(
            dataclasses.replace(make(), tokenizer=make_tokenizer(203, lowercase=False)), tmp_path / "cased"
        )
    change(directory / file, **values)
    with pytest.raises(InputError, match=problem):
        load_pretrained(directory)


@pytest.mark.parametrize(
    ("kinds", "problem"),
    [
        (["Transformer", "Pooling", "LSTM"], "has the module LSTM, which cannot be computed here; to use"),
        (["Transformer", "Pooling", "Normalize", "Dense"], "has the modules Transformer, Pooling, Normalize, Dense"),
        ([], "has the modules of an empty list"),
        (None, "is not a list of modules; copy it again"),
    ],
)
def test_other_modules_are_named(directory, kinds, problem):
    modules = [{"type": OLD + kind, "path": ""} for kind in kinds] if kinds is not None else {"odd": 1}
    (directory / MODULES).write_text(json.dumps(modules))
    with pytest.raises(InputError, match=problem):
        load_pretrained(directory)
    (directory / MODULES).unlink()
    assert load_pretrained(directory).task == "encoder"


def test_a_path_that_no_file_system_has_is_one_line(directory):
    modules = json.loads((directory / MODULES).read_text())
    modules[2]["path"] = "2_Dense" * 1000
    (directory / MODULES).write_text(json.dumps(modules))
    with pytest.raises(InputError, match="in_features null cannot be computed here"):
        load_pretrained(directory)


@pytest.mark.parametrize("kind", ["StaticEmbedding", "Router", "CLIPModel"])
def test_modules_without_a_model_at_the_root_are_named(tmp_path, kind):
    """As version 6 writes them: there is no config.json, and of some no tensors either."""
    if kind == "StaticEmbedding":
        save_file({"embedding.weight": np.ones((5, 4), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / MODULES).write_text(json.dumps([{"type": f"sentence_transformers.base.modules.x.{kind}", "path": ""}]))
    with pytest.raises(InputError, match=f"has the module {kind}, which cannot be computed here"):
        load_pretrained(tmp_path)


def test_a_reranker_is_the_classifier_that_it_is(tmp_path):
    """Version 6 lists a module of a CrossEncoder as well."""
    rest = (make_tokenizer(203), "sequence_classification", ())
    save_hf(tmp_path / "out", MODEL, random_params(num_classes=1, parts=("pooler", "classifier")), *rest)
    (tmp_path / "out" / MODULES).write_text(json.dumps([{"type": NEW["Transformer"] + "Transformer", "path": ""}]))
    about = tmp_path / "out" / "config_sentence_transformers.json"
    about.write_text('{"model_type": "CrossEncoder"}')
    assert load_pretrained(tmp_path / "out").task == "sequence_classification"
    about.write_text('{"model_type": "SentenceTransformer"}')
    with pytest.raises(InputError, match="has the modules Transformer, in this order"):
        load_pretrained(tmp_path / "out")
