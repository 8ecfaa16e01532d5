# SPDX-License-Identifier: Apache-2.0
"""Gates on kernels and programs that XLA compiles for GPUs, on a machine without one: `make test-gpu-aot`."""

import dataclasses
import functools
import importlib
import re
import subprocess
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from bert_jax.devices.chips import GPUS
from bert_jax.devices.sharding import make_mesh
from bert_jax.model import fused_attention as fused
from bert_jax.model.attention_kernels import PRODUCTS_OF_KERNELS, AttentionShape
from bert_jax.plan import planner
from bert_jax.plan.gpus import OPTIONS, gpu_devices
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import DataConfig, MaskingConfig, OptimizerConfig, PretrainConfig, TrainConfig

pytestmark = pytest.mark.gpu_aot

ARCHITECTURES = {"h200": "sm_90a", "a100": "sm_80"}
SHARED_BYTES = {"h200": 227 * 2**10, "a100": 163 * 2**10}  # that a program may ask for
# Registers of a thread, at most; a program has 128 threads, and a core 65,536 registers.
MOST_REGISTERS = {
    "h200": {"attention_forward": 168, "attention_queries": 200, "attention_keys": 200},
    "a100": {"attention_forward": 232, "attention_queries": 240, "attention_keys": 255},
}


def ptxas() -> Path:
    nvcc = importlib.import_module("nvidia.cuda_nvcc")
    return Path(next(iter(nvcc.__path__))) / "bin" / "ptxas"


def kernels_of_attention(gpu, size, head_size, rate, causal, dump, window=0):
    """Returns registers, spilled bytes and shared memory of the kernels of both passes, by name."""
    shape = AttentionShape(2, head_size, causal, round((1 - rate) * 2**16), window=window)
    sharding = SingleDeviceSharding(gpu_devices(f"{gpu}:1", 1)[0])
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    array = struct((2, size, 2 * head_size), jnp.bfloat16)

    def gradients(query, key, value, ids, keys, gradient):
        attention = functools.partial(fused._attention, shape, "")
        return jax.vjp(lambda *floats: attention(*floats, ids, keys), query, key, value)[1](gradient)

    given = (array, array, array, struct((2, size), jnp.int32), struct((2, 2, 2), jnp.int32), array)
    return kernels(gpu, gradients, given, PRODUCTS_OF_KERNELS, dump)


def kernels(gpu, function, given, names, dump):
    """Returns registers, spilled bytes and shared memory of the kernels of a program that have these names."""
    jax.jit(function).lower(*given).compile(compiler_options=OPTIONS | {"xla_dump_to": str(dump)})
    found = {}
    for line in next(dump.glob("*thunk_sequence.txt")).read_text().splitlines():
        launch = re.search(r"kCustomKernel.*?(\w+) grid:.*shared_memory: (\d+) bytes", line)
        if launch and launch[1] in names:
            found[launch[1]] = {"shared": int(launch[2])}
    for path in dump.glob("*.ptx"):  # one of them has constants alone
        name = re.search(r"\.entry (\w+)", ptx := path.read_text())
        if name and name[1] in names:
            command = [ptxas(), "-v", f"--gpu-name={ARCHITECTURES[gpu]}", path, "-o", "/dev/null"]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            registers, spilled = re.search(r"Used (\d+) registers", told), re.search(r"(\d+) bytes spill stores", told)
            found[name[1]] |= {"registers": int(registers[1]), "spilled": int(spilled[1]), "ptx": ptx}
    return found


@pytest.mark.parametrize("gpu", ARCHITECTURES)
@pytest.mark.parametrize(
    ("size", "head_size", "rate", "causal", "window"),
    [
        (128, 64, 0.1, False, 0),
        (512, 64, 0.1, True, 0),
        (384, 32, 0.1, False, 0),
        (96, 64, 0.1, False, 0),
        (1024, 64, 0.0, False, 64),
    ],
)
def test_kernels_spill_nothing_and_fit_a_core(gpu, size, head_size, rate, causal, window, tmp_path):
    found = kernels_of_attention(gpu, size, head_size, rate, causal, tmp_path, window)
    assert set(found) == set(PRODUCTS_OF_KERNELS)
    for name, figures in found.items():
        print(gpu, size, head_size, rate, causal, window, name, {key: figures[key] for key in figures if key != "ptx"})
        assert figures["spilled"] == 0, name
        assert figures["registers"] <= MOST_REGISTERS[gpu][name], name
        assert figures["shared"] <= SHARED_BYTES[gpu] / 2, name  # two programs a core at least
    if gpu == "h200" and size >= 128:
        assert all("wgmma.mma_async" in figures["ptx"] for figures in found.values())


