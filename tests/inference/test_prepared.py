# SPDX-License-Identifier: Apache-2.0
"""What inference prepares once and keeps, its parameters, and how it divides texts into batches."""

import functools

import jax
import numpy as np
import pytest
from builders import tiny_model

import bert_jax
from bert_jax.model.objective import init_params
from bert_jax.settings.model import ModelConfig
from bert_jax.tasks.evaluation import inference_layouts
from bert_jax.tasks.layouts import Sizes


@pytest.fixture(scope="module")
def bert(repository):
    tokenizer = bert_jax.load_tokenizer(repository / "tests" / "fixtures" / "tokenizer")
    model = tiny_model(vocab_size=tokenizer.vocab_size, hidden_size=64)
    return bert_jax.Pretrained(model, jax.jit(functools.partial(init_params, model))(jax.random.key(0)), tokenizer)


def sizes(*lengths: int) -> Sizes:
    return Sizes(np.array(lengths), np.ones(len(lengths), np.int64))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((9,), [(1, 16)]),
        ((200,) * 9, [(2, 224)] * 4 + [(1, 224)]),
        ((400,) * 2, [(1, 448)] * 2),
        ((12,) * 40, [(32, 16), (8, 16)]),
        ((120, 30, 30), [(4, 128)]),
    ],
)
def test_a_batch_on_a_cpu_has_about_512_tokens(lengths, expected):
    layouts = inference_layouts(ModelConfig(), sizes(*lengths), 32, "off")
    assert [(layout.num_rows, layout.length) for layout in layouts] == expected
    assert sorted(number for layout in layouts for (number,) in layout.bins) == list(range(len(lengths)))


def test_packed_rows_have_as_many_tokens(bert):
    (first, *_) = inference_layouts(bert.config, sizes(*[20] * 100, 60), 32, "on")
    assert first.num_rows * first.length <= 512 and len(first.bins) == first.num_rows


def test_parameters_are_prepared_once_and_share_their_memory(bert):
    prepared = bert.prepared
    assert prepared is bert.prepared
    stack = bert.params["encoder"]["layers"]["mlp"]["output"]["kernel"]
    apart = prepared["encoder"]["layer_1"]["mlp"]["output"]["kernel"]
    np.testing.assert_array_equal(stack[1], apart)
    begins = np.asarray(stack).__array_interface__["data"][0]
    assert begins <= apart.unsafe_buffer_pointer() < begins + stack.nbytes
    assert jax.tree.leaves(bert.params["mlm"])[0] is jax.tree.leaves(prepared["mlm"])[0]
