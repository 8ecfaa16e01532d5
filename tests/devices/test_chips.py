# SPDX-License-Identifier: Apache-2.0
"""The table of accelerators."""

import pytest

from bert_jax.devices.chips import CHIPS, GPUS, TPUS, peak_flops


@pytest.mark.parametrize(
    ("device_kind", "dtype", "teraflops"),
    [
        ("TPU v2", "bfloat16", 23),
        ("TPU v3", "bfloat16", 61.5),
        ("TPU v4", "bfloat16", 275),
        ("TPU v5 lite", "bfloat16", 197),
        ("TPU v5p", "bfloat16", 459),
        ("TPU v5", "float32", 459),
        ("TPU v6 lite", "bfloat16", 918),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H200", "bfloat16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "float32", 156),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40S", "bfloat16", 0),
        ("Tesla V100-SXM2-16GB", "float32", 15.7),
        ("Tesla T4", "bfloat16", 8.1),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16", 0),
        ("NVIDIA H200", "float8", 0),
        ("cpu", "float32", 0),
    ],
)
def test_peak_flops(device_kind, dtype, teraflops):
    assert peak_flops(device_kind, dtype) == pytest.approx(teraflops * 1e12)


def test_no_entry_hides_a_later_one_and_what_is_planned_for_is_whole():
    for number, chip in enumerate(CHIPS):
        assert peak_flops(chip.device_kind, "bfloat16") == chip.bfloat16, chip.device_kind
        assert chip.device_kind not in {other.device_kind for other in CHIPS[:number]}
    assert sorted(TPUS) == ["v4", "v5e", "v5p", "v6e"] and sorted(GPUS) == ["a100", "h100", "h200"]
    for chip in (*TPUS.values(), *GPUS.values()):
        assert min(chip.hbm_bytes, chip.hbm_bandwidth, chip.link_bandwidth) > 0
        assert (chip.network_bandwidth > 0) != chip.is_tpu
