# SPDX-License-Identifier: Apache-2.0
"""A roofline estimate of the time of a training step, from the data sheet of the chip and named assumptions."""

from dataclasses import dataclass

from bert_jax.batch import RowShape
from bert_jax.devices.chips import GPUS_PER_HOST, Chip, peak_flops
from bert_jax.devices.sharding import is_data_alone
from bert_jax.settings.pretraining import ResolvedConfig
from bert_jax.training import flops

# The model of time. Sources: performance notes of this project; all of it is assumption until measured on the device.
HBM_EFFICIENCY = 0.9
# Bytes per hidden unit, token and layer, both passes, fused attention, by platform: layers in a loop, and unrolled. A
# loop stacks what the backward pass reads, and so moves it once more. Read from BERT-Large as compiled: for v5e by
# libtpu 0.0.42.1, which keeps much of it on the chip, and for H200 by XLA.
LAYER_BYTES = {"tpu": (228, 162), "gpu": (500, 337)}
SCORE_BYTES = {"tpu": 25, "gpu": 41}  # per score of attention, both passes, where attention is not one kernel
OPTIMIZER_BYTES = 34  # per parameter and step


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind and dtype."""

    kind: str
    dtype: str
    count: int  # runs in a step
    bytes: int  # of all runs
    group_size: int


def step_seconds(
    config: ResolvedConfig,
    chip: Chip,
    mesh_shape: dict[str, int],
    row: RowShape,
    collectives: tuple[Traffic, ...],
    moved_bytes: float = 0.0,
) -> dict[str, float]:
    """Returns the seconds that a step takes, by part, and of all parts one after the other ("step").

    Large products run at `matrix_efficiency` of the peak, those of attention at half of that, norms and the like at
    HBM's bandwidth. An all-reduce moves its bytes twice. Communication overlaps with nothing.
    Rematerialization "dots" and fused attention recompute the scores, one attention product in six, and the kernels
    for GPUs two more; "full" recomputes the whole forward pass. `moved_bytes` are those of the compiled program; 0
    estimates them.
    """
    model = config.model
    num_chips = mesh_shape["data"] * mesh_shape["fsdp"] * mesh_shape["tensor"]
    tokens = config.data.batch_size * row.length / num_chips
    peak = peak_flops(chip.device_kind, model.compute_dtype) * chip.matrix_efficiency
    scores = (model.num_layers - model.num_local) * row.length + model.num_local * min(row.length, 3 * model.window)
    attention = 3 * 4 * model.hidden_size * tokens * scores  # between sequences too, and of blocks for windows
    elementwise = _elementwise_bytes(config, chip) * model.hidden_size
    elementwise += _score_bytes(config, chip) * model.num_heads * row.length
    others = model_flops(config, num_chips, row) - attention / row.sequences
    again = 2 * (model.remat == "full") + (model.attention == "fused" or model.remat == "dots")
    again += 2 * (model.attention == "fused" and not chip.is_tpu)
    attention *= 1 + again / 6
    if model.remat == "full":
        others *= 4 / 3
    updated = flops.num_parameters(model) / (mesh_shape["fsdp"] * mesh_shape["tensor"])
    if config.train.zero1:
        updated /= mesh_shape["data"]
    moved = sum(traffic.bytes * (2 if traffic.kind == "all-reduce" else 1) for traffic in collectives)
    network = moved / chip.link_bandwidth
    if chip.network_bandwidth and num_chips > GPUS_PER_HOST:  # reduced within a host first
        network += moved / GPUS_PER_HOST / chip.network_bandwidth
    parts = {
        "products": others / peak,
        "attention": attention / (peak / 2),
        "memory": (moved_bytes or elementwise * model.num_layers * tokens + OPTIMIZER_BYTES * updated)
        / (HBM_EFFICIENCY * chip.hbm_bandwidth),
        "network": network,
    }
    return parts | {"step": sum(parts.values())}


def _elementwise_bytes(config: ResolvedConfig, chip: Chip) -> int:
    """Returns the bytes per hidden unit, token and layer of this project's programs."""
    model = config.model
    in_loop, unrolled = LAYER_BYTES[chip.platform]
    return in_loop if model.layers_at_once(chip.platform) < model.num_layers else unrolled


