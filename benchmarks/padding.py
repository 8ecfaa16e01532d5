# SPDX-License-Identifier: Apache-2.0
"""Counts the FLOPs of fine-tuning and prediction over those of the real tokens: like lengths, and packed.

python -m benchmarks.padding --task=sst2 --data=glue/SST-2 --tokenizer=bert-base-uncased-vocab.txt [--batch_size=32]
"""

import numpy as np
from absl import flags

from bert_jax.settings.finetuning import TaskConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.tasks.base import Row
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.layouts import (
    Layout,
    choose_shape,
    epoch_flops,
    eval_layouts,
    needed_flops,
    padded_flops,
    plan_epoch,
    sizes_of,
    train_length,
)
from bert_jax.text.tokenizer import load_tokenizer
from bert_jax.tools import cli

_TASK = flags.DEFINE_string("task", "sst2", "The name of a task.")
_DATA = flags.DEFINE_string("data", "", "Its data.")
_TOKENIZER = flags.DEFINE_string("tokenizer", "", "A vocabulary, or a directory with one.")
_LENGTH = flags.DEFINE_integer("max_seq_length", 128, "As in the task's settings.")
_BATCH = flags.DEFINE_integer("batch_size", 32, "Examples of a batch.")
_MULTIPLE = flags.DEFINE_integer("multiple", 8, "Short lengths are multiples of it: 8 on a CPU, 16 elsewhere.")
_DEVICES = flags.DEFINE_integer("devices", 1, "That rows are divided over.")

_BEFORE = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # the lengths up to version 0.2


def main() -> None:
    """Prints a line for training and one for each other split, for a model of the shape of BERT-Base."""
    model, size = ModelConfig(vocab_size=30522), _BATCH.value
    tokenizer = load_tokenizer(_TOKENIZER.value)
    task = make_task(TaskConfig(name=_TASK.value, max_seq_length=_LENGTH.value))
    examples = task.read(_DATA.value, "train")
    if not task.labels and task.head != "question_answering":
        task = make_task(task.config, task.find_labels(examples))
    rows = task.make_rows(examples, tokenizer, True).rows
    sizes, needed = sizes_of(rows), needed_flops(model, rows)
    longest = int(sizes.tokens.max())
    shape = choose_shape(sizes, size, model, _MULTIPLE.value, _DEVICES.value)
    batches = plan_epoch(sizes.tokens, size, 0, 0)
    alone, packed = (epoch_flops(sizes, size, model, True, _MULTIPLE.value, each) / needed for each in (None, shape))
    lengths = len({train_length(sizes.tokens[numbers], longest, True, _MULTIPLE.value) for numbers in batches})
    before = [Layout([], size, _before(int(sizes.tokens[numbers].max()), longest), 1) for numbers in batches]
    print(
        f"train: {len(rows):,} rows of {sizes.tokens.mean():.1f} tokens, {longest} at most; before "
        f"{padded_flops(model, before) / needed:.4f}, like lengths {alone:.4f} ({lengths} programs), packed "
        f"{packed:.4f} ({len(shape.num_rows)} programs: {shape.num_rows} rows of {shape.length})"
    )
    for split in (name for kind in ("eval", "test") for name in task.splits.get(kind, ())):
        if found := task.read(_DATA.value, split):
            _print_split(model, split, task.make_rows(found, tokenizer, False).rows)


def _print_split(model: ModelConfig, name: str, rows: list[Row]) -> None:
    sizes, needed = sizes_of(rows), needed_flops(model, rows)
    line = f"{name}: {len(rows):,} rows of {sizes.tokens.mean():.1f} tokens"
    order = np.sort(sizes.tokens)[::-1]
    tops = order[:: _BATCH.value].tolist()
    before = [Layout([], _BATCH.value, _before(top, tops[0]), 1) for top in tops]
    line += f"; before {padded_flops(model, before) / needed:.4f}"
    for pack in ("off", "on"):
        layouts = eval_layouts(sizes, _BATCH.value, model, _MULTIPLE.value, _DEVICES.value, pack)
        shapes = len({(layout.num_rows, layout.length) for layout in layouts})
        how = "packed" if pack == "on" else "like lengths"
        line += f", {how} {padded_flops(model, layouts) / needed:.4f} ({shapes} programs)"
    print(line)


def _before(length: int, most: int) -> int:
    known = next((each for each in _BEFORE if each >= length), int(-(-length // 256) * 256))
    return int(min(known, most))


if __name__ == "__main__":
    cli.run(main)
