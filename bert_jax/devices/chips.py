# SPDX-License-Identifier: Apache-2.0
"""The table of accelerators, with figures from their data sheets."""

from dataclasses import dataclass
from typing import Any

GIB = 2**30
MIB = 2**20
GPUS_PER_HOST = 8


@dataclass(frozen=True)
class Chip:
    """The figures of one JAX device. Bandwidths are in bytes/s."""

    device_kind: str  # `jax.Device.device_kind`, or its beginning
    bfloat16: float  # peak FLOP/s of dense matrix products
    float32: float  # the same for float32 at JAX's default precision
    # Figures for the planner, which knows only chips with a family.
    family: str = ""  # as in --topology=FAMILY:SIZE
    hbm_bytes: float = 0.0
    hbm_bandwidth: float = 0.0
    link_bandwidth: float = 0.0  # from a chip to its neighbours, sum of all links in one direction
    # from a GPU to other hosts; 0 for TPUs, which the links connect across hosts
    network_bandwidth: float = 0.0
    megacore: bool = False  # libtpu compiles both cores of a chip as one device
    vmem_bytes: int = (
        0  # of a TPU's own memory beside its units, where libtpu was seen to keep activations there
    )

    @property
    def is_tpu(self) -> bool:
        return self.device_kind.startswith("TPU")


def _same(device_kind: str, flops: float, **rest: float | str | bool) -> Chip:
    return Chip(device_kind, flops, flops, **rest)  # type: ignore[arg-type]


def _tpu(
    device_kind: str,
    flops: float,
    family: str,
    hbm: float,
    bandwidth: float,
    links: float,
    vmem: int = 0,
) -> Chip:
    rest = {"hbm_bytes": hbm * GIB, "hbm_bandwidth": bandwidth, "link_bandwidth": links}
    megacore = family in ("v4", "v5p")
    return _same(device_kind, flops, family=family, **rest, megacore=megacore, vmem_bytes=vmem)


def _gpu(
    device_kind: str,
    bfloat16: float,
    family: str,
    hbm: float,
    bandwidth: float,
    links: float,
    net: float,
) -> Chip:
    return Chip(device_kind, bfloat16, bfloat16 / 2, family, hbm, bandwidth, links, net)


# The first entry that begins a device's kind, in whole words, is the device's. On TPUs float32 matrices are multiplied
# in one bfloat16 pass, on NVIDIA GPUs since Ampere in TF32; older ones have no bfloat16 units, and XLA computes in
# float32. Sources: Google Cloud TPU system architecture pages, per chip, divided by 2 where JAX shows each core of a
# chip as a device (v2, v3, 7x), with interchip links of 45 GB/s each way, 4 on v5e and v6e, 6 else; v6e 90. NVIDIA's
# data sheets, without sparsity; NVLink each way, at 80 %, and one 400 (A100: 200) Gb/s adapter a GPU. VMEM: JAX's table
# of TPUs, of those whose compiled programs were read (docs/planner.md).
CHIPS = (
    _same("TPU v2", 23e12),
    _same("TPU v3", 61.5e12),
    _same("TPU v4 lite", 137e12),
    _tpu("TPU v4", 275e12, "v4", 32, 1.2e12, 270e9),
    _tpu("TPU v5 lite", 197e12, "v5e", 16, 0.819e12, 180e9, 128 * MIB),
    _same("TPU v5e", 197e12, vmem_bytes=128 * MIB),
    _same("TPU v5p", 459e12),
    _tpu("TPU v5", 459e12, "v5p", 95, 2.765e12, 540e9),
    _tpu("TPU v6 lite", 918e12, "v6e", 32, 1.64e12, 360e9, 128 * MIB),
    _same("TPU v6e", 918e12, vmem_bytes=128 * MIB),
    _same("TPU7x", 1153.5e12),
    Chip("NVIDIA B200", 2250e12, 1125e12),
    Chip("NVIDIA GH200", 989.4e12, 494.7e12),
    Chip("NVIDIA H200 NVL", 835.5e12, 417.5e12),
    _gpu("NVIDIA H200", 989.4e12, "h200", 141e9, 4.8e12, 360e9, 50e9),
    Chip("NVIDIA H100 PCIe", 756e12, 378e12),
    Chip("NVIDIA H100 NVL", 835.5e12, 417.5e12),
    _gpu("NVIDIA H100", 989.4e12, "h100", 80e9, 3.35e12, 360e9, 50e9),
    _gpu("NVIDIA A100", 312e12, "a100", 80e9, 2.039e12, 240e9, 25e9),
    Chip("NVIDIA A10G", 70e12, 35e12),
    Chip("NVIDIA L4", 121e12, 60e12),
    _same("Tesla V100-PCIE", 14e12),
    _same("Tesla V100", 15.7e12),
    _same("Tesla T4", 8.1e12),
)
TPUS = {chip.family: chip for chip in CHIPS if chip.family and chip.is_tpu}
GPUS = {chip.family: chip for chip in CHIPS if chip.family and not chip.is_tpu}


def peak_flops(device_kind: str, dtype: str) -> float:
    """Returns the peak FLOP/s of matrix products on one device (`jax.Device.device_kind`), or 0.0 if unknown.

    It is unknown for CPUs, for slices of a GPU and for dtypes other than "bfloat16" and "float32".
    """
    chip = _chip_of(device_kind)
    if chip is None or dtype not in ("bfloat16", "float32") or " MIG " in device_kind:
        return 0.0
    return chip.bfloat16 if dtype == "bfloat16" else chip.float32


def vmem_bytes(device_kind: str) -> int:
    """Returns the bytes of a TPU's VMEM (`jax.Device.device_kind`), or 0 of devices that are not known to use it so."""
    chip = _chip_of(device_kind)
    return chip.vmem_bytes if chip else 0


def _chip_of(device_kind: str) -> Chip | None:
    for chip in CHIPS:
        if f"{device_kind} ".startswith((f"{chip.device_kind} ", f"{chip.device_kind}-")):
            return chip
    return None


def multiplies_faster_in_bfloat16(device: Any) -> bool:
    """Returns whether a device has units for bfloat16: TPUs, and NVIDIA's GPUs from Ampere on."""
    if device.platform == "tpu":
        return True
    if device.platform not in ("gpu", "cuda"):
        return False
    # A number for NVIDIA's, as 8.0 for Ampere; others have names.
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return major.isdigit() and int(major) >= 8
