# SPDX-License-Identifier: Apache-2.0
"""Directories of vectors of tokens: what is written is read back, PyLate's are read, other options are refused."""

import contextlib
import functools
import json

import numpy as np
import pytest
from builders import assert_same, change_json, computed, message
from hf_models import save_vectors, vectors_of
from safetensors.numpy import load_file, save_file

from bert_jax import CutWarning, InputError, encode, load_pretrained, multi_vectors, save_pretrained
from bert_jax.batch import pad_rows
from bert_jax.checkpoints import multi_vector
from bert_jax.checkpoints.hf import save_hf
from bert_jax.checkpoints.hf_extras import MODULES
from bert_jax.checkpoints.multi_vector import check_pylate, write_multi_vector, write_pylate
from bert_jax.settings.finetuning import EmbeddingConfig
from bert_jax.text.tokenizer import wordpiece_tokenizer

ABOUT, LENGTH = "config_sentence_transformers.json", "sentence_bert_config.json"


def make(**settings):
    """Returns a model with vectors of tokens and random parameters."""
    embedding, heads = EmbeddingConfig(kind="multi_vector", **settings), {}
    if size := embedding.projection_size:
        kernel = np.random.default_rng(0).normal(size=(32, size))
        heads["projection"] = {"kernel": kernel.astype(np.float32)}
    return vectors_of("token_embeddings", embedding, **heads)


PROJECTED = {"projection_size": 8, "projection_activation": "none"}
PREFIXED = {"query_prompt": "a", "passage_prompt": "b"}


@pytest.mark.parametrize(
    "settings",
    [
        PROJECTED | {"query_prompt": "q ", "passage_prompt": "p ", "default_prompt": "document"},
        {"query_length": 16, "query_expansion": 8, "skipped_words": '["a", "ü"]', "normalize": False},
        {"query_length": 16, "query_expansion": 16, "expansion_is_seen": True, "skipped_words": ""},
        {"query_expansion": 0, "other_prompts": '{"sts": "s "}', "default_prompt": "sts"},
    ],
)
def test_what_is_written_is_read_back(tmp_path, settings):
    bert = make(**settings)
    found = load_pretrained(save_vectors(tmp_path / "st", bert, write_multi_vector))
    save_pretrained(found, tmp_path / "own")
    for again in (found, load_pretrained(tmp_path / "own")):
        assert (again.task, again.embedding) == (bert.task, bert.embedding)
        assert_same(again.params, bert.params)


@pytest.mark.parametrize("more", [{}, {"query_expansion": 0, "skipped_words": "", "other_prompts": '{"sts": "s "}'}])
def test_what_is_written_for_pylate_is_read_back(tmp_path, more):
    bert = make(**PROJECTED, **PREFIXED, **more)
    check_pylate(bert.embedding, bert.tokenizer)
    again = load_pretrained(save_vectors(tmp_path / "pylate", bert, write_pylate, bert.tokenizer))
    assert again.embedding == bert.embedding
    assert_same(again.params, bert.params)
    about = json.loads((tmp_path / "pylate" / ABOUT).read_text())
    assert (about["query_prefix"], about["document_prefix"], about["model_type"]) == ("a", "b", "ColBERT")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "the prompt '' is 0 tokens, and PyLate has a token before queries and one before passages"),
        ({"query_prompt": "a b", "passage_prompt": "b"}, "the prompt 'a b' is 2 tokens"),
        (PREFIXED, "PyLate has no model with no dense layer; use --to=sentence_transformers"),
        (PREFIXED | PROJECTED | {"normalize": False}, "PyLate has no model with vectors of any length"),
        (PREFIXED | PROJECTED | {"query_expansion": 8}, "PyLate has no model with queries that are filled up in part"),
    ],
)
def test_what_pylate_cannot_express_is_named(settings, problem):
    bert = make(**settings)
    with pytest.raises(InputError, match=problem):
        check_pylate(bert.embedding, bert.tokenizer)
    assert "PyLate's models have a vector for each token, and this one has not" in message(
        check_pylate, None, bert.tokenizer
    )


@pytest.fixture
def directory(tmp_path):
    return save_vectors(tmp_path / "st", make(**PROJECTED), write_multi_vector)


