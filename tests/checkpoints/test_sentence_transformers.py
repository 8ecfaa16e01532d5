# SPDX-License-Identifier: Apache-2.0
"""Directories of sentence-transformers: what is read and written around a model, and what is refused by name."""

import dataclasses
import json
import os

import numpy as np
import pytest
from builders import assert_same, change_json, message, tiny_model
from hf_models import make_tokenizer, random_params, save_vectors, vectors_of
from safetensors.numpy import save_file

from bert_jax import InputError, load_pretrained, save_pretrained, sentence_embeddings
from bert_jax.checkpoints.hf import save_hf
from bert_jax.checkpoints.hf_extras import MODULES
from bert_jax.checkpoints.sentence_transformers import check_prompts, write_pipeline
from bert_jax.inference.predict import Predictor, load_predictor
from bert_jax.settings.finetuning import EmbeddingConfig

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
    embedding, heads, rng = EmbeddingConfig(**settings), {}, np.random.default_rng(0)
    if size := embedding.projection_size:
        kernel, bias = rng.normal(size=(32 * len(embedding.poolings()), size)), rng.normal(size=size)
        heads["projection"] = {"kernel": kernel.astype(np.float32), "bias": bias.astype(np.float32)}
    return vectors_of("sentence_embedding", embedding, **heads)


@pytest.fixture
def directory(tmp_path):
    return save_vectors(tmp_path / "st", make(projection_size=8, query_prompt="ba: "), write_pipeline)


TEXTS = ["".join(chr(97 + (number * place) % 26) for place in range(9)) for number in range(1, 6)]


@pytest.mark.parametrize(
    "settings",
    [
        {"pooling": "cls", "normalize": False, "kept_dimensions": 8},
        {"pooling": "last", "projection_size": 8, "projection_activation": "none", "passage_prompt": "a "},
        {"pooling": "mean,cls,weighted", "projection_size": 8, "query_prompt": "ba: "},
        {
            "pooling": "max",
            "passage_prompt": "d ",
            "other_prompts": '{"passage": "x ", "sts": "s: "}',
            "default_prompt": "sts",
        },
        {"pooling": "sqrt", "passage_prompt": "p ", "default_prompt": "document"},
    ],
)
def test_what_is_written_is_read_back(tmp_path, settings):
    bert = make(**settings)
    found = load_pretrained(save_vectors(tmp_path / "st", bert, write_pipeline))
    save_pretrained(found, tmp_path / "own")
    for again in (found, load_pretrained(tmp_path / "own")):
        assert (again.task, again.embedding) == (bert.task, bert.embedding)
        assert again.tokenizer.encode_batch(TEXTS) == bert.tokenizer.encode_batch(TEXTS)
        assert_same(again.params, bert.params)


def test_prompts_with_special_tokens_are_refused_both_ways(directory):
    """They are text here, and tokens in sentence-transformers; a token of the vocabulary is a word in both."""
    said = 'the prompt passage is "a [SEP] b: ", with a special token'
    for prompt in ("a [SEP] b: ", "a b: "):
        prompts = {"query": "ba: ", "document": prompt}
        change_json(directory / ABOUT, prompts=prompts)
        if "SEP" in prompt:
            assert f"{directory}: {said}" in message(load_pretrained, directory)
    bert = make(passage_prompt="a [SEP] b: ")
    assert f"runs/own: {said}" in message(check_prompts, bert.embedding, bert.tokenizer, "runs/own")
    assert load_pretrained(directory).embedding.embedding.passage_prompt == "a b: "


def test_both_spellings_of_types_and_options(directory):
    before = load_pretrained(directory)
    modules = json.loads((directory / MODULES).read_text())
    kinds = [each["type"].removeprefix(OLD) for each in modules]
    assert kinds == ["Transformer", "Pooling", "Dense", "Normalize"]
    newer = [each | {"type": NEW[kind] + kind} for each, kind in zip(modules, kinds)]
    (directory / MODULES).write_text(json.dumps(newer))
    (directory / "1_Pooling" / "config.json").write_text('{"embedding_dimension": 32, "pooling_mode": "mean"}')
    change_json(directory / "sentence_bert_config.json", max_seq_length=None)
    change_json(directory / "tokenizer_config.json", model_max_length=20)
    assert load_pretrained(directory).embedding == before.embedding


def test_a_layer_without_bias_and_prompts_of_other_names(directory):
    kernel = np.ones((8, 32), np.float32)
    save_file({"linear.weight": kernel}, directory / "2_Dense" / "model.safetensors")
    change_json(directory / "2_Dense" / "config.json", bias=False)
    change_json(
        directory / "config_sentence_transformers.json",
        prompts={"passage": "p ", "clustering": "c ", "query": None, "document": ""},
        default_prompt_name="passage",
        similarity_fn_name="euclidean",
    )
    bert = load_pretrained(directory)
    assert not bert.params["projection"]["bias"].any()
    settings = bert.embedding.embedding
    assert (settings.passage_prompt, settings.other_prompts) == ("p ", '{"clustering": "c "}')
    assert settings.default_prompt == "document"  # as the prompt of passages is named from here on
    assert [note.split(",")[0].partition(" is not")[0] for note in bert.notes] == [
        "passages take the prompt named passage",
        'similarity_fn_name "euclidean"',
    ]


