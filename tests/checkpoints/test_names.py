# SPDX-License-Identifier: Apache-2.0
"""The table of names: every parameter is in it, and every format comes back bit for bit, by any way."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import assert_same, growing_bert, tiny_model
from google_files import save_tf1
from hf_models import make_tokenizer, random_params
from read_models import load_hf, load_tf1

from bert_jax.checkpoints.arrays import describe
from bert_jax.checkpoints.hf import save_hf
from bert_jax.checkpoints.names import (
    IGNORED,
    TABLE,
    check_vocabulary,
    find_not_finite,
    flatten,
    from_params,
    part_of,
    to_params,
    unflatten,
)
from bert_jax.checkpoints.pretrained import Pretrained, save_pretrained
from bert_jax.errors import InputError
from bert_jax.inference.pretrained import load_pretrained
from bert_jax.model.heads.table import HEADS, infer_head
from bert_jax.model.objective import init_params, parts_of
from bert_jax.model.shapes import abstract_params

CONFIG = tiny_model(unroll=0, num_layers=3, vocab_size=131)


def shapes_of(arrays):
    return {name: array.shape for name, array in arrays.items()}


def test_every_parameter_has_a_row_and_every_row_a_parameter():
    assert sorted(row.ours for row in TABLE) == sorted(describe(abstract_params(CONFIG)))


@pytest.mark.parametrize("task", HEADS)
def test_the_parts_of_every_task_are_those_of_its_model(task):
    params = jax.eval_shape(lambda key: init_params(CONFIG, key, HEADS[task], 1), jax.random.key(0))
    assert sorted(parts_of(params)) == sorted(HEADS[task].parts)
    same = (
        "multiple_choice",
        "multilabel_classification",
        "sentence_embedding",
        "sparse_embedding",
        "token_embeddings",
    )  # whose arrays others have too
    assert infer_head(parts_of(params)).name == task or task in same


def test_kernels_are_turned_where_the_format_has_them_so():
    params = random_params(CONFIG)
    hf, tf1 = (from_params(params, form, CONFIG) for form in ("hf", "tf1"))
    kernel = params["encoder"]["layers"]["mlp"]["intermediate"]["kernel"][1]
    assert_same(hf["bert.encoder.layer.1.intermediate.dense.weight"], kernel.T)
    assert_same(tf1["bert/encoder/layer_1/intermediate/dense/kernel"], kernel)
    assert_same(tf1["output_weights"], params["classifier"]["kernel"].T)
    assert_same(hf["classifier.weight"], params["classifier"]["kernel"].T)


@pytest.mark.parametrize("form", ["hf", "tf1"])
def test_any_set_of_parts_comes_back_bit_for_bit(form):
    whole = flatten(random_params(CONFIG, num_classes=5))
    parts = ("pooler", "mlm", "next_sentence", "classifier", "span")
    for count in range(len(parts) + 1):
        for chosen in itertools.combinations(parts, count):
            flat = {ours: leaf for ours, leaf in whole.items() if part_of(ours) in (*chosen, "encoder")}
            arrays = from_params(unflatten(flat), form, CONFIG)
            assert_same(flatten(to_params(arrays.__getitem__, shapes_of(arrays), form, CONFIG, "file")), flat)


@pytest.mark.parametrize("form", ["hf", "tf1"])
def test_every_tensor_is_used_once_or_on_the_list(form):
    arrays = from_params(random_params(CONFIG), form, CONFIG)
    read = []

    def reader(name):
        read.append(name)
        return arrays[name]

    extra = {
        "hf": ["embeddings.position_ids", "cls.predictions.decoder.weight"],
        "tf1": ["bert/embeddings/word_embeddings/adam_m", "bert/embeddings/word_embeddings/adam_v", "global_step"],
    }[form]
    to_params(reader, shapes_of(arrays) | dict.fromkeys(extra, ()), form, CONFIG, "file")
    assert sorted(read) == sorted(arrays)
    for name in ("bert/strange", "cls.predictions.decoders.weight", "adam_m", "global_steps"):
        with pytest.raises(InputError, match=f"file holds 1 tensors .* no place for: {name};"):
            to_params(reader, shapes_of(arrays) | {name: ()}, form, CONFIG, "file")


def test_what_is_wrong_is_found_before_anything_is_read():
    shapes = shapes_of(from_params(random_params(CONFIG), "hf", CONFIG))
    *others, _ = shapes.items()
    strange = [(f"strange.{index:02}", (1,)) for index in range(40)]
    for given, told in (
        (dict(others), "lacks 1 tensors"),
        (shapes | {"bert.pooler.dense.bias": (7,)}, r"file: .* has shape \(7,\)"),
        (shapes | dict(strange), "holds 40 tensors .*strange.00, .*strange.11 and 28 more"),
        (shapes | dict(strange[:12]), "holds 12 tensors .*strange.00, .*strange.11;"),
    ):
        with pytest.raises(InputError, match=told):
            to_params(None, given, "hf", CONFIG, "file")
    assert IGNORED.keys() == {"hf", "tf1"}


WORDS = "embeddings.word_embeddings.weight"


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (lambda arrays: {WORDS: arrays[f"bert.{WORDS}"]}, CONFIG, "are two names of one tensor; remove one"),
        (
            lambda arrays: {"bert.pooler.dense.bias": np.zeros(32, np.int8)},
            CONFIG,
            "holds int8; save a quantized model",
        ),
        (lambda arrays: {}, dataclasses.replace(CONFIG, num_layers=500), "tensors, too few for the 500 layers"),
        (lambda arrays: {f"bert.{WORDS}": np.zeros((130, 32))}, CONFIG, r"has shape \(130, 32\), .* \(131, 32\)"),
        (lambda arrays: {"classifier.bias": np.zeros((2, 2))}, CONFIG, r"has shape \(2, 2\), the .* \(1,\)"),
    ],
)
def test_tensors_that_are_not_this_models_are_refused(change, config, message):
    arrays = from_params(random_params(CONFIG, num_classes=1), "hf", CONFIG)
    arrays |= change(arrays)
    with pytest.raises(InputError, match=message):
        to_params(arrays.__getitem__, shapes_of(arrays), "hf", config, "file")


def test_older_names_are_read():
    old = {}
    for name, array in from_params(random_params(CONFIG), "hf", CONFIG).items():
        older = name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma")
        old[older.replace("LayerNorm.bias", "LayerNorm.beta")] = array
    found = to_params(old.__getitem__, shapes_of(old), "hf", CONFIG, "file")
    assert_same(found, random_params(CONFIG))


def test_words_and_numbers_that_do_not_fit_are_told():
    tokenizer = make_tokenizer(131)
    for rows in (131, 1154):
        check_vocabulary(tokenizer, rows, "file")
    for rows in (130, 1155):
        with pytest.raises(InputError, match=f"file: the vocabulary has 131 tokens and the table of words {rows} rows"):
            check_vocabulary(tokenizer, rows, "file")
    params = {"a": np.array([1.0, np.nan]), "b": np.array([np.inf]), "c": np.zeros(2)}
    for names, told in (("c", []), ("ac", ["file: a"]), ("abc", ["file: a, b"])):
        lines = find_not_finite({name: params[name] for name in names}, "file")
        assert [line.partition(" hold")[0] for line in lines] == told
    with pytest.raises(InputError, match="own is a parameter of an own head or a probe"):
        from_params({"own": np.zeros(2)}, "hf", CONFIG)


def test_a_model_goes_through_every_format_and_comes_back(tmp_path):
    task, labels = "sequence_classification", ("a", "b", "c")
    params, tokenizer = random_params(CONFIG, parts=HEADS[task].parts), make_tokenizer(131)
    save_hf(tmp_path / "hf", CONFIG, params, tokenizer, task, labels)
    save_tf1(tmp_path / "tf1", *load_hf(tmp_path / "hf")[:5])
    save_pretrained(Pretrained(*load_tf1(tmp_path / "tf1")[:5]), tmp_path / "ours")
    found = load_pretrained(tmp_path / "ours")
    assert (found.config, found.task, found.labels) == (CONFIG, task, labels)
    assert found.tokenizer.fingerprint == tokenizer.fingerprint
    assert describe(found.params) == describe(params)
    assert_same(found.params, params)


def test_parameters_of_another_dtype_are_saved_as_float32(tmp_path):
    bert = growing_bert()
    halves = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf).astype(jnp.bfloat16)), bert.params)
    save_pretrained(dataclasses.replace(bert, params=halves), tmp_path / "model")
    found = load_pretrained(tmp_path / "model").params
    jax.tree.map(lambda one, other: np.testing.assert_array_equal(one, np.asarray(other, np.float32)), found, halves)