def configuration(rows, num_gpus=1, **changes):
    """Returns two layers of BERT-Base, rows of 512."""
    model = {"vocab_size": 30522, "compute_dtype": "bfloat16", "num_layers": 2} | changes.pop("model", {})
    return PretrainConfig(
        model=dataclasses.replace(model_size("base"), **model),
        masking=MaskingConfig(max_predictions=80),
        data=DataConfig(path="none", batch_size=rows * num_gpus),
        **changes,
    )


@functools.cache
def plan_of(attention, num_gpus=1, unroll=1):
    model = {"attention": attention, "unroll": unroll}
    train = TrainConfig(zero1="off")  # left open, several would divide the update
    return planner.plan(configuration(8, num_gpus, model=model, train=train), f"h200:{num_gpus}")


@pytest.mark.parametrize("unroll", [1, 2])
def test_fused_attention_moves_fewer_bytes_and_keeps_fewer(unroll):
    plain, fused_plan = plan_of("plain", unroll=unroll), plan_of("fused", unroll=unroll)
    for plan in (plain, fused_plan):
        print(unroll, plan.moved_bytes / 1e9, plan.bytes, plan.compiled_flops / plan.model_flops, plan.compile_seconds)
        assert plan.source.startswith("XLA, jax-cuda") and plan.fits
        assert 0.98 < plan.compiled_flops / plan.model_flops < 1.12
    assert fused_plan.moved_bytes < 0.75 * plain.moved_bytes
    assert fused_plan.bytes["temporaries"] < 0.75 * plain.bytes["temporaries"]


def test_cublas_moves_fewer_bytes_than_tritons_products(monkeypatch):
    """It writes bfloat16, adds biases and computes GELU; with Triton's, XLA leaves these to kernels of their own."""
    by_cublas = plan_of("fused", unroll=2)
    monkeypatch.setitem(OPTIONS, "xla_gpu_enable_triton_gemm", True)
    by_triton = planner.plan(configuration(8, model={"attention": "fused", "unroll": 2}), "h200:1")
    print(by_triton.moved_bytes / 1e9, by_cublas.moved_bytes / 1e9)
    assert by_cublas.moved_bytes < by_triton.moved_bytes


@pytest.mark.parametrize("attention", ["plain", "fused"])
def test_gradients_are_reduced_once_between_gpus(attention):
    plan = plan_of(attention, num_gpus=8)
    print(plan.collectives)
    assert {traffic.kind for traffic in plan.collectives} == {"all-reduce"}
    payload = sum(traffic.bytes for traffic in plan.collectives)
    assert plan.bytes["params"] <= payload <= 1.02 * plan.bytes["params"]


def test_kernels_take_rotary_positions_and_windows():
    """ModernBERT's mini, of whose four layers the first and the last see all."""
    model = dataclasses.replace(
        model_size("modernbert-mini"), vocab_size=30522, compute_dtype="bfloat16", attention="fused"
    )
    config = PretrainConfig(
        model=model,
        masking=MaskingConfig(rate=0.3),
        data=DataConfig(path="none", batch_size=4),
        optimizer=OptimizerConfig(name="stable_adamw", bias_correction=True, clip_norm=0.0),
        train=TrainConfig(next_sentence=False),
    )
    mesh = make_mesh(config.mesh, gpu_devices("h200:1", 1))
    lowered = planner.lower_train_step(config, mesh, planner.row_of(config, 448))
    text = lowered.compile(compiler_options=OPTIONS).as_text()
    assert Counter(re.findall(r'name = "(attention_\w+)"', text)) == dict.fromkeys(PRODUCTS_OF_KERNELS, 4)
    scores = [line for line in text.splitlines() if re.search(r"\b(f32|bf16)\[[\d,]*\b448,448\]", line)]
    assert not scores, scores[:3]
    shape, array = AttentionShape(4, 64, False, 2**16), jax.ShapeDtypeStruct((4, 448, 256), jnp.bfloat16)
    kernel = fused.kernels()["cuda"]
    windows = shape._replace(window=64)
    assert kernel.fits(windows, array) and not kernel.fits(windows._replace(kept=2**15), array)


def test_what_does_not_fit_a_gpu_is_told():
    config = configuration(8, model={"num_layers": 2})
    train = TrainConfig(accumulate=1)  # left open, the batch would be divided
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, batch_size=2048), train=train)
    plan = planner.plan(config, "a100:1")
    assert not plan.fits and "out of memory: 2048 rows at once" in plan.problem
    assert plan.hbm_bytes == GPUS["a100"].hbm_bytes


def test_sixteen_gpus_are_two_hosts():
    assert len(gpu_devices("h100:16", 16)) == 16