@pytest.mark.parametrize(("kept", "size"), [(7, 7), (10**30, 8)])
def test_vectors_are_cut_as_the_files_say(directory, kept, size):
    before = sentence_embeddings(load_pretrained(directory), TEXTS)
    change_json(directory / "config_sentence_transformers.json", truncate_dim=kept)
    found = sentence_embeddings(load_pretrained(directory), TEXTS)
    assert_same(found, before[:, :size])  # after they had length 1, as there


def test_any_prompt_can_be_chosen(directory):
    """As encode_query, encode_document, prompt_name and encode of sentence-transformers do."""
    prompts = {"query": "ab ", "passage": "cd ", "corpus": "ef ", "sts": "gh "}
    change_json(directory / "config_sentence_transformers.json", prompts=prompts, default_prompt_name="sts")
    bert = load_pretrained(directory)
    change_json(directory / "config_sentence_transformers.json", prompts={}, default_prompt_name=None)
    bare = load_pretrained(directory)
    chosen = {"query": "ab ", "passage": "cd ", "document": "cd ", "corpus": "ef ", "sts": "gh ", "": "gh "}
    for kind, prompt in chosen.items():
        expected = sentence_embeddings(bare, [prompt + text for text in TEXTS])
        assert_same(sentence_embeddings(bert, TEXTS, kind=kind), expected)
    assert "kind 'other' is unknown; use corpus, sts, query, passage, document, or" in message(
        sentence_embeddings, bert, TEXTS, kind="other"
    )


ABOUT, LENGTH = "config_sentence_transformers.json", "sentence_bert_config.json"
POOLING, DENSE = "1_Pooling/config.json", "2_Dense/config.json"


@pytest.mark.parametrize(
    ("file", "values", "problem"),
    [
        (POOLING, {"pooling_mode": "min"}, r'pooling_mode \["min"\] cannot be computed here'),
        (POOLING, {"pooling_mode_mean_tokens": False}, r"pooling_mode \[\] cannot be computed here"),
        (POOLING, {"pooling_mode_min": True}, 'has the option "pooling_mode_min", which is not known'),
        (POOLING, {"include_prompt": False}, "include_prompt false cannot be computed here"),
        (DENSE, {"bias": False}, "has other tensors than linear.weight of 32 inputs and 8 outputs"),
        (DENSE, {"out_features": 9}, "than linear.weight and linear.bias of 32 inputs and 9 outputs"),
        (DENSE, {"activation_function": "torch.nn.ELU"}, 'activation_function "torch.nn.ELU" cannot'),
        (DENSE, {"module_input_name": "token_embeddings"}, 'module_input_name "token_embeddings" cannot'),
        (ABOUT, {"model_type": "SparseEncoder"}, 'model_type "SparseEncoder" cannot be'),
        (ABOUT, {"truncate_dim": 0}, "truncate_dim: Expected `int` >= 1"),
        (ABOUT, {"prompts": {"query": 5}}, "prompts: Expected `str . null`, got `int`"),
        (ABOUT, {"default_prompt_name": "x"}, 'default_prompt_name "x" is not the name'),
        (LENGTH, {"transformer_task": "fill-mask"}, 'transformer_task "fill-mask" cannot be'),
        (LENGTH, {"config_args": {"hidden_act": "relu"}}, "config_args .*relu.* cannot be"),
        (LENGTH, {"max_seq_length": float("nan")}, "max_seq_length: Expected `float` >= 0"),
    ],
)
def test_what_cannot_be_computed_is_named(directory, file, values, problem):
    change_json(directory / file, **values)
    with pytest.raises(InputError, match=problem):
        load_pretrained(directory)


def test_text_can_be_lower_cased_by_the_tokenizer_alone(tmp_path, directory):
    change_json(directory / LENGTH, do_lower_case=True)  # what an uncased tokenizer does anyway
    load_pretrained(directory)
    bert = dataclasses.replace(make(), tokenizer=make_tokenizer(203, lowercase=False))
    cased = save_vectors(tmp_path / "cased", bert, write_pipeline)
    change_json(cased / LENGTH, do_lower_case=True)
    assert "do_lower_case beside a cased tokenizer true cannot" in message(load_pretrained, cased)


@pytest.mark.parametrize(
    ("modules", "problem"),
    [
        ([("Transformer", ""), ("LSTM", "")], 'has the module .*LSTM", which cannot be computed here; to use'),
        ([("Transformer", ""), ("Dense", "2_Dense"), ("Pooling", "1_Pooling")], "modules Transformer, Dense, Pooling"),
        ([("Transformer", ""), ("Pooling", "../1_Pooling")], "the path of Pooling: Expected `str`"),
        ([("Transformer", ""), ("Pooling", "/etc")], "the path of Pooling: Expected `str`"),
        ([("Transformer", ""), ("Pooling", "Other")], "Other/config.json does not exist"),
        ([("Transformer", "1_Pooling")], "has its Transformer in .*1_Pooling, not here; give that folder"),
        ([], "has the modules of an empty list"),
        (None, "modules.json is damaged or another kind of file"),
    ],
)
def test_other_modules_are_named(directory, modules, problem):
    listed = None if modules is None else [{"type": OLD + kind, "path": path} for kind, path in modules]
    (directory / MODULES).write_text(json.dumps(listed))
    with pytest.raises(InputError, match=problem):
        load_pretrained(directory)
    (directory / MODULES).unlink()
    assert load_pretrained(directory).task == "encoder"


