# SPDX-License-Identifier: Apache-2.0
"""Directories of a SparseEncoder: what is read and written around a masked language model, and what is refused."""

import dataclasses
import json
import shutil

import huggingface_hub
import numpy as np
import pytest
from builders import assert_same, change_json, message
from hf_models import make_tokenizer, save_vectors, vectors_of
from safetensors.numpy import save_file

from bert_jax import load_pretrained
from bert_jax.checkpoints.hf_extras import MODULES
from bert_jax.checkpoints.sparse_encoder import write_sparse
from bert_jax.settings.finetuning import EmbeddingConfig

NEW = "sentence_transformers.sparse_encoder.modules."
ROUTES, TABLE = "router_config.json", "query_0_SparseStaticEmbedding"


def make(**settings):
    """Returns a sparse model with random parameters."""
    embedding, heads = EmbeddingConfig(kind="sparse", **settings), {}
    if embedding.query_table:
        heads["query_table"] = {"weight": np.linspace(-1, 2, 203, dtype=np.float32)}
    return vectors_of("sparse_embedding", embedding, **heads)


def write(bert, directory):
    return save_vectors(directory, bert, write_sparse, 203)


@pytest.fixture
def plain(tmp_path):
    return write(make(), tmp_path / "plain")


@pytest.fixture
def routed(tmp_path):
    return write(make(query_table=True), tmp_path / "routed")


@pytest.mark.parametrize(
    "settings",
    [
        {"pooling": "max"},
        {"pooling": "sum", "log_times": 2, "max_terms": 9, "query_prompt": "ab ", "other_prompts": '{"sts": "b "}'},
        {"pooling": "max", "query_table": True, "query_prompt": "q ", "default_prompt": "query"},
    ],
)
def test_what_is_written_is_read_back(tmp_path, settings):
    bert = make(**settings)
    read = load_pretrained(write(bert, tmp_path / "st"))
    assert (read.task, read.embedding, read.notes) == (bert.task, bert.embedding, ())
    assert_same(dict(read.params), dict(bert.params))


ABOUT, LENGTH = "config_sentence_transformers.json", "sentence_bert_config.json"
POOLING, OLD = "1_SpladePooling/config.json", "sentence_transformers.sparse_encoder.models."
TYPES = {
    "MLMTransformer": "sentence_transformers.base.modules.transformer.Transformer",
    "SpladePooling": f"{NEW}splade_pooling.SpladePooling",
    "SparseStaticEmbedding": f"{NEW}sparse_static_embedding.SparseStaticEmbedding",
}


def rewrite_settings(directory):
    """Writes settings of modules as version 6 does: a Transformer says its task."""
    modality = {"text": {"method": "forward", "method_output_name": "logits"}}
    about = {"transformer_task": "fill-mask", "modality_config": modality, "module_output_name": "token_embeddings"}
    (directory / LENGTH).write_text(json.dumps(about))
    pooling = {"pooling_strategy": "max", "activation_function": "relu", "embedding_dimension": None}
    (directory / POOLING).write_text(json.dumps(pooling))


def test_newer_names_are_read(plain):
    before = load_pretrained(plain).embedding
    rewrite_settings(plain)
    modules = json.loads((plain / MODULES).read_text())
    for module in modules:
        module["type"] = TYPES[module["type"].removeprefix(OLD)]
    (plain / MODULES).write_text(json.dumps(modules))
    read = load_pretrained(plain)
    assert read.notes == () and read.embedding == dataclasses.replace(before, max_seq_length=64)  # the tokenizer's