def _score_bytes(config: ResolvedConfig, chip: Chip) -> int:
    """Returns the bytes that a score of attention moves in both passes: none where a kernel keeps them in the core."""
    return 0 if config.model.attention == "fused" else SCORE_BYTES[chip.platform]


def model_flops(config: ResolvedConfig, num_chips: int, row: RowShape) -> float:
    """Returns the FLOPs of one chip and step that the model needs, for full rows of sequences of equal length."""
    rows = config.data.batch_size / num_chips
    counts = (row.length, row.length**2 / row.sequences, row.predictions, row.sequences)
    return flops.train_flops(config.model, *(rows * count for count in counts))


def assumptions(config: ResolvedConfig, chip: Chip, moved_bytes: float = 0.0) -> tuple[str, ...]:
    """Returns the assumptions of `step_seconds` as text."""
    peak = peak_flops(chip.device_kind, config.model.compute_dtype)
    moved = (
        f"the compiled program's {moved_bytes / 1e9:,.2f} GB of HBM"
        if moved_bytes
        else f"{_elementwise_bytes(config, chip)} bytes per hidden unit, token and layer, "
        f"{_score_bytes(config, chip)} per score, {OPTIMIZER_BYTES} per parameter"
    )
    return (
        f"products at {chip.matrix_efficiency:.0%} of {peak / 1e12:,.0f} TFLOP/s, those of attention at half of it",
        f"{moved}, at {HBM_EFFICIENCY:.0%} of {chip.hbm_bandwidth / 1e12:.2f} TB/s",
        f"collectives at {chip.link_bandwidth / 1e9:.0f} GB/s a chip, hidden behind nothing"
        + (", between slices too" if config.mesh.dcn > 1 else "")
        + "; no wait for the loader",
    )


def expected_traffic(
    config: ResolvedConfig, sizes: dict[str, int], row_length: int, param_bytes: int
) -> tuple[Traffic, ...]:
    """Returns the collectives that a mesh makes necessary: gradients, parameters in parts, activations in parts.

    `param_bytes` are those of the parameters on a device, gathered over "data" (`memory.gathered_bytes`).
    """
    model, accumulate = config.model, config.train.accumulate
    traffic = []
    gradient_dtype, narrow = ("bf16", 2) if model.gradient_dtype == "bfloat16" else ("f32", 1)
    # Where fsdp or tensor divide layers, devices add them up in each microbatch (decision 0034).
    again = 0 if is_data_alone(sizes) else accumulate - 1
    num_projections = 3 if model.feed_forward == "gated" else 2
    matrices = 4 * model.hidden_size**2 + num_projections * model.hidden_size * model.intermediate_size
    layer_bytes = 4 * model.num_layers * matrices // (sizes["fsdp"] * sizes["tensor"])
    gradients = (param_bytes + layer_bytes * again) // narrow
    if sizes["data"] > 1 and config.train.zero1:
        traffic.append(Traffic("reduce-scatter", gradient_dtype, 1, gradients, sizes["data"]))
        narrow_layers = layer_bytes if model.compute_dtype == "bfloat16" else 0
        traffic.append(Traffic("all-gather", "f32", 1, param_bytes - narrow_layers, sizes["data"]))
        if narrow_layers:
            traffic.append(Traffic("all-gather", "bf16", 1, narrow_layers // 2, sizes["data"]))
    elif sizes["data"] > 1:
        traffic.append(Traffic("all-reduce", gradient_dtype, 1, gradients, sizes["data"]))
    if sizes["fsdp"] > 1:  # gathered for each pass, and the gradients' parts summed
        whole = param_bytes * sizes["fsdp"] * accumulate
        traffic.append(Traffic("all-gather", "f32", 2 * model.num_layers, 2 * whole, sizes["fsdp"]))
        traffic.append(Traffic("reduce-scatter", gradient_dtype, model.num_layers, whole // narrow, sizes["fsdp"]))
    if sizes["tensor"] > 1:  # after attention and after the feed-forward block, in both passes
        rows = config.data.batch_size // (sizes["data"] * sizes["fsdp"])
        size = 2 if model.compute_dtype == "bfloat16" else 4
        hidden = rows * row_length * model.hidden_size * size
        traffic.append(Traffic("all-reduce", model.compute_dtype, 4 * model.num_layers, 4 * model.num_layers * hidden,
                             sizes["tensor"]))  # fmt: skip
    return tuple(traffic)
