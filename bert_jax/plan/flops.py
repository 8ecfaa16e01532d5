# SPDX-License-Identifier: Apache-2.0
"""How much arithmetic a BERT takes, how many parameters it has, and what a device can do at best."""

from bert_jax.settings.model import ModelConfig

# Best dense matrix throughput of one jax device, in TFLOP/s: (bfloat16, float32 as jax multiplies it by default).
# The first entry that begins the device's kind, in whole words, wins. On TPUs float32 matrices are multiplied in one
# bfloat16 pass, on NVIDIA GPUs since Ampere in TF32; older ones have no bfloat16 units, and XLA computes in float32.
# Sources: Google Cloud TPU system architecture pages, per chip, divided by 2 where jax shows each core of a chip
# as a device (v2, v3, 7x); NVIDIA's data sheets, without sparsity.
_PEAK_TERAFLOPS = {
    "TPU v2": (23.0, 23.0),
    "TPU v3": (61.5, 61.5),
    "TPU v4 lite": (137.0, 137.0),
    "TPU v4": (275.0, 275.0),
    "TPU v5 lite": (197.0, 197.0),
    "TPU v5e": (197.0, 197.0),
    "TPU v5p": (459.0, 459.0),
    "TPU v5": (459.0, 459.0),  # also v5p
    "TPU v6 lite": (918.0, 918.0),
    "TPU v6e": (918.0, 918.0),
    "TPU7x": (1153.5, 1153.5),
    "NVIDIA B200": (2250.0, 1125.0),
    "NVIDIA GH200": (989.4, 494.7),
    "NVIDIA H200 NVL": (835.5, 417.5),
    "NVIDIA H200": (989.4, 494.7),
    "NVIDIA H100 PCIe": (756.0, 378.0),
    "NVIDIA H100 NVL": (835.5, 417.5),
    "NVIDIA H100": (989.4, 494.7),
    "NVIDIA A100": (312.0, 156.0),
    "NVIDIA A10G": (70.0, 35.0),
    "NVIDIA L4": (121.0, 60.0),
    "Tesla V100-PCIE": (14.0, 14.0),
    "Tesla V100": (15.7, 15.7),
    "Tesla T4": (8.1, 8.1),
}


def forward_flops(
    model: ModelConfig, num_tokens: float, sum_squared_lengths: float, num_predictions: float, num_sequences: float
) -> float:
    """Returns the FLOPs of one forward pass with both heads; a multiplication and an addition are 2.

    Only matrix products count, and only what the model needs: give the numbers of real tokens, of the squared
    lengths of real sequences and of real predictions, and padding is work that earns nothing.
    """
    hidden = model.hidden_size
    per_token = model.num_layers * (8 * hidden**2 + 4 * hidden * model.intermediate_size)
    attention = model.num_layers * 4 * hidden * sum_squared_lengths  # scores, and the sums they weigh
    masked_language_model = num_predictions * 2 * (hidden**2 + hidden * model.vocab_size)
    pooler = num_sequences * 2 * hidden**2
    return per_token * num_tokens + attention + masked_language_model + pooler


def train_flops(
    model: ModelConfig, num_tokens: float, sum_squared_lengths: float, num_predictions: float, num_sequences: float
) -> float:
    """Returns the FLOPs of training on this much: the backward pass is twice the forward pass.

    What rematerialisation computes again is not counted.
    """
    return 3 * forward_flops(model, num_tokens, sum_squared_lengths, num_predictions, num_sequences)


def num_parameters(model: ModelConfig, heads: bool = True) -> int:
    """Returns the number of parameters, with or without the heads of pre-training.

    The rows that pad the word table to a multiple are not counted: they are zero and stay zero.
    """
    hidden, wide = model.hidden_size, model.intermediate_size
    norm = 2 * hidden
    embeddings = (model.vocab_size + model.max_positions + model.type_vocab_size) * hidden + norm
    attention = 4 * (hidden**2 + hidden) + norm
    feed_forward = 2 * hidden * wide + wide + hidden + norm
    pooler = hidden**2 + hidden
    encoder = embeddings + model.num_layers * (attention + feed_forward) + pooler
    masked_language_model = hidden**2 + hidden + norm + model.vocab_size  # its matrix is the word table
    next_sentence = 2 * hidden + 2
    return encoder + (masked_language_model + next_sentence if heads else 0)


def peak_flops(device_kind: str, dtype: str) -> float:
    """Returns the most FLOP/s that one device (`jax.Device.device_kind`) multiplies matrices at, or 0.0 if unknown.

    It is unknown for CPUs, for slices of a GPU and for dtypes other than "bfloat16" and "float32".
    """
    if dtype not in ("bfloat16", "float32") or " MIG " in device_kind:
        return 0.0
    for beginning, (bfloat16, float32) in _PEAK_TERAFLOPS.items():
        if f"{device_kind} ".startswith((f"{beginning} ", f"{beginning}-")):
            return 1e12 * (bfloat16 if dtype == "bfloat16" else float32)
    return 0.0
