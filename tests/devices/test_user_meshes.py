# SPDX-License-Identifier: Apache-2.0
"""The library inside a program that has a mesh or 64-bit numbers of its own."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import bert_jax
from bert_jax.model.objective import encode, init_params

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize(
    ("shape", "axes", "kind"),
    [
        ((4, 2), ("batch", "model"), EXPLICIT),
        ((2, 2, 2), ("data", "fsdp", "tensor"), AUTO),
    ],
)
def test_a_users_mesh_changes_no_result(bert, shape, axes, kind):
    texts = ["b c", "d [MASK] f"]
    hidden, vectors = bert.encode(texts).hidden, bert_jax.sentence_embeddings(bert, texts)
    filled, scores = bert_jax.fill_masks(bert, texts[1:]), bert_jax.score_sentences(bert, texts[:1])
    with jax.set_mesh(jax.make_mesh(shape, axes, axis_types=(kind,) * len(axes))):
        np.testing.assert_array_equal(bert.encode(texts).hidden, hidden)
        np.testing.assert_array_equal(bert_jax.sentence_embeddings(bert, texts), vectors)
        np.testing.assert_array_equal(bert_jax.score_sentences(bert, texts[:1]), scores)
        assert bert_jax.fill_masks(bert, texts[1:]) == filled
        assert jax.sharding.get_mesh().axis_names == axes  # it is the user's again


@pytest.mark.slow
def test_the_encoder_runs_in_a_program_of_the_users_mesh(bert):
    """Rows are divided as the user's program divides them."""
    batch = bert_jax.make_batch(bert.tokenizer, ["b c d"] * 8, 16)
    expected = jax.jit(lambda params, batch: encode(bert.config, params, batch).hidden)(bert.params, batch)
    mesh = jax.make_mesh((4, 2), ("batch", "model"), axis_types=(AUTO, AUTO))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.set_mesh(mesh):
        program = jax.jit(lambda params, batch: encode(bert.config, params, batch).hidden, in_shardings=(whole, rows))
        np.testing.assert_allclose(program(bert.params, batch), expected, atol=2e-6)


PROGRAM = """
import sys, jax, numpy as np, bert_jax
from bert_jax.model.objective import init_params
bert = bert_jax.load_pretrained(sys.argv[1])
new = jax.jit(lambda key: init_params(bert.config, key))(jax.random.key(0))
print({str(leaf.dtype) for leaf in jax.tree.leaves((bert.params, new))}, jax.numpy.ones(1).dtype)
np.save(sys.argv[2], bert.encode(["b c", "d e"]).hidden)
print(len(bert_jax.score_sentences(bert, ["b c"])))
"""


def test_models_stay_float32_where_jax_is_told_to_have_64_bits(bert, pretrained):
    texts = ["b c", "d e"]
    hidden = bert.encode(texts).hidden
    with jax.enable_x64(True):
        bert = bert_jax.load_pretrained(pretrained)
        new = jax.eval_shape(lambda key: init_params(bert.config, key), jax.random.key(0))
        assert {str(leaf.dtype) for leaf in jax.tree.leaves((bert.params, new))} == {"float32"}
        np.testing.assert_allclose(bert.encode(texts).hidden, hidden, atol=2e-6)


@pytest.mark.slow
def test_models_stay_float32_where_jax_has_64_bits(bert, pretrained, tmp_path):
    environment = os.environ | {"JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-c", PROGRAM, str(pretrained), str(tmp_path / "hidden.npy")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout == "{'float32'} float64\n1\n", done.stderr
    hidden = bert.encode(["b c", "d e"]).hidden
    np.testing.assert_allclose(np.load(tmp_path / "hidden.npy"), hidden, atol=2e-6)
