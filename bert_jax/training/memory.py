# SPDX-License-Identifier: Apache-2.0
"""Memory of a training step on each device, estimated by arithmetic, without compiling."""

import math
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from bert_jax.batch import PyTree, RowShape
from bert_jax.model.attention import LONGEST_WHOLE
from bert_jax.model.long_rows import SCORES
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import ResolvedConfig
from bert_jax.training.step import TrainState

# What the backward pass reads, for each token and layer, by model.remat: hidden sizes and intermediate sizes in the
# compute dtype, and hidden sizes of dropout in bytes. "none" keeps the inputs of all products (hidden twice, query,
# key, value, context, that of the feed-forward block), of the activation and of both norms. "dots" keeps the outputs of
# the products (with the layer's input), "full" the layer's input alone.
_KEPT_OF_TOKENS = {"none": (8.0, 2.0, 2.0), "dots": (7.0, 1.0, 0.0), "full": (1.0, 0.0, 0.0)}
# More intermediate sizes of a gated block: the gate, and the activation without it.
_KEPT_OF_GATE = {"none": 2.0, "dots": 1.0, "full": 0.0}
# Bytes kept for each score of attention: softmax in float32, and a bit of dropout in a byte; and one in the compute
# dtype. The scores of one layer and their gradients are always there, whatever is kept.
_KEPT_OF_SCORES = {"none": 5, "dots": 0, "full": 0}
_WORKING_OF_SCORES = 12


