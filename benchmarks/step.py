# SPDX-License-Identifier: Apache-2.0
"""How long a training step takes: masking, forward and backward pass, AdamW; on all devices, on random tokens.

python benchmarks/step.py --size=base --batch_size=8 --length=128
"""

import dataclasses
import time

import jax
import numpy as np
from absl import flags

from bert_jax import flops
from bert_jax.batch import Batch
from bert_jax.config import MaskingConfig, MeshConfig, OptimizerConfig, TrainConfig, model_size
from bert_jax.model.objective import pretraining_objective
from bert_jax.sharding import check_divisible, make_mesh, row_sharding
from bert_jax.step import init_state, make_train_step
from bert_jax.tools import cli

_SIZE = flags.DEFINE_string("size", "tiny", "tiny, mini, small, medium, base, large, or L4_H256 and the like.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Rows of the global batch.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 128, "Tokens of a row, all of them real.", lower_bound=8)
_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 30522, "Tokens of the vocabulary.", lower_bound=10)
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "What matrices are multiplied in.")
_DROPOUT = flags.DEFINE_float("dropout", 0.1, "Dropout rate, hidden and attention.")
_WHOLE_WORD = flags.DEFINE_boolean("whole_word", False, "Mask whole words.")
_STEPS = flags.DEFINE_integer("steps", 20, "Steps to measure, after two to warm up.", lower_bound=1)
_UNROLL = flags.DEFINE_integer("unroll", 1, "Layers per iteration of the scan.", lower_bound=1)
_CLS, _SEP, _MASK = 2, 3, 4


def main() -> None:
    """Prints the median time of a step, and what it means in sequences and arithmetic per second."""
    model = dataclasses.replace(
        model_size(_SIZE.value),
        vocab_size=_VOCAB_SIZE.value,
        compute_dtype=_DTYPE.value,
        hidden_dropout_rate=_DROPOUT.value,
        attention_dropout_rate=_DROPOUT.value,
        unroll=_UNROLL.value,
    )
    optimizer, train = OptimizerConfig(), TrainConfig()
    mesh = make_mesh(MeshConfig())
    check_divisible(mesh, model, _BATCH_SIZE.value)
    objective = pretraining_objective(model, MaskingConfig(whole_word=_WHOLE_WORD.value), _MASK, (_CLS, _SEP))
    state = init_state(objective, optimizer, train, mesh)
    step = make_train_step(objective, optimizer, train, mesh, state)
    batch = jax.device_put(random_batch(), row_sharding(mesh))

    seconds, metrics = [], {}
    with jax.set_mesh(mesh):
        for _ in range(_STEPS.value + 2):
            started = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - started)
    counts = {name: float(metrics[name][0]) for name in ("tokens", "squared_lengths", "predictions", "sequences")}
    work = flops.train_flops(model, *counts.values())
    median = float(np.median(seconds[2:]))
    print(
        f"{_SIZE.value}, {_BATCH_SIZE.value} x {_LENGTH.value} tokens, {_DTYPE.value}, {mesh.size} x "
        f"{mesh.devices.flat[0].device_kind}: {1e3 * median:,.1f} ms a step "
        f"({1e3 * min(seconds[2:]):,.1f} to {1e3 * max(seconds[2:]):,.1f}), "
        f"{_BATCH_SIZE.value / median:,.1f} sequences/s, {work / median / 1e9:,.1f} GFLOP/s"
    )


def random_batch() -> Batch:
    """Returns rows of random tokens in which every third goes on with a word."""
    rng = np.random.default_rng(0)
    shape = (_BATCH_SIZE.value, _LENGTH.value)
    middle = shape[1] // 2
    token_ids = rng.integers(_MASK + 1, _VOCAB_SIZE.value, shape)
    token_ids[:, 0], token_ids[:, middle], token_ids[:, -1] = _CLS, _SEP, _SEP
    return Batch(
        token_ids=token_ids.astype(np.min_scalar_type(_VOCAB_SIZE.value - 1)),
        type_ids=np.broadcast_to(np.arange(shape[1]) > middle, shape).astype(np.uint8),
        sequence_ids=np.ones(shape, np.uint8),
        cls_positions=np.zeros((shape[0], 1), np.int32),
        sequence_weights=np.ones((shape[0], 1), np.float32),
        next_sentence_labels=rng.integers(0, 2, (shape[0], 1)).astype(np.int32),
        sequence_numbers=np.arange(shape[0], dtype=np.uint32)[:, None],
        epochs=np.zeros(shape[0], np.int32),
        word_starts=rng.random(shape) < 2 / 3,
    )


if __name__ == "__main__":
    cli.run(main)
