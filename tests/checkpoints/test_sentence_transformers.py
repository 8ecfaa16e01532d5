# SPDX-License-Identifier: Apache-2.0
"""Directories of sentence-transformers: what is read and written around a model, and what is refused by name."""

import dataclasses
import json
import os

import jax
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
from bert_jax.inference.predict import Predictor, load_predictor
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
        inputs = MODEL.hidden_size * len(embedding.poolings())
        kernel, bias = rng.normal(size=(inputs, size)), rng.normal(size=size)
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
        {"pooling": "mean"},
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
    found = load_pretrained(write(bert, tmp_path / "st"))
    save_pretrained(found, tmp_path / "own")
    for again in (found, load_pretrained(tmp_path / "own")):
        assert (again.task, again.embedding) == (bert.task, bert.embedding)
        assert again.tokenizer.encode_batch(TEXTS) == bert.tokenizer.encode_batch(TEXTS)
        jax.tree.map(np.testing.assert_array_equal, again.params, bert.params)


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
    change(directory / "2_Dense" / "config.json", bias=False)
    change(
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


@pytest.mark.parametrize(("kept", "size"), [(7, 7), (8, 8), (10**30, 8), (None, 8)])
def test_vectors_are_cut_as_the_files_say(directory, kept, size):
    before = sentence_embeddings(load_pretrained(directory), TEXTS)
    change(directory / "config_sentence_transformers.json", truncate_dim=kept)
    found = sentence_embeddings(load_pretrained(directory), TEXTS)
    np.testing.assert_array_equal(found, before[:, :size])  # after they had length 1, as there


def test_any_prompt_can_be_chosen(directory):
    """As encode_query, encode_document, prompt_name and encode of sentence-transformers do."""
    prompts = {"query": "ab ", "passage": "cd ", "corpus": "ef ", "sts": "gh "}
    change(directory / "config_sentence_transformers.json", prompts=prompts, default_prompt_name="sts")
    bert = load_pretrained(directory)
    change(directory / "config_sentence_transformers.json", prompts={}, default_prompt_name=None)
    bare = load_pretrained(directory)
    chosen = {"query": "ab ", "passage": "cd ", "document": "cd ", "corpus": "ef ", "sts": "gh ", "": "gh "}
    for kind, prompt in chosen.items():
        expected = sentence_embeddings(bare, [prompt + text for text in TEXTS])
        np.testing.assert_array_equal(sentence_embeddings(bert, TEXTS, kind=kind), expected)
    with pytest.raises(InputError, match="kind 'other' is unknown; use corpus, sts, query, passage, document, or"):
        sentence_embeddings(bert, TEXTS, kind="other")


@pytest.mark.parametrize(
    ("file", "values", "problem"),
    [
        ("1_Pooling/config.json", {"pooling_mode": "min"}, r'pooling_mode \["min"\] cannot be computed here'),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, r"pooling_mode \[\] cannot be computed here"),
        ("1_Pooling/config.json", {"pooling_mode_min": True}, 'has the option "pooling_mode_min", which is not known'),
        ("2_Dense/config.json", {"scale": 2}, 'has the option "scale", which is not known here'),
        ("2_Dense/config.json", {"bias": False}, "has other tensors than linear.weight of 32 inputs and 8 outputs"),
        ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, 'model_type "SparseEncoder" cannot be'),
        ("config_sentence_transformers.json", {"truncate_dim": 0}, "truncate_dim: Expected `int` >= 1"),
        ("config_sentence_transformers.json", {"default_prompt_name": "x"}, 'default_prompt_name "x" is not the name'),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, 'transformer_task "fill-mask" cannot be'),
        ("sentence_bert_config.json", {"config_args": {"hidden_act": "relu"}}, "config_args .*relu.* cannot be"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt false cannot be computed here"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.ELU"}, 'activation_function "torch.nn.ELU" cannot'),
        ("2_Dense/config.json", {"use_residual": True}, "use_residual true cannot be computed here"),
        (
            "2_Dense/config.json",
            {"module_input_name": "token_embeddings"},
            'module_input_name "token_embeddings" cannot',
        ),
        (
            "2_Dense/config.json",
            {"out_features": 9},
            "has other tensors than linear.weight and linear.bias of 32 inputs and 9 outputs",
        ),
        ("sentence_bert_config.json", {"max_seq_length": float("nan")}, "max_seq_length: Expected `float` >= 0"),
        (
            "sentence_bert_config.json",
            {"do_lower_case": True},
            "do_lower_case beside a cased tokenizer true cannot",
        ),
        ("config_sentence_transformers.json", {"prompts": {"query": 5}}, "prompts: Expected `str . null`, got `int`"),
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
        (["Transformer", "Pooling", "LSTM"], 'has the module .*LSTM", which cannot be computed here; to use'),
        (["Transformer", "Pooling", "Normalize", "Dense"], "has the modules Transformer, Pooling, Normalize, Dense"),
        ([], "has the modules of an empty list"),
        (None, "modules.json is damaged or another kind of file"),
    ],
)
def test_other_modules_are_named(directory, kinds, problem):
    modules = [{"type": OLD + kind, "path": ""} for kind in kinds] if kinds is not None else {"odd": 1}
    (directory / MODULES).write_text(json.dumps(modules))
    with pytest.raises(InputError, match=problem):
        load_pretrained(directory)
    (directory / MODULES).unlink()
    assert load_pretrained(directory).task == "encoder"