def estimate_memory(
    model: ModelConfig,
    batch_size: int,
    accumulate: int,
    state: TrainState,
    mesh_shape: Mapping[str, int],
    row: RowShape,
) -> dict[str, int]:
    """Returns bytes per device by kind, and their total, of a step on a global batch in so many microbatches.

    `state` is a training state of arrays or of shapes with shardings (`step.abstract_state`). An estimate:
    `docs/planner.md` compares it with the compiler's figures.
    """
    rows = batch_size // (mesh_shape["data"] * mesh_shape["fsdp"])
    at_once = max(1, rows // accumulate)
    params = gathered_bytes(state.params)
    table = 4 * model.padded_vocab_size * model.embedding_width // mesh_shape["tensor"]
    kinds = {
        "params": shard_bytes(state.params),
        "optimizer": shard_bytes(state.optimizer),
        "gradients": params * (2 if accumulate > 1 else 1),
        # Parameters in the compute dtype, and of the word table the two gradients that are added and what is read.
        "copies of parameters": (params // 2 if model.compute_dtype == "bfloat16" else 0)
        + 3 * table,
        "activations": at_once * activation_bytes(model, row.length, mesh_shape["tensor"]),
        "logits": at_once * logit_bytes(model, row.predictions, mesh_shape["tensor"]),
        "batch": rows * row.bytes,
    }
    return kinds | {"total": sum(kinds.values())}


def describe_memory(config: ResolvedConfig, state: TrainState, mesh: Mesh, row: RowShape) -> str:
    """Returns a line with the estimated memory of a step on each device, and the memory of the device if known."""
    sizes = config.data.batch_size, config.train.microbatches
    kinds = estimate_memory(config.in_memory, *sizes, state, mesh.shape, row)
    total = kinds.pop("total")
    parts = ", ".join(f"{kind} {in_units(size)}" for kind, size in kinds.items())
    # a CPU has none
    figures = mesh.local_devices[0].memory_stats() or {} if mesh.local_devices else {}
    limit = figures.get("bytes_limit", 0)
    line = f"memory of a device, estimated: {in_units(total)}{f' of {in_units(limit)}' if limit else ''}: {parts}"
    if limit and total > limit:
        line += "; that is more than there is: more train.accumulate, model.remat=dots or mesh.fsdp take less"
    return line


def memory_problem(
    config: ResolvedConfig, mesh_shape: dict[str, int], needed: float, available: float
) -> str:
    """Returns one line with the memory needed, the memory available, and settings to change."""
    rows = config.data.batch_size // (mesh_shape["data"] * mesh_shape["fsdp"])
    at_once = rows // config.train.microbatches
    more = next(
        (pieces for pieces in range(config.train.microbatches + 1, rows + 1) if rows % pieces == 0),
        0,
    )
    fewer = (
        (rows // 2)
        // config.train.microbatches
        * config.train.microbatches
        * mesh_shape["data"]
        * mesh_shape["fsdp"]
    )
    changes = []
    if config.model.remat == "none":
        changes.append("model.remat=dots")
    if at_once > 1:
        changes.append(f"train.accumulate={more}")
        changes.append(f"data.batch_size={fewer}")
    if mesh_shape["fsdp"] == 1 and mesh_shape["data"] > 1:
        changes.append("mesh.fsdp=-1 with mesh.data=1")
    changes = changes or ["a smaller model, or chips with more memory"]
    return (
        f"out of memory: {at_once} rows at once on a chip need {needed / 2**30:.2f} GiB of {available / 2**30:.2f}, so "
        f"it does not fit; use {', or '.join(changes)}"
    )


def in_units(size: float) -> str:
    """Returns bytes for a person: 1.25 GiB, 340 MiB."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 2**10:.3g} KiB"


def shard_bytes(tree: PyTree) -> int:
    """Returns the bytes that one device holds of a tree of arrays, or of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def gathered_bytes(params: PyTree) -> int:
    """Returns the bytes of parameters that a device holds in a step: with ZeRO-1 more than `shard_bytes`."""

    def whole(leaf: jax.ShapeDtypeStruct) -> int:
        spec = leaf.sharding.spec
        mesh = leaf.sharding.mesh
        return shard_bytes(leaf) * (mesh.shape["data"] if "data" in spec else 1)

    return sum(map(whole, jax.tree.leaves(params)))


def activation_bytes(model: ModelConfig, row_length: int, tensor: int = 1) -> int:
    """Returns the bytes per row that all layers keep for the backward pass, plus the temporaries of one layer.

    `tensor` is how many devices share the heads and the feed-forward block.
    """
    size = 2 if model.compute_dtype == "bfloat16" else 4
    dropout = model.hidden_dropout_rate > 0

    def of_tokens(remat: str) -> float:
        narrow, wide, masks = _KEPT_OF_TOKENS[remat]
        narrow += 2 * (model.norm != "after" and remat == "none")  # sums beside their norms
        wide += _KEPT_OF_GATE[remat] * (model.feed_forward == "gated")
        numbers = narrow * model.hidden_size + wide * model.intermediate_size
        return numbers * size + model.hidden_size * masks * dropout

    scores = model.num_heads * row_length
    # Fused attention, blocks and windows keep no scores, and compute them again.
    whole = not model.has_kernels and not model.num_local and row_length <= LONGEST_WHOLE
    of_score = _KEPT_OF_SCORES[model.remat] if whole else 0
    if of_score:
        of_score += size - (0 if model.attention_dropout_rate else 1)
    kept = row_length * (of_tokens(model.remat) + scores * of_score)
    at_once = min(1.0, SCORES / row_length**2) if row_length > LONGEST_WHOLE else 1.0
    # in float32, beside the scores
    products = 4 * len(model.distance_products)
    of_working = at_once * (_WORKING_OF_SCORES + products)
    again = of_tokens("none") * (model.remat != "none")
    working = row_length * (again + scores * of_working)
    return round((model.num_layers * kept + working) / tensor)


def logit_bytes(model: ModelConfig, predictions: int, tensor: int = 1) -> int:
    """Returns the bytes of the float32 logits of one row and of their gradient in the compute dtype."""
    size = 2 if model.compute_dtype == "bfloat16" else 4
    return predictions * model.padded_vocab_size * (4 + size) // tensor
