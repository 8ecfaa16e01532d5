# SPDX-License-Identifier: Apache-2.0
"""The estimate of memory, and the line that a run prints before it compiles."""

import dataclasses

import jax
import pytest
from builders import CLS, MASK, SEP, tiny_model, tiny_run

from bert_jax.batches.load import abstract_batch
from bert_jax.data.records import row_dtype
from bert_jax.devices.sharding import make_mesh
from bert_jax.model.objective import PretrainingObjective
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import MaskingConfig, MeshConfig
from bert_jax.training.memory import activation_bytes, describe_memory, estimate_memory, in_units
from bert_jax.training.step import abstract_state


def of_objective(config, mesh, *, length=32, sequences=1):
    """Returns the state of a run, and the shape of its rows."""
    objective = PretrainingObjective(config.model, config.masking, MASK, (CLS, SEP))
    row = objective.row_shape(abstract_batch(row_dtype(length, sequences, config.model.vocab_size)))
    return abstract_state(objective, config.optimizer, config.train, mesh), row


def memory_of(config, mesh, **sizes):
    state, row = of_objective(config, mesh, **sizes)
    return estimate_memory(config.model, config.data.batch_size, config.train.microbatches, state, mesh.shape, row)


@pytest.mark.parametrize(
    ("causal", "length", "sequences", "limit", "predictions"),
    [
        (False, 128, 1, 20, 19),
        (False, 512, 1, 0, 77),
        (False, 512, 4, 20, 80),
        (True, 512, 1, 20, 511),
        (True, 128, 3, 0, 127),
    ],
)
def test_logits_are_those_of_the_rows_themselves(causal, length, sequences, limit, predictions):
    """Rows hold several sequences, and a model that reads from left to right predicts at every position but one."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    model = tiny_model(causal=causal, max_positions=512)
    config = tiny_run("data", model=model, masking=MaskingConfig(max_predictions=limit))
    _, row = of_objective(config, mesh, length=length, sequences=sequences)
    assert (row.length, row.sequences, row.predictions) == (length, sequences, predictions)
    logits = memory_of(config, mesh, length=length, sequences=sequences)["logits"]
    assert logits == config.data.batch_size * predictions * model.padded_vocab_size * 8


@pytest.mark.parametrize("bias_correction", [False, True])
def test_a_mean_in_bfloat16_takes_two_bytes_less_for_each_parameter(bias_correction):
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    estimates = []
    for dtype in ("float32", "bfloat16"):
        config = tiny_run("data", model=tiny_model())
        optimizer = dataclasses.replace(config.optimizer, state_dtype=dtype, bias_correction=bias_correction)
        config = dataclasses.replace(config, optimizer=optimizer)
        estimates.append(memory_of(config, mesh))
    wide, narrow = estimates
    assert wide["optimizer"] == pytest.approx(2 * wide["params"], abs=8)  # and counts of steps
    assert narrow["optimizer"] == pytest.approx(1.5 * wide["params"], abs=8)
    assert wide["total"] - narrow["total"] == wide["params"] // 2


def test_muon_keeps_one_moment_of_its_matrices():
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    config = tiny_run("data", model=tiny_model())
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name="muon"))
    found = memory_of(config, mesh)
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 64)  # of two layers
    assert found["optimizer"] == pytest.approx(2 * found["params"] - 4 * matrices, abs=8)


def test_the_line_names_every_kind_and_the_total():
    mesh = make_mesh(MeshConfig(data=2, fsdp=4), jax.devices())
    config = tiny_run("data", model=tiny_model())
    state, row = of_objective(config, mesh)
    kinds = memory_of(config, mesh)
    line = describe_memory(config, state, mesh, row)
    assert line.startswith(f"memory of a device, estimated: {in_units(kinds['total'])}: params ")
    for kind in ("params", "optimizer", "activations", "batch"):
        assert f"{kind} {in_units(kinds[kind])}" in line


@pytest.mark.parametrize(("size", "text"), [(1.25 * 2**30, "1.25 GiB"), (340 * 2**20, "340 MiB"), (512, "0.5 KiB")])
def test_sizes_are_for_people(size, text):
    assert in_units(size) == text


def test_long_rows_and_windows_keep_no_scores():
    mini = dataclasses.replace(model_size("mini"), vocab_size=8000, max_positions=8192)
    long, short = activation_bytes(mini, 8192), activation_bytes(mini, 512)
    assert long < 2 * 16 * short
    windows = dataclasses.replace(model_size("modernbert-mini"), vocab_size=8000)
    whole = dataclasses.replace(windows, window=0)
    assert activation_bytes(windows, 1024) < activation_bytes(whole, 1024) / 2