@pytest.fixture
def pylate(directory):
    """Returns a directory as PyLate writes it, and a function that loads it with other settings."""
    modules = json.loads((directory / MODULES).read_text())[:2]
    for module, kind in zip(modules, ("sentence_transformers.models.Transformer", "pylate.models.Dense.Dense")):
        module["type"] = kind
    (directory / MODULES).write_text(json.dumps(modules))
    (directory / LENGTH).write_text('{"max_seq_length": 30, "do_lower_case": false}')
    usual = {"query_length": 9, "document_length": 18, "prompts": {"query": "a b"}, "similarity_fn_name": "MaxSim"}

    def load(**settings):
        (directory / ABOUT).write_text(json.dumps(usual | settings))
        return load_pretrained(directory)

    return load


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model_type": "ColBERT", "query_prefix": "a", "document_prefix": "b"}, (9, 9, False, "a b", "b")),
        ({"do_query_expansion": False}, (9, 0, False, "a b", "")),
        ({"attend_to_expansion_tokens": True, "query_length": None}, (32, 32, True, "a b", "")),
    ],
)
def test_pylate_s_options_are_read(pylate, settings, expected):
    task = pylate(**settings).embedding
    own = task.embedding
    found = own.query_length, own.query_expansion, own.expansion_is_seen, own.query_prompt, own.passage_prompt
    assert found == expected and task.max_seq_length == 18 and own.skipped_words == "punctuation" and own.normalize


def test_a_prefix_of_pylate_is_a_token_where_the_vocabulary_has_it(pylate):
    plain = pylate(query_prefix="[Q] ").tokenizer  # no token, so it is text
    assert len(plain.encode("[Q] a")) > 2 and plain.kind == "wordpiece"
    found = pylate(query_prefix="##b ", document_prefix="a").tokenizer
    assert found.tokenize("##b ab") == ["##b", *plain.tokenize("ab")] != plain.tokenize("##b ab")
    assert found.special_ids == plain.special_ids and found.template.second_type == 1
    bert = pylate(query_prefix="a", skiplist_words=["a", "no such"])
    assert "of skiplist_words the vocabulary lacks no such, so they leave out nothing" in bert.notes
    assert len(multi_vectors(bert, ["a b a"], kind="passage")[0]) == 3  # [CLS] b [SEP]


MASK = "2_MultiVectorMask/config.json"


@pytest.mark.parametrize(
    ("name", "values", "problem"),
    [
        (ABOUT, {"similarity_fn_name": "meanmaxsim"}, 'similarity_fn_name "meanmaxsim" cannot be computed here'),
        (LENGTH, {"query_expansion": {"strategy": "all", "length": 8}}, "query_expansion: Invalid enum value 'all'"),
        (LENGTH, {"query_expansion": {"strategy": "min"}}, "query_expansion: Object missing required field `length`"),
        (LENGTH, {"query_expansion": {"strategy": "min", "length": 8, "token": "a"}}, 'token "a" cannot be computed'),
        (LENGTH, {"query_expansion": {"strategy": "min", "length": 8, "new": 1}}, "query_expansion.new 1 cannot be"),
        (LENGTH, {"document_length": "long"}, "document_length: Expected `int | null`, got `str`"),
        (LENGTH, {"transformer_task": "fill-mask"}, 'transformer_task "fill-mask" cannot be computed here'),
        ("1_Dense/config.json", {"bias": True}, "bias true cannot be computed here"),
        ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, 'module_input_name "sentence_embedding"'),
        (MASK, {"skiplist_tasks": ["query"]}, "skiplist_tasks"),
        (MASK, {"keep_only_token_ids": [5]}, "keep_only_token_ids"),
        (MASK, {"skiplist_words": [5]}, r"skiplist_words: Expected `str`, got `int`"),
        (MASK, {"other": 1}, 'has the option "other", which is not known here'),
        ("3_Normalize/config.json", {"module_input_name": "sentence_embedding"}, 'module_input_name "sentence_emb'),
    ],
)
def test_what_cannot_be_computed_is_named(directory, name, values, problem):
    change_json(directory / name, **values)
    with pytest.raises(InputError, match=problem):
        load_pretrained(directory)


def test_other_modules_and_tensors_are_named(directory):
    modules = json.loads((directory / MODULES).read_text())
    (directory / MODULES).write_text(json.dumps([modules[0], modules[2], modules[1]]))
    assert "has the modules Transformer, MultiVectorMask, Dense, in this order" in message(load_pretrained, directory)
    (directory / MODULES).write_text(json.dumps(modules))
    save_file({"linear.weight": np.zeros((4, 32), np.float32)}, directory / "1_Dense" / "model.safetensors")
    assert "has other tensors than linear.weight of 32 inputs and 8 outputs" in message(load_pretrained, directory)


METADATA = "artifact.metadata"


@pytest.fixture
def stanford(tmp_path):
    """Returns a directory as Stanford's ColBERT writes it, whose passages have at most 8 tokens, and its layer."""
    bert, directory = make(), tmp_path / "colbert"
    words = [*bert.tokenizer.vocab[:-3], ".", "[unused0]", "[unused1]"]
    tokenizer = wordpiece_tokenizer(words, lowercase=True)
    save_hf(directory, bert.config, {"encoder": bert.params["encoder"]}, tokenizer, "token_embeddings", ())
    layer = np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors | {"linear.weight": layer}, directory / "model.safetensors")
    change_json(directory / "config.json", architectures=["HF_ColBERT"])
    change_json(directory / METADATA, dim=8, doc_maxlen=8, query_maxlen=9, attend_to_mask_tokens=True, lr=1e-5, nbits=1)
    return directory, layer


