# SPDX-License-Identifier: Apache-2.0
"""Writes the rows of a data set as pre-training examples for google-research/bert, with the masks of a training."""

from collections.abc import Callable, Iterator

import jax
import numpy as np

from bert_jax.batch import Batch
from bert_jax.data.blocks import RowSource
from bert_jax.data.google.examples import LABELS, Columns, write_examples
from bert_jax.data.pipeline import rows_to_batch, train_rows
from bert_jax.data.processes import say
from bert_jax.data.records import Dataset, open_dataset
from bert_jax.errors import InputError
from bert_jax.model.masking import mask_tokens
from bert_jax.settings.pretraining import MaskingConfig
from bert_jax.storage.writing import new_directory

_ROWS_AT_ONCE = 1024


def export_examples(
    data: str, output: str, masking: MaskingConfig, split: str = "train", epochs: int = 1, num_files: int = 1
) -> int:
    """Writes examples to `output`, which appears whole or not at all, and returns their number.

    Raises: InputError if an option or the data set is unusable, or `output` holds something; before anything is
    written.
    """
    masking.validate()
    for name, value in (("epochs", epochs), ("num_files", num_files)):
        if value < 1:
            raise InputError(f"{name} {value} is less than 1; use 1 or more")
    if masking.seed < 0:
        raise InputError(f"seed {masking.seed} is below 0; use 0 or more, as data.seed has to be")
    dataset = open_dataset(data)
    rows = dataset.train if split == "train" else dataset.heldout
    _check(data, dataset, rows, split, masking, epochs)
    total = epochs * rows.num_rows
    if num_files > total:
        raise InputError(f"num_files {num_files} is more than the {total} examples; use fewer")
    tokenizer = dataset.load_tokenizer()
    never_predicted = (tokenizer.cls_id, tokenizer.sep_id)

    @jax.jit
    def mask(batch: Batch) -> Batch:
        return mask_tokens(batch, masking, tokenizer.vocab_size, tokenizer.mask_id, never_predicted)

    with new_directory(output, replaces=lambda path: path.is_dir() and not any(path.iterdir())) as directory:
        for index in range(num_files):
            places = np.arange(index, total, num_files)
            name = f"{split}-{index:05d}-of-{num_files:05d}.tfrecord"
            write_examples(directory / name, _examples(rows, places, masking, mask))
            say(f"{output}/{name}: {len(places):,} examples")
        tokenizer.save(directory)
    return total


def _check(data: str, dataset: Dataset, rows: RowSource, split: str, masking: MaskingConfig, epochs: int) -> None:
    row = dataset.manifest["row"]
    if row["max_sequences"] > 1:
        raise InputError(
            f"{data} packs up to {row['max_sequences']} sequences into a row, and an example has one: its mask and its "
            "label have no place for more; export a data set that is not packed"
        )
    if not rows.num_rows:
        raise InputError(f"{data} has no row in its split {split}; choose the other split")
    if rows.gather(np.zeros(1, np.int64))["labels"].min() < 0:
        raise InputError(
            f"{data} has no next sentences, and an example needs a label for them; prepare the text with "
            "--next_sentence=nsp or sop"
        )
    if row.get("predictions") and (epochs > 1 or masking != MaskingConfig()):
        raise InputError(
            f"{data} has static masks, which are written as they are; leave out --epochs and the options of masking"
        )


def _examples(
    rows: RowSource, places: np.ndarray, masking: MaskingConfig, mask: Callable[[Batch], Batch]
) -> Iterator[Columns]:
    """Yields the examples at some places of a training, in their order."""
    for start in range(0, len(places), _ROWS_AT_ONCE):
        wanted = places[start : start + _ROWS_AT_ONCE]
        same_shape = np.resize(wanted, min(_ROWS_AT_ONCE, len(places)))  # so that the last ones compile nothing anew
        indices, epochs = train_rows(0, same_shape, 1, rows.num_rows, masking.seed)
        batch = rows_to_batch(rows.gather(indices), epochs)
        if batch.mlm_positions is None:
            batch = jax.device_get(mask(batch))
            missing = max(0, masking.limit(batch.token_ids.shape[1]) - batch.mlm_positions.shape[1])
        else:
            missing = 0
        predictions = (batch.mlm_positions, batch.mlm_labels, batch.mlm_weights)
        positions, labels, weights = (np.pad(array, [(0, 0), (0, missing)]) for array in predictions)
        columns = {
            "input_ids": batch.token_ids,
            "input_mask": batch.sequence_ids,
            "segment_ids": batch.type_ids,
            "masked_lm_positions": positions,
            "masked_lm_ids": labels,
            "masked_lm_weights": weights,
            LABELS: batch.next_sentence_labels,
        }
        yield {name: np.asarray(array)[: len(wanted)] for name, array in columns.items()}
