# SPDX-License-Identifier: Apache-2.0
"""GPUs that are not there, for XLA's GPU compiler, which needs none."""

import importlib.metadata
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from bert_jax.devices.chips import GPUS, GPUS_PER_HOST, Chip
from bert_jax.errors import InputError

# The parts of JAX that have the compiler, by the version of CUDA that they are for.
PACKAGES = ("jax-cuda13-pjrt", "jax-cuda12-pjrt")
# Without a GPU nothing can be timed, so the compiler takes its default kernels.
OPTIONS: dict[str, str | bool] = {"xla_gpu_autotune_level": "0"}


class _Cores(NamedTuple):
    """What the compiler needs of a GPU beside `Chip`. Source: NVIDIA's CUDA programming guide and data sheets."""

    capability: int  # the first digit of the compute capability
    cores: int  # streaming multiprocessors
    float32_lanes: int  # of a core
    shared_bytes: int  # of a core
    block_shared_bytes: int  # that one block may ask for
    cache_bytes: int  # of the second level
    clock_ghz: float


_HOPPER = _Cores(9, 132, 128, 228 * 2**10, 227 * 2**10, 50 * 2**20, 1.98)
_CORES = {
    "h200": _HOPPER,
    "h100": _HOPPER,
    "a100": _Cores(8, 108, 64, 164 * 2**10, 163 * 2**10, 40 * 2**20, 1.41),
}


def compiler_version() -> str:
    """Returns the installed package that has XLA's GPU compiler, with its version; "" if there is none."""
    for package in PACKAGES:
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def gpu_devices(topology: str, num_gpus: int) -> Sequence[Any]:
    """Returns the GPUs of a topology such as "h200:8", for compiling only. `compiler_version` must not be "".

    Raises: InputError if the compiler cannot be used, as where its version is not that of jaxlib, or if there are more
    GPUs than a host has and they do not fill hosts.
    """
    family = topology.partition(":")[0]
    hosts, rest = divmod(num_gpus, GPUS_PER_HOST)
    if hosts and rest:
        whole = f"{family}:{hosts * GPUS_PER_HOST} or {family}:{(hosts + 1) * GPUS_PER_HOST}"
        raise InputError(
            f"topology {topology!r} does not fill hosts of {GPUS_PER_HOST} GPUs; use {whole}"
        )
    sizes = f"1x{hosts}x{GPUS_PER_HOST}" if num_gpus > GPUS_PER_HOST else f"1x1x{num_gpus}"
    # it warns that there is no GPU, several times
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        description = topologies.get_topology_desc(
            platform="cuda",
            topology_name=family,
            target_config=target_config(GPUS[family]),
            topology=sizes,
        )
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError, RuntimeError) as error:
        reason = re.sub(r"\s+", " ", str(error))[:200]
        fix = f"install that of jaxlib {importlib.metadata.version('jaxlib')}: pip install 'bert_jax[gpu-plan]'"
        raise InputError(
            f"XLA's GPU compiler ({compiler_version()}) cannot be used here: {reason}; {fix}"
        ) from None
    assert len(description.devices) == num_gpus, f"{len(description.devices)} devices of {topology}"
    return description.devices


def target_config(chip: Chip) -> str:
    """Returns XLA's description of a GPU, a `GpuTargetConfigProto` as text."""
    cores = _CORES[chip.family]
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {cores.shared_bytes}
  threads_per_core_limit: 2048
  core_count: {cores.cores}
  fpus_per_core: {cores.float32_lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {chip.hbm_bandwidth:.0f}
  l2_cache_size: {cores.cache_bytes}
  clock_rate_ghz: {cores.clock_ghz}
  device_memory_size: {chip.hbm_bytes:.0f}
  shared_memory_per_block_optin: {cores.block_shared_bytes}
  cuda_compute_capability {{ major: {cores.capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{chip.device_kind}"
"""
