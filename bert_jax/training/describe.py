# SPDX-License-Identifier: Apache-2.0
"""Lines that describe a pre-training run before it begins, and the throughput of a run."""

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from bert_jax.batch import RowShape
from bert_jax.batches.stream import StreamedSplit
from bert_jax.checkpoints.pretrained import Pretrained
from bert_jax.data.records import Dataset
from bert_jax.devices.chips import peak_flops
from bert_jax.model import flops
from bert_jax.model.objective import Params
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.phases import Phase
from bert_jax.settings.pretraining import OptimizerConfig, ResolvedConfig
from bert_jax.training.memory import describe_memory
from bert_jax.training.step import TrainState


def throughput(
    models: Sequence[ModelConfig], mesh: Mesh, sums: dict[str, float], seconds: float
) -> dict[str, float]:
    """Returns sequences/s, tokens/s, FLOP/s of all devices, and MFU if it is known, of steps with these counts."""
    kind = mesh.devices.flat[0].device_kind
    dtype = models[0].compute_dtype
    peak = peak_flops(kind, dtype) * mesh.size
    work = flops.step_flops(
        models, sums["tokens"], sums["squared_lengths"], sums["predictions"], sums["sequences"]
    )
    values = {
        "sequences_per_second": sums["sequences"] / seconds,
        "tokens_per_second": sums["tokens"] / seconds,
        "flops_per_second": work / seconds,
    }
    return values | ({"mfu": work / seconds / peak} if peak else {})


def describe_model(model: ModelConfig, params: Params, what: str = "model") -> str:
    """Returns a line about the model, or what else it is; `params` gives the shapes."""
    size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    return (
        f"{what}: {model.num_layers} layers, hidden {model.hidden_size}, {model.num_heads} heads, vocabulary "
        f"{model.vocab_size}, {size:,} parameters, {model.compute_dtype}"
    )


def describe_devices(mesh: Mesh) -> str:
    """Returns a line about the devices and the mesh."""
    axes = " x ".join(f"{name} {count}" for name, count in mesh.shape.items())
    return f"devices: {mesh.size} ({mesh.devices.flat[0].device_kind}), {axes}"


def describe_start(config: ResolvedConfig, start: Pretrained | None) -> str:
    """Returns a line about the parameters that a new run starts from."""
    if start is None:
        return "start from random parameters, step 0"
    line = f"warm start from {config.init_checkpoint}: its parameters, a fresh optimizer, step 0"
    return "; ".join([line, *start.notes])


def describe_phase(
    phase: Phase, dataset: Dataset, num_phases: int, mesh: Mesh, state: TrainState, row: RowShape
) -> list[str]:
    """Returns lines that describe the data, the task and the estimated memory of a phase."""
    config = phase.config
    lines = [describe_data(config, dataset), f"task: {_describe_task(config, dataset)}"]
    lines.append(describe_memory(config, state, mesh, row))
    lines += schedule_warnings(config.optimizer, phase.schedule_steps)
    if num_phases == 1:
        return lines
    moments = (
        ""
        if phase.number == 1
        else "; Adam's means " + ("at zero" if phase.resets_moments else "are kept")
    )
    goes_on = phase.schedule_start < phase.first_step
    rate = "the rate goes on" if goes_on else f"rate {config.optimizer.learning_rate:g}"
    steps = f"steps {phase.first_step + 1:,} to {phase.last_step:,}"
    return [f"phase {phase.number} of {num_phases}: {steps}, {rate}{moments}", *lines]


def describe_data(config: ResolvedConfig, dataset: Dataset) -> str:
    """Returns a line with the number of rows, and the number of epochs in the steps of a phase."""
    epochs = config.train.num_steps * config.data.batch_size / dataset.train.num_rows
    packed = dataset.manifest["row"]["max_sequences"] > 1
    sequences = f"{dataset.train.num_sequences:,} sequences in " if packed else ""
    streamed = f"; {dataset.train.describe()}" if isinstance(dataset.train, StreamedSplit) else ""
    return (
        f"data: {sequences}{dataset.train.num_rows:,} rows of {dataset.row_length} tokens, "
        f"{dataset.heldout.num_rows:,} held out; "
        f"{config.train.num_steps:,} steps of {config.data.batch_size} rows are {epochs:.1f} epochs{streamed}"
    )


def _describe_task(config: ResolvedConfig, dataset: Dataset) -> str:
    """Returns a short description of the predictions."""
    masking = config.masking
    if config.model.causal:
        tokens = "the next token, from left to right"
    elif dataset.manifest["row"].get("predictions"):
        tokens = "tokens masked in the data"
    else:
        units = "tokens" if not masking.whole_word else "whole words"
        units += f" in runs of up to {masking.max_ngram}" if masking.max_ngram > 1 else ""
        falls = f", falling to {masking.end_rate:.0%}" if masking.end_rate else ""
        often = "once" if masking.static else "anew each epoch"
        tokens = f"{_share(config, dataset)}{falls}, masked as {units}, {often}"
    tokens += (
        f"; {masking.causal_rate:.1%} of the rows from left to right" if masking.causal_rate else ""
    )
    kind = {"nsp": "next sentence", "sop": "order of sentences"}
    labels = dataset.manifest["identity"]["options"].get("next_sentence", "nsp")
    return tokens + (f"; {kind[labels]}" if config.train.next_sentence else "; no next sentence")


def _share(config: ResolvedConfig, dataset: Dataset) -> str:
    """Returns the share of the tokens that is predicted, and why it is below the rate if it is."""
    masking = config.masking
    length = dataset.row_length
    wanted = dataclasses.replace(masking, max_predictions=0).most(length)
    if masking.most(length) == wanted:
        return f"{masking.rate:.0%} of the tokens"
    return (
        f"{masking.most(length) / length:.1%} of the tokens of a full row (masking.max_predictions "
        f"{masking.max_predictions} is below masking.rate {masking.rate:g} x {length} = {wanted}; 0 lifts the limit)"
    )


def schedule_warnings(config: OptimizerConfig, num_steps: int) -> list[str]:
    """Returns a line if warm-up is as long as the schedule or longer, so that the learning rate is never reached."""
    warmup_steps = config.warmup_of(num_steps)
    if not 0 < num_steps <= warmup_steps:
        return []
    share = (num_steps - 1) / warmup_steps
    return [
        f"warning: warm-up takes {warmup_steps:,} steps and the schedule ends after {num_steps:,}, so the rate rises "
        f"to {share:.1%} of {config.learning_rate:g} at most; use optimizer.warmup_rate=0.1"
    ]
