# SPDX-License-Identifier: Apache-2.0
"""What inference prepares once and keeps: its parameters."""

import functools

import jax
import numpy as np
import pytest
from builders import tiny_model

import bert_jax
from bert_jax.model.objective import init_params


@pytest.fixture(scope="module")
def bert(repository):
    tokenizer = bert_jax.load_tokenizer(repository / "tests" / "fixtures" / "tokenizer")
    model = tiny_model(vocab_size=tokenizer.vocab_size, hidden_size=64)
    return bert_jax.Pretrained(model, jax.jit(functools.partial(init_params, model))(jax.random.key(0)), tokenizer)


def test_parameters_are_prepared_once_and_share_their_memory(bert):
    prepared = bert.prepared
    assert prepared is bert.prepared
    stack = bert.params["encoder"]["layers"]["mlp"]["output"]["kernel"]
    apart = prepared["encoder"]["layer_1"]["mlp"]["output"]["kernel"]
    np.testing.assert_array_equal(stack[1], apart)
    begins = np.asarray(stack).__array_interface__["data"][0]
    assert begins <= apart.unsafe_buffer_pointer() < begins + stack.nbytes
    assert jax.tree.leaves(bert.params["mlm"])[0] is jax.tree.leaves(prepared["mlm"])[0]
