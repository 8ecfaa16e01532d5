# SPDX-License-Identifier: Apache-2.0
"""Batches made of rows of texts and of tasks, on the host and on the mesh."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from bert_jax.batch import UNSEEN, Batch, PyTree, Row, pad_rows
from bert_jax.batches.pack import Layout
from bert_jax.batches.shapes import padded_length
from bert_jax.devices.sharding import row_sharding
from bert_jax.errors import InputError
from bert_jax.model.heads.base import Head
from bert_jax.model.heads.labels import Spot
from bert_jax.model.heads.sequence import SEQUENCES
from bert_jax.model.inputs import check_rows
from bert_jax.text.fitting import fit_texts, listed, tell_cut
from bert_jax.text.tokenizer import Tokenizer


def make_batch(
    tokenizer: Any,
    texts: Iterable[Any],
    max_length: int | None = None,
    long_texts: str = "cut",
    labels: Sequence[Any] | None = None,
    head: Head = SEQUENCES,
) -> Batch:
    """Returns [CLS] A [SEP] or [CLS] A [SEP] B [SEP] rows of numpy arrays, one for each text or pair of texts.

    They are padded to one of a few lengths, since JAX compiles a program for each.

    Args:
      tokenizer: or the model, such as `load_pretrained` gives, so that the batch fits it: its positions, its ids.
      texts: each a text or a pair of texts. An example of choices, or of texts that are to be compared (embeddings), is
        a list of them.
      max_length: None is as many as the model has positions, or without a model 512.
      long_texts: a text with more than `max_length` tokens, [CLS] and [SEP] included, is cut, with a warning, or with
        "refuse" an error.
      labels: one for each example, as `head` has them: a class, a number, or a probability for each class; for tokens a
        class for each token of the row, -1 for none; the first and the last token of an answer; the index of the right
        choice; for texts that are compared, a score. None writes none.
      head: one of `HEADS` or one's own.

    Raises: InputError if there is no text, if one is not a text and not a pair, if no pair fits in `max_length`, or if
      the model has not so many positions; if labels do not fit their examples.

    Examples:
      >>> bert = bert_jax.load_pretrained("models/bert-mini-en")
      >>> batch = bert_jax.make_batch(bert, ["open the door", ("who is it", "the king")])
      >>> batch.sequence_ids  # 0 is padding
      array([[1, 1, 1, 1, 1, 0, 0, 0],
             [1, 1, 1, 1, 1, 1, 1, 1]], dtype=int32)
    """
    model = tokenizer if hasattr(tokenizer, "tokenizer") else None
    tokenizer = model.tokenizer if model else tokenizer
    least = 2 + len(tokenizer.between)
    most = model.config.max_positions if model else 512
    max_length = most if max_length is None else max_length
    if not isinstance(max_length, int | np.integer) or max_length < least:
        raise InputError(
            f"max_length {max_length!r} is not a whole number of {least} or more; 128 and 512 are usual"
        )
    texts = listed(texts)
    if not texts:
        raise InputError("there is no text for a batch; give a list of texts or of pairs of texts")
    if labels is not None and len(labels) != len(texts):
        raise InputError(f"there are {len(labels)} labels for {len(texts)} examples; give each one")
    rows, cut = _rows_of_texts(tokenizer, texts, max_length, long_texts, labels, head)
    if model:
        check_rows(model.config, rows, "a text")
    tell_cut(cut, max_length)
    longest, widest = (
        max(map(len, column)) for column in zip(*((r.token_ids, r.lengths) for r in rows))
    )
    length = padded_length(longest, max(longest, max_length), 8)
    token_ids = [row.token_ids for row in rows]
    type_ids = [row.type_ids for row in rows]
    lengths = [row.lengths for row in rows]
    batch = pad_rows(token_ids, length, type_ids, lengths, widest, tokenizer.pad_id)
    # a single word to predict
    bins = [[row] for row in rows]
    batch = _with_queries(batch, bins, head)
    batch = batch._replace(mlm_positions=np.zeros((len(rows), 1), np.int32))
    if labels is None:
        return batch
    if head.needs_whole_batch:
        return batch._replace(labels=head.labels_of_batch(bins, widest, len(texts), length))
    batch = _labelled(batch, bins, head, labels)
    names = model.labels if model and head.has_labels and model.task == head.name else ()
    if names and batch.labels.dtype.kind == "i" and batch.labels.max() >= len(names):
        raise InputError(
            f"a label is {batch.labels.max()}, and the model has {len(names)} classes: {', '.join(names)}"
        )
    return batch


def _rows_of_texts(
    tokenizer: Tokenizer,
    texts: Sequence[Any],
    max_length: int,
    long_texts: str,
    labels: Sequence[Any] | None,
    head: Head,
) -> tuple[list[Row], int]:
    """Returns a row for each example, or for each text if they are laid out apart, and how many texts were cut."""
    several = head.is_of_several or head.needs_whole_batch
    groups = [list(text) if several and not isinstance(text, str) else [text] for text in texts]
    fitted = fit_texts(tokenizer, list(itertools.chain(*groups)), max_length, long_texts)
    parts = iter(fitted)
    rows = []
    numbers = {}
    for index, group in enumerate(groups):
        own = [next(parts) for _ in group]
        label = None if labels is None else labels[index]
        if head.needs_whole_batch:  # equal texts have equal numbers
            known = [numbers.setdefault(part.token_ids.tobytes(), len(numbers)) for part in own]
            label = (label or 0.0, *known)
        rows.append(
            Row(
                example=index,
                token_ids=np.concatenate([part.token_ids for part in own]),
                type_ids=np.concatenate([part.type_ids for part in own]),
                lengths=tuple(len(part.token_ids) for part in own),
                label=label,
            )
        )
    cut = sum(part.was_cut for part in fitted)
    return (texts_apart(rows) if head.needs_whole_batch else rows), cut


def texts_apart(
    rows: Sequence[Row], most: int = 0, numbers: Iterable[int] | None = None
) -> list[Row]:
    """Returns a row for each text, with a label as `Head.labels_of_batch` takes it; `example` is the row's number.

    The label of a row is its score, and a number for each text. `most` is the largest number of texts of an example, if
    these are not all; their `numbers` are then among all.
    """
    most, text_rows = most or max(len(row.lengths) for row in rows), []
    for number, row in zip(range(len(rows)) if numbers is None else numbers, rows):
        ends = np.cumsum(row.lengths)[:-1]
        arrays = [row.token_ids, row.type_ids, *([] if row.marks is None else [row.marks])]
        parts = zip(row.label[1:], *(np.split(array, ends) for array in arrays))
        for kind, (text, token_ids, type_ids, *marks) in enumerate(parts):
            label = (most, kind, text, row.label[0])
            own = Row(number, token_ids, type_ids, (len(token_ids),), label, is_query=kind == 0)
            text_rows.append(own._replace(marks=marks[0]) if marks else own)
    return text_rows


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
    labels = head.labels_of_batch(bins, layout.num_places, num_examples, layout.length)
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
    for line, members in enumerate(bins):
        for row, spot in spots_of(members):
            if row.marks is not None:
                batch.sequence_ids[line, spot.tokens] *= np.where(row.marks & UNSEEN, -1, 1)
    batch = _with_queries(batch, bins, head)
    known = [row.label for members in (bins if whole is None else whole) for row in members]
    if not known or any(label is None for label in known) or head.needs_whole_batch:
        return batch
    return _labelled(batch, bins, head, known)


def _with_queries(batch: Batch, bins: Sequence[Sequence[Row]], head: Head) -> Batch:
    """Returns the batch, which says which sequences are queries if the head needs to know it."""
    if not head.knows_queries:
        return batch
    queries = np.zeros(batch.cls_positions.shape, bool)
    for line, members in enumerate(bins):
        for row, spot in spots_of(members):
            queries[line, spot.places] = row.is_query
    return batch._replace(queries=queries)


def _labelled(
    batch: Batch, bins: Sequence[Sequence[Row]], head: Head, known: Sequence[Any]
) -> Batch:
    """Returns the batch with the labels and weights of its rows; `known` are all labels, which decide their form."""
    # one of them may be a whole number where the others are not
    like = next((label for label in known if np.asarray(label).dtype.kind == "f"), known[0])
    (num_rows, length), num_places = batch.token_ids.shape, batch.cls_positions.shape[1]
    labels = head.no_labels(num_rows, length, num_places, like)
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
        end = start + len(row.token_ids)
        last = first + len(row.lengths)
        yield row, Spot(slice(start, end), slice(first, last))
        start = end
        first = last


def unpadded_outputs(members: Sequence[Row], outputs: np.ndarray, head: Head) -> list[np.ndarray]:
    """Returns the unpadded outputs of each row of the task in a row of a batch, as `Task.decode` takes them."""
    return [head.outputs(outputs, spot) for _, spot in spots_of(members)]
