# SPDX-License-Identifier: Apache-2.0
"""The table of accelerators."""

import pytest

from bert_jax.devices.chips import CHIPS, GPUS, TPUS, peak_flops


@pytest.mark.parametrize(
    ("device_kind", "dtype", "teraflops"),
    [
        ("TPU v5 lite", "bfloat16", 197),
        ("TPU v5", "float32", 459),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA A100-SXM4-80GB", "float32", 156),
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
