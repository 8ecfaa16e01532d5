# SPDX-License-Identifier: Apache-2.0
"""A GPU computes what a CPU computes, the same bits each time, and says how much memory it took.

    JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/devices/test_gpu.py

BERT_JAX_GPU_TESTS_ON=cpu runs them on a CPU, to try the tests themselves before a GPU is at hand.
"""

import functools
import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from builders import CLS, MASK, SEP, fresh_state, random_batch, tiny_model
from processes import TRAIN, finish, wait_for_lines

import bert_jax
from benchmarks.timing import peak_memory
from bert_jax.devices.chips import peak_flops
from bert_jax.devices.sharding import make_mesh, row_sharding
from bert_jax.model.objective import PretrainingObjective
from bert_jax.settings.pretraining import MaskingConfig, MeshConfig, OptimizerConfig, TrainConfig
from bert_jax.training.program import Program

pytestmark = pytest.mark.gpu

PLATFORM = os.environ.get("BERT_JAX_GPU_TESTS_ON", "cuda").partition(",")[0].replace("cuda", "gpu")
# Two layers with heads of 64, as BERT's, in rows of 128: what a kernel for a GPU is made for.
MODEL = tiny_model(hidden_size=256, intermediate_size=512, max_positions=128)
# What is computed by a kernel: nothing or attention.
FUSED = {"fused": {"attention": "fused"}, "plain": {}}
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, warmup_steps=1)
TRAIN_CONFIG = TrainConfig(num_steps=10)
# XLA may order sums differently from run to run, unless it is told not to.
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


@pytest.fixture(scope="module", autouse=True)
def device():
    """Returns the GPU; skips where there is none."""
    if jax.default_backend() != PLATFORM:
        pytest.skip(f"needs a GPU, and JAX has {jax.default_backend()}: JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu")
    return jax.devices()[0]


def batch_of():
    """Returns rows of three sequences and padding."""
    return random_batch(num_rows=8, row_length=128, num_sequences=3)


@functools.cache
def loss_and_gradients(device, attention, dtype):
    """Returns the loss of masked words without dropout, and its gradients, in float32 of the host."""
    batch, changes = batch_of(), {**FUSED[attention], "compute_dtype": dtype}
    if dtype == "float32":  # the kernel of attention takes heads of up to 128 bytes
        changes |= {"matmul_precision": "highest", "hidden_size": 128}
    with jax.default_device(device):
        objective = PretrainingObjective(tiny_model(**{**vars(MODEL), **changes}), MaskingConfig(), MASK, (CLS, SEP))

        def loss(params):
            total, weight = objective.losses(params, objective.prepare(batch), None)["mlm_loss"]
            return total / weight

        value, gradients = jax.jit(jax.value_and_grad(loss))(objective.init(jax.random.key(0)))
    return float(value), jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), gradients)


def assert_close(ours, theirs, tolerance):
    """Compares a loss, and each gradient by its largest value."""
    np.testing.assert_allclose(ours[0], theirs[0], rtol=tolerance)
    for one, other in zip(*(jax.tree.leaves(gradients) for gradients in (ours[1], theirs[1])), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance * max(np.abs(other).max(), 1e-3))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-4), ("bfloat16", 4e-2)])
def test_a_kernel_computes_what_is_computed_plainly(device, dtype, tolerance):
    fused, plain = (loss_and_gradients(device, attention, dtype) for attention in FUSED)
    assert_close(fused, plain, tolerance)


def test_it_computes_what_a_cpu_computes(device):
    try:
        cpu = jax.devices("cpu")[0]
    except RuntimeError:
        pytest.skip("JAX has no CPU beside the GPU: JAX_PLATFORMS=cuda,cpu")
    on_gpu, on_cpu = (loss_and_gradients(place, "fused", "float32") for place in (device, cpu))
    assert_close(on_gpu, on_cpu, 2e-4)