@pytest.mark.parametrize(
    ("number", "values", "problem"),
    [
        (1, {"path": None}, "the path of Pooling: Expected `str`"),
        (1, {"path": "../1_Pooling"}, "the path of Pooling: Expected `str`"),
        (1, {"path": "/etc"}, "the path of Pooling: Expected `str`"),
        (2, {"path": "Other"}, "Other/config.json does not exist"),
        (0, {"path": "1_Pooling"}, "has its Transformer in .*1_Pooling, not here; give that folder"),
        (1, {"type": "evil.package.Pooling"}, 'has the module "evil.package.Pooling", which cannot be computed here'),
    ],
)
def test_modules_that_are_not_there_are_named(directory, number, values, problem):
    modules = json.loads((directory / MODULES).read_text())
    modules[number] |= values
    (directory / MODULES).write_text(json.dumps(modules))
    with pytest.raises(InputError, match=problem):
        load_pretrained(directory)


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
    with pytest.raises(InputError, match=f"{name} is not a file, but a directory, a pipe or a device"):
        load_pretrained(directory)
    (directory / name).unlink()
    (directory / name).symlink_to("/dev/zero")
    with pytest.raises(InputError, match=f"{name} is not a file, but a directory, a pipe or a device"):
        load_pretrained(directory)


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


OF_TORCH = "torch.nn.modules.activation."


@pytest.mark.parametrize(
    ("of_model", "of_modules", "expected", "note"),
    [
        ({}, None, "sigmoid", "the number that is predicted is the sigmoid of the output, by default"),
        ({"problem_type": "regression"}, None, "", "its problem_type is regression; CrossEncoder would give"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, None, "", "the output, as its files say"),
        (
            {"problem_type": "regression", "sbert_ce_default_activation_function": OF_TORCH + "Sigmoid"},
            *(None, "sigmoid", "the sigmoid of the output, as its files say"),
        ),
        ({"sentence_transformers": {"activation_fn": OF_TORCH + "Tanh"}}, None, "tanh", "tanh of the"),
        ({"sbert_ce_default_activation_function": "evil.Run"}, None, "sigmoid", 'activation "evil.Run" is code'),
        ({}, "torch.nn.ELU", None, 'the activation "torch.nn.ELU" cannot be computed here'),
    ],
)
def test_the_activation_of_a_reranker(tmp_path, of_model, of_modules, expected, note):
    rest = (make_tokenizer(203), "sequence_classification", ())
    ce = tmp_path / "ce"
    save_hf(ce, MODEL, random_params(num_classes=1, parts=("pooler", "classifier")), *rest)
    config = json.loads((ce / "config.json").read_text())
    assert config.pop("sentence_transformers") == {"activation_fn": "torch.nn.modules.linear.Identity"}
    assert config.pop("problem_type")
    (ce / "config.json").write_text(json.dumps(config | of_model))
    if of_modules:
        (ce / MODULES).write_text(json.dumps([{"type": OLD + "Transformer", "path": ""}]))
        change(ce / "config_sentence_transformers.json", model_type="CrossEncoder", activation_fn=of_modules)
        change(ce / "tokenizer_config.json", model_max_length=12)  # which cuts pairs there
    if expected is None:
        with pytest.raises(InputError, match=note):
            load_pretrained(ce)
        return
    predict = load_predictor(ce)
    assert any(note in line for line in predict.bert.notes), predict.bert.notes
    assert predict.task.config.max_seq_length == (12 if of_modules else MODEL.max_positions)
    plain = Predictor(dataclasses.replace(predict.bert, task_settings={}))(TEXTS)
    of = {"": lambda x: x, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "tanh": np.tanh, "relu": lambda x: max(x, 0.0)}
    assert [each.value for each in predict(TEXTS)] == pytest.approx([of[expected](each.value) for each in plain])
    more = {"activation": predict.bert.task_settings.get("activation", "")}
    save_hf(tmp_path / "again", MODEL, predict.bert.params, *rest, **more)
    assert load_predictor(tmp_path / "again").task.config.activation == expected