def test_stanford_s_directories_are_read(stanford, tmp_path):
    """A prefix is a token, queries are filled up with [MASK], and punctuation of passages does not count."""
    directory, layer = stanford
    bert = load_pretrained(directory)
    own = bert.embedding.embedding
    assert (bert.task, bert.embedding.max_seq_length) == ("token_embeddings", 8)
    assert len(bert.notes) == 1 and "the vocabulary lacks ! " in bert.notes[0]
    assert (own.query_prompt, own.passage_prompt, own.query_length, own.query_expansion) == (
        *("[unused0] ", "[unused1] "),
        *(9, 9),
    )
    assert own.expansion_is_seen and own.normalize and own.skipped_words == "punctuation"
    rows = {
        "query": ("a b", "[CLS] [unused0] a b [SEP] [MASK] [MASK] [MASK] [MASK]"),
        "passage": ("a. b c d e f g", "[CLS] [unused1] a . b c d [SEP]"),
    }
    for kind, (text, tokens) in rows.items():
        ids = [bert.tokenizer.id_of(token) for token in tokens.split()]
        hidden = computed(functools.partial(encode, bert.config), bert.params, pad_rows([ids], len(ids))).hidden[0]
        vectors = hidden.astype(np.float64) @ layer.T
        vectors = vectors[[token != "." for token in tokens.split()]]
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        with pytest.warns(CutWarning) if kind == "passage" else contextlib.nullcontext():
            (found,) = multi_vectors(bert, [text], kind=kind)
        np.testing.assert_allclose(found, vectors, atol=1e-5)
    save_pretrained(bert, tmp_path / "own")
    again = load_pretrained(tmp_path / "own")
    assert again.embedding == bert.embedding
    assert_same(again.params, bert.params)


def test_what_stanford_s_files_leave_out_is_its_default(stanford):
    directory, layer = stanford
    save_file(
        load_file(directory / "model.safetensors") | {"linear.weight": np.resize(layer, (128, 32))},
        directory / "model.safetensors",
    )
    (directory / METADATA).write_text('{"mask_punctuation": false, "query_maxlen": null, "new": 2, "other": null}')
    bert = load_pretrained(directory)
    own = bert.embedding.embedding
    assert (own.query_length, own.expansion_is_seen, own.skipped_words, own.projection_size) == (32, False, "", 128)
    assert bert.embedding.max_seq_length == 64  # of 220 as many as the model has places
    assert [note.rpartition("/")[2] for note in bert.notes] == [f'{METADATA}: "new" is not known here']


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"similarity": "l2"}, 'similarity "l2" cannot be computed here; it can be cosine'),
        ({"interaction": "flipr"}, 'interaction "flipr" cannot be computed here; it can be colbert'),
        ({"pool_factor": 2}, "pool_factor 2 cannot be computed here; it can be 1"),
        ({"dim": 9}, "linear.weight has the shape [8, 32], and dim and hidden_size are [9, 32]; copy all again"),
        ({"query_maxlen": 4}, "Expected `int` >= 5 - at `$.query_maxlen`"),
        ({"doc_maxlen": "long"}, "Expected `int`, got `str` - at `$.doc_maxlen`"),
        ({"mask_punctuation": 1}, "Expected `bool`, got `int` - at `$.mask_punctuation`"),
        ({"doc_token_id": "[D]"}, '"[D]" is no token that the tokenizer finds in a text; copy both again'),
        ({"query_token_id": "ü"}, "is no token that the tokenizer finds in a text"),
    ],
)
def test_what_stanford_s_files_say_and_cannot_be_computed_is_named(stanford, values, problem):
    change_json(stanford[0] / METADATA, **values)
    assert problem in message(load_pretrained, stanford[0])


def test_a_prefix_that_a_tokenizer_of_sentencepiece_would_not_find(stanford, monkeypatch):
    monkeypatch.setattr(multi_vector, "with_prompt_tokens", lambda tokenizer, prefixes: tokenizer)
    assert '"[unused0]" is no token that the tokenizer finds in a text' in message(load_pretrained, stanford[0])


def test_stanford_s_directory_without_its_settings_and_with_modules(stanford, directory):
    path, layer = stanford
    (path / METADATA).unlink()
    assert "artifact.metadata does not exist" in message(load_pretrained, path)
    for name in (MODULES, ABOUT, LENGTH, "1_Dense", "2_MultiVectorMask", "3_Normalize"):
        (directory / name).rename(path / name)
    bert = load_pretrained(path)
    assert any("has linear.weight, which is not read: modules.json names what is" in note for note in bert.notes)
    assert not np.allclose(bert.params["projection"]["kernel"], layer.T)
