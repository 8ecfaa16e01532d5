# SPDX-License-Identifier: Apache-2.0
"""What inference prepares once and keeps: parameters, programs, memory; and how it divides texts into batches."""

import functools
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from builders import tiny_model

import bert_jax
from bert_jax.devices.kept import drop_oldest
from bert_jax.model.objective import init_params
from bert_jax.settings.model import ModelConfig
from bert_jax.tasks.evaluation import inference_layouts
from bert_jax.tasks.layouts import Sizes

USE = """
import os, sys
import bert_jax, jax
bert = bert_jax.load_pretrained(sys.argv[1])
bert_jax.sentence_embeddings(bert, ["ban bis"])
print(jax.config.values["jax_compilation_cache_dir"])
"""


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


@pytest.mark.parametrize("choice", ["", "chosen", "0"])
def test_a_program_in_python_keeps_what_it_compiles(bert, tmp_path, choice):
    bert_jax.save_pretrained(bert, tmp_path / "model")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "BERT_JAX_KEEP"))}
    environment |= {"BERT_JAX_CACHE": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / choice)} if choice == "chosen" else {}
    environment |= {"BERT_JAX_KEEP": choice} if choice == "0" else {}
    command = [sys.executable, "-c", USE, str(tmp_path / "model")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = {"": f"{tmp_path}/cache/compiled", "chosen": f"{tmp_path}/chosen", "0": "None"}[choice]
    assert done.stdout.strip() == expected
    assert choice == "0" or os.listdir(expected)


def test_the_oldest_programs_go(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_MAX_SIZE", raising=False)
    for age, name in enumerate("cab"):
        (tmp_path / name).write_bytes(bytes(10))
        os.utime(tmp_path / name, (age, age))
    drop_oldest(tmp_path, 25)
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    drop_oldest(tmp_path / "nowhere", 0)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "1")
    drop_oldest(tmp_path, 0)
    assert len(os.listdir(tmp_path)) == 2
