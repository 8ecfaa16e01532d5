# SPDX-License-Identifier: Apache-2.0
"""GPUs for planning, as far as they need no compiler; with it: test_plan_gpu_aot.py."""

import importlib.metadata

import pytest

from bert_jax.devices.chips import GPUS
from bert_jax.errors import InputError
from bert_jax.plan import gpus
from bert_jax.plan.gpus import compiler_version, gpu_devices, target_config


@pytest.mark.parametrize("family", GPUS)
def test_every_gpu_that_is_planned_for_is_described(family):
    text = target_config(GPUS[family])
    assert f'device_description_str: "{GPUS[family].device_kind}"' in text
    assert f"memory_bandwidth: {GPUS[family].hbm_bandwidth:.0f}\n" in text
    assert f"major: {8 if family == 'a100' else 9} }}" in text


def test_the_compiler_is_that_of_the_newest_cuda_that_is_installed(monkeypatch):
    installed = {"jax-cuda12-pjrt": "0.10.2"}

    def version(package):
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert compiler_version() == "jax-cuda12-pjrt 0.10.2"
    installed["jax-cuda13-pjrt"] = "0.10.2"
    assert compiler_version() == "jax-cuda13-pjrt 0.10.2"
    installed.clear()
    assert compiler_version() == ""


def test_hosts_must_be_full():
    with pytest.raises(InputError, match="'h200:12' does not fill hosts of 8 GPUs; use h200:8 or h200:16"):
        gpu_devices("h200:12", 12)


def test_a_compiler_that_cannot_be_used_is_one_line(monkeypatch):
    def refuse(**options):
        assert (options["platform"], options["topology"]) == ("cuda", "1x2x8")
        raise RuntimeError("Unknown platform\n cuda")

    monkeypatch.setattr(gpus.topologies, "get_topology_desc", refuse)
    with pytest.raises(InputError, match=r"cannot be used here: Unknown platform cuda; install .*bert_jax\[gpu-plan\]"):
        gpu_devices("h100:16", 16)