def test_a_module_of_another_package_is_named(directory):
    (directory / MODULES).write_text((directory / MODULES).read_text().replace(OLD, "evil.package."))
    told = 'has the module "evil.package.Transformer", which cannot be computed here'
    assert told in message(load_pretrained, directory)


def test_folders_without_settings_may_be_missing(directory):
    """Git keeps no empty folders, so clones of many models lack that of Normalize; Dropout does nothing."""
    before = load_pretrained(directory).embedding
    modules = json.loads((directory / MODULES).read_text())
    modules.insert(2, {"type": OLD + "Dropout", "path": "2_Dropout"})
    (directory / MODULES).write_text(json.dumps(modules))
    (directory / "3_Normalize").rmdir()
    assert load_pretrained(directory).embedding == before


@pytest.mark.parametrize(
    "name",
    ["modules.json", "config.json", "model.safetensors", "vocab.txt", "1_Pooling/config.json", "2_Dense/x.bin"],
)
def test_a_pipe_among_the_files_does_not_hang(directory, name):
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    assert f"{name} is not a file, but a directory, a pipe or a device" in message(load_pretrained, directory)
    (directory / name).unlink()
    (directory / name).symlink_to("/dev/zero")
    assert f"{name} is not a file, but a directory, a pipe or a device" in message(load_pretrained, directory)


def save_reranker(directory, **settings):
    params = random_params(num_classes=1, parts=("pooler", "classifier"))
    save_hf(directory, MODEL, params, make_tokenizer(203), "sequence_classification", (), **settings)


def test_a_reranker_is_the_classifier_that_it_is(tmp_path):
    """Version 6 lists a module of a CrossEncoder as well."""
    save_reranker(tmp_path / "out")
    (tmp_path / "out" / MODULES).write_text(json.dumps([{"type": NEW["Transformer"] + "Transformer", "path": ""}]))
    about = {"model_type": "CrossEncoder"}
    change_json(tmp_path / "out" / ABOUT, **about)
    assert load_pretrained(tmp_path / "out").task == "sequence_classification"
    for other, problem in (
        ({"activation_fn": "torch.nn.ELU"}, 'the activation "torch.nn.ELU" cannot be computed here'),
        ({"model_type": "SentenceTransformer"}, "has the modules Transformer, in this order"),
    ):
        change_json(tmp_path / "out" / ABOUT, **about | other)
        with pytest.raises(InputError, match=problem):
            load_pretrained(tmp_path / "out")


@pytest.mark.parametrize(("length", "expected"), [(0, 64), (16, 16), (999, 64)])
def test_rows_of_a_reranker_are_as_long_as_it_was_trained(tmp_path, length, expected):
    save_reranker(tmp_path / "out", max_seq_length=length)
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["model_max_length"] == expected
    assert load_predictor(tmp_path / "out").task.config.max_seq_length == expected


OF_TORCH = "torch.nn.modules.activation."


@pytest.mark.parametrize(
    ("settings", "expected", "note"),
    [
        ({}, "sigmoid", "the number that is predicted is the sigmoid of the output, by default"),
        ({"problem_type": "regression"}, "", "its problem_type is regression; CrossEncoder would give"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, "", "the output, as its files say"),
        (
            {"problem_type": "regression", "sbert_ce_default_activation_function": OF_TORCH + "Sigmoid"},
            "sigmoid",
            "the sigmoid of the output, as its files say",
        ),
        ({"sentence_transformers": {"activation_fn": OF_TORCH + "Tanh"}}, "tanh", "tanh of the"),
        ({"sbert_ce_default_activation_function": "evil.Run"}, "sigmoid", 'activation "evil.Run" is code'),
    ],
)
def test_the_activation_of_a_reranker(tmp_path, settings, expected, note):
    ce = tmp_path / "ce"
    save_reranker(ce)
    config = json.loads((ce / "config.json").read_text())
    assert config.pop("sentence_transformers") == {"activation_fn": "torch.nn.modules.linear.Identity"}
    assert config.pop("problem_type")
    (ce / "config.json").write_text(json.dumps(config | settings))
    predict = load_predictor(ce)
    assert any(note in line for line in predict.bert.notes), predict.bert.notes
    plain = Predictor(dataclasses.replace(predict.bert, task_settings={}))(TEXTS)
    of = {"": lambda x: x, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "tanh": np.tanh}[expected]
    assert [each.value for each in predict(TEXTS)] == pytest.approx([of(each.value) for each in plain])
    activation = predict.bert.task_settings.get("activation", "")
    save_reranker(tmp_path / "again", activation=activation)
    assert load_predictor(tmp_path / "again").task.config.activation == expected