def test_each_module_may_be_in_a_folder(routed, monkeypatch):
    """As version 6 writes them with a Router, and versions before with Asym. Of the hub all of them are fetched."""
    rewrite_settings(routed)
    words, pooling = "document_0_Transformer", "document_1_SpladePooling"
    (routed / words).mkdir()
    for path in list(routed.iterdir()):
        if path.is_file() and path.name not in (MODULES, ROUTES, ABOUT):
            path.rename(routed / words / path.name)
    (routed / "1_SpladePooling").rename(routed / pooling)
    types = dict(zip((words, pooling, TABLE), TYPES.values()))
    parameters = {"default_route": "document", "allow_empty_key": True, "route_mappings": {}}
    structure = {"query": [TABLE], "document": [words, pooling]}
    change_json(routed / ROUTES, types=types, structure=structure, parameters=parameters)
    read = load_pretrained(routed)
    assert read.embedding.embedding.query_table and read.notes == ()

    def snapshot_download(name, revision, allow_patterns):
        names = [path.relative_to(routed).as_posix() for path in routed.rglob("*") if path.is_file()]
        for asked in huggingface_hub.utils.filter_repo_objects(names, allow_patterns=allow_patterns):
            (routed.parent / "hub" / asked).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(routed / asked, routed.parent / "hub" / asked)
        return str(routed.parent / "hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    fetched = load_pretrained("hf://org/name")
    assert fetched.embedding == read.embedding
    assert_same(dict(fetched.params), dict(read.params))
    (routed / ROUTES).rename(routed / "config.json")
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Asym"}]
    (routed / MODULES).write_text(json.dumps(modules))
    assert load_pretrained(routed).embedding == read.embedding


def test_both_routes_may_be_the_same(routed):
    routes = json.loads((routed / ROUTES).read_text())
    structure = dict.fromkeys(("query", "document"), routes["structure"]["document"])
    change_json(routed / ROUTES, structure=structure)
    read = load_pretrained(routed)
    assert not read.embedding.embedding.query_table and "query_table" not in read.params


@pytest.mark.parametrize(
    ("file", "values", "problem"),
    [
        (POOLING, {"pooling_strategy": "mean"}, 'pooling_strategy "mean" cannot be computed here'),
        (POOLING, {"activation_function": "gelu"}, 'activation_function "gelu" cannot be computed here'),
        (POOLING, {"word_embedding_dimension": 9}, "word_embedding_dimension beside a vocabulary of 203 9 cannot be"),
        (POOLING, {"scale": 2}, 'has the option "scale", which is not known here'),
        (ABOUT, {"model_type": "SentenceTransformer"}, 'model_type "SentenceTransformer" cannot be computed here'),
        (ABOUT, {"max_active_dims": 0}, "max_active_dims: Expected `int` >= 1"),
        (LENGTH, {"transformer_task": "feature-extraction"}, 'transformer_task "feature-extraction" cannot be'),
        (f"{TABLE}/config.json", {"path": "idf.json"}, "idf.json does not exist"),
        (f"{TABLE}/config.json", {"path": "../idf.json"}, "config.json: path: Expected `str` matching"),
        (f"{TABLE}/config.json", {"path": "org/name"}, 'path "org/name" cannot be computed here'),
        (ROUTES, {"types": 3}, "router_config.json: types: Expected `object`, got `int`"),
        (ROUTES, {"structure": {"query": [TABLE]}}, 'structure ["query"] cannot be computed here'),
        (
            ROUTES,
            {"structure": {"query": [TABLE], "document": [TABLE]}},
            "has the modules SparseStaticEmbedding for passages and SparseStaticEmbedding for queries",
        ),
        (ROUTES, {"structure": {"query": ["x"], "document": [""]}}, "has the module null, which cannot be computed"),
        (ROUTES, {"parameters": {"default_route": "query"}}, 'default_route "query" cannot be computed here'),
    ],
)
def test_what_cannot_be_computed_is_named(routed, file, values, problem):
    change_json(routed / file, **values)
    assert problem in message(load_pretrained, routed)


@pytest.mark.parametrize(
    ("modules", "problem"),
    [
        ([(f"{OLD}MLMTransformer", "")], "the modules MLMTransformer for passages and MLMTransformer for queries"),
        ([(f"{OLD}MLMTransformer", ""), (f"{OLD}SpladePooling", "../x")], "the path of SpladePooling: Expected `str`"),
        ([(f"{OLD}MLMTransformer", ""), (f"{OLD}SparseAutoEncoder", "x")], "has the module"),
        # sentence-transformers would take its hidden states for vectors
        (
            [("sentence_transformers.models.Transformer", ""), (f"{OLD}SpladePooling", "1_SpladePooling")],
            "transformer_task null cannot be computed here",
        ),
    ],
)
def test_other_modules_are_named(plain, modules, problem):
    (plain / MODULES).write_text(json.dumps([{"type": kind, "path": path} for kind, path in modules]))
    assert problem in message(load_pretrained, plain)


def test_a_table_is_of_the_models_words(routed):
    write(dataclasses.replace(make(), tokenizer=make_tokenizer(203, lowercase=False)), routed.parent / "other")
    shutil.copy(routed.parent / "other" / "tokenizer_config.json", routed / TABLE)
    (routed / TABLE / "tokenizer.json").unlink()
    assert "has another tokenizer than the model of passages" in message(load_pretrained, routed)
    save_file({"weight": np.zeros(202, np.float32)}, routed / TABLE / "model.safetensors")
    assert "has other tensors than weight of 203 words" in message(load_pretrained, routed)


@pytest.mark.parametrize("path", ["idf.json", f"{TABLE}/idf.json", "./more/idf.json"])
def test_a_table_may_be_a_file_of_words(routed, path):
    """Beside the table or in the directory; of a word that is not there the weight is 0."""
    before = load_pretrained(routed)
    weight = np.array(before.params["query_table"]["weight"])
    words = dict(zip(before.tokenizer.vocab, weight.tolist()))
    change_json(routed / TABLE / "config.json", path=path, frozen=True)
    (routed / "more").mkdir()
    place = routed / TABLE / path if path == "idf.json" else routed / path
    place.write_text(json.dumps(words))
    both = load_pretrained(routed)  # with the same weights as a tensor
    assert (both.embedding, both.notes) == (before.embedding, ())
    assert_same(dict(both.params), dict(before.params))
    del words["##c"]
    place.write_text(json.dumps(words))
    assert "has other weights than" in message(load_pretrained, routed)
    (routed / TABLE / "model.safetensors").unlink()
    weight[before.tokenizer.pieces.ids["##c"]] = 0
    np.testing.assert_array_equal(load_pretrained(routed).params["query_table"]["weight"], weight)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"a": 1, "no such": 2}', 'has a weight of "no such", which the tokenizer lacks; copy both again'),
        ('{"a": "2"}', 'idf.json: "a": Expected `float`, got `str`; correct it'),
        ('{"a": true}', 'idf.json: "a": Expected `float`, got `bool`'),
        ('{"a": 1' + "0" * 400 + "}", 'idf.json: "a": Number out of range'),
        ("[1]", "idf.json is not a JSON object"),
        ("{", "idf.json"),
    ],
)
def test_a_file_that_is_no_weights_of_words(routed, content, problem):
    change_json(routed / TABLE / "config.json", path="idf.json")
    (routed / TABLE / "idf.json").write_text(content)
    assert problem in message(load_pretrained, routed)


def test_a_weight_beyond_float32_is_said(routed):
    change_json(routed / TABLE / "config.json", path="idf.json")
    (routed / TABLE / "model.safetensors").unlink()
    (routed / TABLE / "idf.json").write_text('{"a": 1e300}')
    assert any("NaN or numbers beyond float32" in note for note in load_pretrained(routed).notes)