@functools.cache
def trained(device, dtype, attention):
    """Returns loss and gradient norm of three steps with dropout, and the parameters after them and before."""
    model = tiny_model(
        **{**vars(MODEL), "compute_dtype": dtype, **FUSED[attention]}
        | {"hidden_dropout_rate": 0.1, "attention_dropout_rate": 0.1}
    )
    mesh = make_mesh(MeshConfig(data=1), [device])
    objective = PretrainingObjective(model, MaskingConfig(), MASK, (CLS, SEP))
    state = fresh_state(objective, OPTIMIZER, TRAIN_CONFIG, mesh)
    before = jax.device_get(state.params)
    step = Program(mesh).training(objective, OPTIMIZER, TRAIN_CONFIG, state)
    rows = jax.tree.map(lambda array: jax.device_put(array, row_sharding(mesh)), batch_of())
    history = []
    with jax.set_mesh(mesh):
        for _ in range(3):
            state, metrics = step(state, rows)
            history.append([float(metrics[name][0]) / float(metrics[name][1]) for name in ("loss", "grad_norm")])
    return np.array(history), jax.device_get(state.params), before


def moved(run):
    """Returns by how much each parameter has changed, as one vector."""
    _, after, before = run
    pairs = zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True)
    return np.concatenate([np.ravel(late) - np.ravel(early) for late, early in pairs])


@pytest.mark.parametrize("attention", FUSED)
def test_bfloat16_steps_are_those_of_float32_within_rounding(device, attention):
    exact, rounded = (trained(device, dtype, attention) for dtype in ("float32", "bfloat16"))
    np.testing.assert_allclose(rounded[0][:, 0], exact[0][:, 0], rtol=1e-2)  # losses
    np.testing.assert_allclose(rounded[0][:, 1], exact[0][:, 1], rtol=5e-2)  # norms of the gradients
    ours, theirs = moved(rounded), moved(exact)
    assert ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs) > 0.95


@pytest.mark.parametrize(("dtype", "attention"), [("float32", "plain"), ("bfloat16", "fused")])
def test_the_same_steps_have_the_same_bits(device, dtype, attention):
    first, second = trained(device, dtype, attention), trained.__wrapped__(device, dtype, attention)
    np.testing.assert_array_equal(first[0], second[0])
    jax.tree.map(np.testing.assert_array_equal, first[1], second[1])


@pytest.mark.parametrize("flags", ["", DETERMINISTIC], ids=["default", "deterministic"])
def test_a_killed_run_resumes_bit_for_bit(device, repository, toy_data, tmp_path, flags):
    """In processes of their own, as after a kill."""
    environment = os.environ | {
        "XLA_FLAGS": flags,
        "PYTHONPATH": f"{repository}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    environment |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    settings = ("--config.model.compute_dtype=bfloat16", f"--config.data.path={toy_data}", "--distributed=off")

    def start(workdir):
        command = [sys.executable, *TRAIN, *settings, f"--workdir={workdir}"]
        return subprocess.Popen(command, cwd=repository, env=environment, text=True, stderr=subprocess.PIPE)

    finish([start(tmp_path / "whole")])
    killed = start(tmp_path / "killed")
    wait_for_lines(tmp_path / "killed" / "metrics.jsonl", 12, [killed])  # between the checkpoints of steps 8 and 16
    killed.send_signal(signal.SIGKILL)
    finish([killed], expected=-signal.SIGKILL)
    finish([start(tmp_path / "killed")])
    whole, resumed = (bert_jax.load_pretrained(tmp_path / name).params for name in ("whole", "killed"))
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


def test_peak_and_memory_are_known(device):
    """Else the tables of a borrowed GPU have no MFU and no memory."""
    if PLATFORM != "gpu":
        pytest.skip("needs a GPU: of a CPU neither is known")
    jnp.ones((1024, 1024)).block_until_ready()
    assert peak_flops(device.device_kind, "bfloat16") > peak_flops(device.device_kind, "float32") > 0
    found = peak_memory(device)
    assert found["peak_memory_of"] == "device" and found["peak_memory_bytes"] >= 4 * 2**20
