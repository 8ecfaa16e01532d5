# SPDX-License-Identifier: Apache-2.0
"""Batches made of rows of texts and of tasks, on the host and on the mesh."""

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import Batch, PyTree, Row, pad_rows
from bert_jax.batches.pack import Layout
from bert_jax.batches.shapes import padded_length
from bert_jax.devices.sharding import row_sharding
from bert_jax.errors import InputError
from bert_jax.model.heads.base import Head
from bert_jax.model.heads.labels import Spot
from bert_jax.text.fitting import fit_texts, tell_cut
from bert_jax.text.tokenizer import Tokenizer


def make_batch(
    tokenizer: Tokenizer,
    texts: Sequence[str] | Sequence[tuple[str, str]],
    max_length: int = 512,
    long_texts: str = "cut",
) -> Batch:
    """Returns [CLS] A [SEP] or [CLS] A [SEP] B [SEP] rows of numpy arrays, one for each text or pair of texts.

    They are padded to one of a few lengths, since JAX compiles a program for each. A text with more than
    `max_length` tokens, [CLS] and [SEP] included, is cut, with a warning, or with `long_texts` "refuse" an error.

    Raises: InputError if there is no text, if one is not a text and not a pair, or if no pair fits in `max_length`.
    """
    least = 2 + len(tokenizer.between)
    if not isinstance(max_length, int | np.integer) or max_length < least:
        raise InputError(
            f"max_length {max_length!r} is not a whole number of {least} or more; 128 and 512 are usual"
        )
    if isinstance(texts, str) or not len(texts):
        raise InputError("there is no text for a batch; give a list of texts or of pairs of texts")
    rows = fit_texts(tokenizer, texts, max_length, long_texts)
    tell_cut(sum(row.was_cut for row in rows), max_length)
    length = padded_length(max(len(row.token_ids) for row in rows), max_length, 8)
    token_ids, type_ids = [row.token_ids for row in rows], [row.type_ids for row in rows]
    batch = pad_rows(token_ids, length, type_ids, pad_id=tokenizer.pad_id)
    # a single word to predict
    return batch._replace(mlm_positions=np.zeros((len(rows), 1), np.int32))


def on_mesh(mesh: Mesh, batch_size: int, make_rows: Callable[[np.ndarray], PyTree]) -> PyTree:
    """Returns the global batch with the rows of `make_rows(positions)`; each host makes only its own rows."""
    sharding = row_sharding(mesh)
    ranges = set()  # devices along "tensor" have the same rows
    for index in sharding.addressable_devices_indices_map((batch_size,)).values():
        assert index is not None  # JAX has None for devices without a part
        ranges.add(index[0].indices(batch_size)[:2])
    local = make_rows(np.concatenate([np.arange(start, stop) for start, stop in sorted(ranges)]))

    def to_global(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(
            sharding, array, (batch_size, *array.shape[1:])
        )

    # intended, even if other transfers are disallowed
    with jax.transfer_guard_host_to_device("allow"):
        return jax.tree.map(to_global, local)


def batch_of_layout(
    rows: Sequence[Row], layout: Layout, head: Head, mesh: Mesh | None = None, num_examples: int = 0
) -> Batch:
    """Returns the batch of a layout, on the mesh, or else as numpy arrays.

    If the head has labels of the whole batch, they are of `num_examples`.
    """
    bins = [[rows[number] for number in members] for members in layout.bins]

    def make(lines: np.ndarray) -> Batch:
        chosen = [bins[line] if line < len(bins) else [] for line in lines]
        return batch_of_rows(chosen, layout.length, layout.num_places, head, whole=bins)

    if mesh is None:
        return make(np.arange(layout.num_rows))
    batch = on_mesh(mesh, layout.num_rows, make)
    if not head.needs_whole_batch or not num_examples:
        return batch
    labels = head.labels_of_batch(bins, layout.num_places, num_examples)
    return batch._replace(
        labels=on_mesh(mesh, num_examples, lambda lines: jax.tree.map(lambda a: a[lines], labels))
    )


def batch_of_rows(
    bins: Sequence[Sequence[Row]],
    length: int,
    num_places: int,
    head: Head,
    whole: Sequence[Sequence[Row]] | None = None,
) -> Batch:
    """Returns a batch as numpy arrays, padded to `length` tokens and `num_places` sequences.

    Args:
      bins: for each row of the batch, the rows of the task in it; if there are none, it is empty: no token, no
        sequence, no answer.
      length: L.
      num_places: M.
      head: decides the form of the labels. They are left out if a row of the task has none.
      whole: all bins of the batch, if this is one host's part of it: every host must run the same program, and one may
        have only empty rows.
    """
    batch = pad_rows(
        [_joined([row.token_ids for row in members]) for members in bins],
        length,
        [_joined([row.type_ids for row in members]) for members in bins],
        [[size for row in members for size in row.lengths] for members in bins],
        num_places,
    )
    known = [row.label for members in (bins if whole is None else whole) for row in members]
    if not known or any(label is None for label in known) or head.needs_whole_batch:
        return batch
    labels = head.no_labels(len(bins), length, num_places, known[0])
    for line, members in enumerate(bins):
        for row, spot in spots_of(members):
            head.write_label(labels[line], row.label, spot)
            batch.sequence_weights[line, spot.places] *= row.weight
    return batch._replace(labels=labels)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray | tuple[()]:
    return np.concatenate(parts) if parts else ()


def spots_of(members: Sequence[Row]) -> Iterator[tuple[Row, Spot]]:
    """Yields each row of the task in a row of a batch, and its spot there."""
    start = first = 0
    for row in members:
        end, last = start + len(row.token_ids), first + len(row.lengths)
        yield row, Spot(slice(start, end), slice(first, last))
        start, first = end, last


def unpadded_outputs(members: Sequence[Row], outputs: np.ndarray, head: Head) -> list[np.ndarray]:
    """Returns the unpadded outputs of each row of the task in a row of a batch, as `Task.decode` takes them."""
    return [head.outputs(outputs, spot) for _, spot in spots_of(members)]
