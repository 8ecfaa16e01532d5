# SPDX-License-Identifier: Apache-2.0
"""Records of data sets with typed columns: TFDS and Parquet. A column may be a class label, whose names are stored."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bert_jax.data.sources import parquet, tfds_text
from bert_jax.errors import InputError, reading
from bert_jax.storage import files, urls
from bert_jax.tasks.records import Record

_EXAMPLES_AT_ONCE = 64


def read_tfds(source: str) -> Iterator[Record]:
    """Yields the examples of a split of a prepared data set as plain values: strings, numbers, lists.

    A class label is a number, -1 if it is hidden; `classes_in` has the names.
    Raises: InputError if the data set or the split is missing, or cannot be read without TensorFlow.
    """
    builder, split, _ = tfds_text.open_builder(source, "train")
    num_examples = builder.info.splits[split].num_examples
    examples: Any = tfds_text.random_access(source, builder, split) if num_examples else []
    for start in range(0, num_examples, _EXAMPLES_AT_ONCE):
        numbers = list(range(start, min(start + _EXAMPLES_AT_ONCE, num_examples)))
        with tfds_text.tfds_errors(source):
            batch = examples.__getitems__(numbers)
        for number, example in zip(numbers, batch):
            where = f"{source}, example {number}"
            with reading(where):
                values = {name: _plain(value) for name, value in example.items()}
            yield Record(values, where)


def is_tfds(place: str) -> bool:
    """Returns whether `place` is a TFDS data set."""
    return place.startswith(tfds_text.PREFIX)


def is_parquet(place: str) -> bool:
    """Returns whether `place` is a Parquet file, or a pattern of such files."""
    return place.lower().endswith(".parquet")


def read_parquet(place: str) -> Iterator[Record]:
    """Yields the rows of Parquet files as plain values. Raises: InputError if a file cannot be read."""
    for source in files.expand_globs(place):
        for number, row in enumerate(parquet.read_rows(urls.local_copy(source), source)):
            yield Record(row, f"{source}, row {number} (the first is 0)")


def classes_in(place: str) -> Mapping[str, tuple[str, ...]]:
    """Returns the names of the classes, in the order of their numbers, for each column that is a class label.

    TFDS stores them, and so does Parquet written by Hugging Face's datasets; other files have names.
    """
    if is_parquet(place):
        first, *others = files.expand_globs(place)
        classes = parquet.read_classes(urls.local_copy(first), first)
        for source in others:
            if parquet.read_classes(urls.local_copy(source), source) != classes:
                raise InputError(
                    f"{source} has other names of classes than {first}; write both with the same features"
                )
        return classes
    if not is_tfds(place):
        return {}
    classes = {}
    builder, _, _ = tfds_text.open_builder(place)
    with tfds_text.tfds_errors(place):
        for name, kind in builder.info.features.items():
            if names := getattr(getattr(kind, "feature", kind), "names", None):  # or of a list
                classes[name] = tuple(names)
    return classes


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, (np.generic, np.ndarray)) else value
