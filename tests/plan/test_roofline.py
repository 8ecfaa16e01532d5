# SPDX-License-Identifier: Apache-2.0
"""The estimate of a step's time follows what the chip, the model and the mesh are."""

import dataclasses

import pytest

from bert_jax.batch import RowShape
from bert_jax.devices.chips import GPUS, TPUS
from bert_jax.plan import roofline
from bert_jax.plan.roofline import Traffic, expected_traffic, model_flops, step_seconds
from bert_jax.settings.model import model_size
from bert_jax.settings.pretraining import DataConfig, MaskingConfig, PretrainConfig, TrainConfig
from bert_jax.training import flops

CHIP = TPUS["v4"]
CONFIG = PretrainConfig(
    model=dataclasses.replace(model_size("large"), compute_dtype="bfloat16"),
    data=DataConfig(batch_size=64),
    masking=MaskingConfig(max_predictions=76),
)
ROW = RowShape(512, 1, 76, 2580)
ONE = {"data": 1, "fsdp": 1, "tensor": 1}


def seconds(config=CONFIG, mesh=ONE, collectives=(), chip=CHIP):
    return step_seconds(config, chip, mesh, ROW, collectives)


def test_a_step_is_the_sum_of_its_parts():
    parts = seconds()
    assert parts.pop("step") == pytest.approx(sum(parts.values()))
    assert parts["network"] == 0 and min(parts["products"], parts["attention"], parts["memory"]) > 0


def test_products_take_the_models_flops_at_the_share_of_the_peak():
    parts = seconds()
    attention = parts["attention"] / 2 * CHIP.bfloat16 * CHIP.matrix_efficiency
    products = parts["products"] * CHIP.bfloat16 * CHIP.matrix_efficiency
    assert products + attention == pytest.approx(model_flops(CONFIG, 1, ROW))
    assert model_flops(CONFIG, 4, ROW) == pytest.approx(model_flops(CONFIG, 1, ROW) / 4)


def test_a_kernel_on_a_tpu_moves_no_scores_and_computes_them_again():
    fused = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, attention="fused"))
    assert seconds(fused)["memory"] < seconds()["memory"]
    assert seconds(fused)["attention"] == pytest.approx(seconds()["attention"] * 7 / 6)


def test_rematerialization_repeats_the_forward_pass():
    full = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, remat="full"))
    assert seconds(full)["products"] == pytest.approx(seconds()["products"] * 4 / 3)


def test_an_all_reduce_moves_its_bytes_twice():
    moved = [
        seconds(collectives=(Traffic(kind, "f32", 1, 10**9, 8),))["network"] for kind in ("all-reduce", "all-gather")
    ]
    assert moved[0] == pytest.approx(2 * moved[1]) and moved[1] == pytest.approx(1e9 / CHIP.link_bandwidth)


def test_what_a_mesh_has_to_exchange():
    size = 4 * flops.num_parameters(CONFIG.model)
    assert expected_traffic(CONFIG, ONE, 512, size) == ()
    (sums,) = expected_traffic(CONFIG, ONE | {"data": 8}, 512, size)
    assert sums == Traffic("all-reduce", "f32", 1, size, 8)
    narrow = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, gradient_dtype="bfloat16"))
    assert expected_traffic(narrow, ONE | {"data": 8}, 512, size)[0].bytes == size // 2
    zero1 = dataclasses.replace(CONFIG, train=TrainConfig(zero1=True))
    matrices = 4 * 24 * (4 * 1024**2 + 2 * 1024 * 4096)  # the layers', which are gathered in bfloat16
    sent = [(each.kind, each.dtype, each.bytes) for each in expected_traffic(zero1, ONE | {"data": 8}, 512, size)]
    assert sent == [
        ("reduce-scatter", "f32", size),
        ("all-gather", "f32", size - matrices),
        ("all-gather", "bf16", matrices // 2),
    ]
    four = dataclasses.replace(CONFIG, train=TrainConfig(accumulate=4))
    assert expected_traffic(four, ONE | {"data": 8}, 512, size) == (sums,)
    layers = matrices // 2
    mixed = [expected_traffic(config, ONE | {"data": 4, "tensor": 2}, 512, size)[0].bytes for config in (CONFIG, four)]
    assert mixed[1] - mixed[0] == 3 * layers
    (tensor,) = expected_traffic(CONFIG, ONE | {"tensor": 4}, 512, size)
    assert tensor.count == 4 * 24 and tensor.bytes == 4 * 24 * 64 * 512 * 1024 * 2


def test_the_model_of_time_gives_what_google_measured_on_v4(monkeypatch):
    """MLPerf 0.7, BERT-Large on 64 chips of TPU v4, 7 rows of 512 each: 145 rows/s a chip, 53.8 % MFU.

    Their program shards the update, reduces gradients in bfloat16 and keeps scores on the chip; parameters are taken
    to be gathered in float32. 106 bytes are an estimate of fusions as tight as theirs; those of this project's programs
    are more, and are read from them.
    """
    config = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(CONFIG.model, vocab_size=30522, attention="fused", gradient_dtype="bfloat16"),
        train=TrainConfig(zero1=True),
        data=DataConfig(batch_size=7 * 64),
    )
    mesh = ONE | {"data": 64}
    theirs = dataclasses.replace(config, model=dataclasses.replace(config.model, compute_dtype="float32"))
    traffic = expected_traffic(theirs, mesh, 512, 4 * flops.num_parameters(config.model))
    with monkeypatch.context() as patch:
        patch.setitem(roofline.LAYER_BYTES, "tpu", (106, 106))
        step = step_seconds(config, CHIP, mesh, ROW, traffic)["step"]
    assert 7 / step == pytest.approx(145, rel=0.02)
    assert model_flops(config, 64, ROW) / step / CHIP.bfloat16 == pytest.approx(0.538, rel=0.02)
    ours = step_seconds(config, CHIP, mesh, ROW, traffic)["step"]
    unrolled = dataclasses.replace(config, model=dataclasses.replace(config.model, unroll=24))
    assert step < step_seconds(unrolled, CHIP, mesh, ROW, traffic)["step"] < ours


def test_compiled_bytes_take_the_place_of_estimated_ones():
    assert step_seconds(CONFIG, CHIP, ONE, ROW, (), 108e9)["memory"] == pytest.approx(108e9 / (0.9 * 1.2e12))


def test_the_kernels_for_gpus_compute_more_scores_again_and_move_none():
    gpu = GPUS["h200"]
    fused = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, attention="fused"))
    assert seconds(fused, chip=gpu)["memory"] < seconds(chip=gpu)["memory"]
    assert seconds(fused, chip=gpu)["attention"] == pytest.approx(seconds(chip=gpu)["attention"] * 9 / 6)
