# SPDX-License-Identifier: Apache-2.0
"""The batch: the input of a model in one step, and the letters that name its dimensions.

Dimension letters, used in every shape of this project:

    B  rows of a batch (global)          N  attention heads
    L  positions of a row                D  size of one head
    M  sequences packed into a row       H  hidden size (N x D)
    P  predictions of a row              F  intermediate size of the feed-forward block
    V  vocabulary                        K  classes
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from bert_jax.errors import InputError

# a numpy array on the host, a jax.Array on devices; this file does not import jax
Array: TypeAlias = Any
PyTree: TypeAlias = Any  # nested dicts, lists, tuples and named tuples of arrays, as in JAX


class Batch(NamedTuple):
    """Rows of token sequences, and the labels to predict.

    A row holds M >= 1 sequences one after the other. `sequence_ids` numbers them: 0 is padding, 1 is the
    first sequence. A token attends to another iff their sequence ids are equal and not 0, so this one field
    is both the padding mask and the packing mask. A token with the id -1 stands in the first sequence and sees
    its other tokens, and no token sees it. Fields that a task does not use are None.
    """

    token_ids: Array  # [B, L] int: ids in the vocabulary
    type_ids: Array  # [B, L] int: 0 in sentence A, 1 in sentence B
    # [B, L] int: 0 is padding, 1.. number the sequences of the row, -1.. their tokens that are not seen
    sequence_ids: Array
    cls_positions: Array  # [B, M] int: where each sequence starts
    # [B, M] float: 1 for a sequence or the weight of its label, 0 for an empty place
    sequence_weights: Array
    next_sentence_labels: Array = None  # [B, M] int: 0 the true next sentence, 1 a random one
    # Input of masking (`masking.mask_rows`), which fills in the predictions:
    sequence_numbers: Array = None  # [B, M] uint32: the sequence's number in the data set
    epochs: Array = None  # [B] int: how often the row has been seen before
    word_starts: Array = None  # [B, L] bool: the token begins a word
    # Masked tokens to predict:
    mlm_positions: Array = None  # [B, P] int: indices into the row; 0 where the weight is 0
    mlm_labels: Array = None  # [B, P] int: the original ids at these positions
    mlm_weights: Array = None  # [B, P] float: 1 for a prediction, 0 for padding
    # Labels of a fine-tuning task, by its head. Sequence classification: [B, M] int, or float for a regression, or
    # [B, M, K] float, a probability for each class;
    # multiple choice: [B, M] int, at the first choice of each example the index of the right one among the M sequences,
    # and -1 at its further choices and at empty places; token classification: [B, L] int, -1 for tokens without a
    # label; question answering: [B, M, 2] int, the positions in the row of the answer's first and last token;
    # embeddings: `model.heads.embedding.Texts`, of the whole batch.
    labels: Array = None
    # The teacher's outputs for the row: [B, P, V] of the masked tokens, or as the task's head has its logits.
    teacher: Array = None
    # [B] bool: the row is read from left to right; None is all rows as the model reads them
    causal: Array = None
    # [B, L, width of the word table] float, in place of the rows of `token_ids` there: mixed or disturbed words, soft
    # prompts. A gradient by it tells which tokens matter. None looks the tokens up.
    word_vectors: Array = None
    # [B, M] bool: the sequence is a query, for heads with `knows_queries`; None has none
    queries: Array = None

    @classmethod
    def from_ids(
        cls, input_ids: Array, attention_mask: Array = None, token_type_ids: Array = None
    ) -> "Batch":
        """Returns the batch of arrays [B, L] as other libraries name them, a sequence in each row.

        Args:
          input_ids: the token ids, with [CLS] first.
          attention_mask: 1 for a token and 0 for padding, which may stand on either side; None is no padding.
          token_type_ids: None is 0 everywhere.

        Raises: InputError if the arrays are not all of one shape [B, L].
        """
        ids = _numbers(input_ids)
        mask = ids * 0 + 1 if attention_mask is None else _numbers(attention_mask)
        types = ids * 0 if token_type_ids is None else _numbers(token_type_ids)
        if ids.ndim != 2 or not ids.shape == mask.shape == types.shape:
            raise InputError(
                f"input_ids {ids.shape}, attention_mask {mask.shape} and token_type_ids {types.shape} are not all of "
                "one shape [rows, tokens]; pad the rows to one length"
            )
        inside = (mask > 0).astype(np.int32)
        return cls(
            token_ids=ids,
            type_ids=types,
            sequence_ids=inside,
            cls_positions=inside.argmax(axis=1).astype(np.int32)[:, None],
            sequence_weights=inside.max(axis=1).astype(np.float32)[:, None],
        )

    def __repr__(self) -> str:
        return show_shapes(self)


# Marks of a token: no token attends to it; its vector is not compared with others.
UNSEEN = 1
UNSCORED = 2


class Row(NamedTuple):
    """A row of model input made from an example: one sequence, or several packed one after the other."""

    example: int  # the index of its example; a long example may have several rows
    token_ids: np.ndarray  # [L] int32, no padding
    type_ids: np.ndarray  # [L] uint8
    lengths: tuple[int, ...]  # of its sequences, in order; they add up to L
    # None if unknown. A class or a number; [K] float, a probability for each class or label; the right choice, from 0;
    # [L] int, a class for each token or -1; the first and the last token of an answer.
    label: Any = None
    detail: Any = None  # further data for `Task.decode`; not an input of the model
    weight: float = 1.0  # of its label in the loss
    is_query: bool = False  # whether it is a query, of texts that are compared
    marks: np.ndarray | None = (
        None  # [L] uint8: `UNSEEN` + `UNSCORED` of each token; None is 0 for all
    )


class RowShape(NamedTuple):
    """The sizes of a row that memory, FLOPs and plans depend on. `Objective.row_shape` reads them from a batch."""

    length: int  # L
    sequences: int  # M
    predictions: int  # P
    bytes: int  # of all fields, before masking


class Encoded(NamedTuple):
    """The outputs of the encoder for a batch."""

    hidden: Array  # [B, L, H]: the last layer
    # [B, M, H]: dense + tanh of one token of every sequence, if there is a pooler (`Block`)
    pooled: Array | None
    # [num_layers + 1, B, L, H]: embeddings and every layer, with `keep_layers`; with norm before a block they are sums,
    # all but the last before a norm
    layers: Array | None
    # [D, V padded, width of it]: for the tied output layer; D equal copies (`copy_to_rows`)
    word_table: Array
    # [num_layers, B, N, L, L]: the probabilities, with `keep_attentions`
    attentions: Array | None = None

    def __repr__(self) -> str:
        return show_shapes(self)


def show_shapes(arrays: Any) -> str:
    """Returns a named tuple of arrays as text: dtypes and shapes in place of numbers; None is left out."""
    shown = []
    for name, value in zip(arrays._fields, arrays):
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            shown.append(f"{name}={value.dtype}[{','.join(map(str, value.shape))}]")
        elif value is not None:
            shown.append(f"{name}={value!r}")
    return f"{type(arrays).__name__}({', '.join(shown)})"


def _numbers(array: Array) -> Array:
    """Returns int32 of an array of NumPy or JAX, of another library's, or of lists."""
    return (array if hasattr(array, "astype") else np.asarray(array)).astype(np.int32)


def pad_rows(
    token_ids: Sequence[np.ndarray | Sequence[int]],
    row_length: int,
    type_ids: Sequence[np.ndarray | Sequence[int]] | None = None,
    lengths: Sequence[Sequence[int]] | None = None,
    num_sequences: int = 1,
    pad_id: int = 0,
) -> Batch:
    """Returns the batch of rows of different lengths, as numpy arrays, with nothing to predict in it yet.

    No result of a model depends on `pad_id`: padding has sequence id 0, so no token attends to it, and no loss reads
    its outputs. A caller that shows the ids to a user gives the tokenizer's own.

    Args:
      token_ids: B rows of token ids; a row without any only fills up the batch.
      row_length: L, not less than the longest row.
      type_ids: for each row as many as there are tokens; None is 0 everywhere.
      lengths: the lengths of the sequences of each row, in order, which add up to its tokens; None is one sequence
        in each row that is not empty.
      num_sequences: M, not less than the most sequences of a row.
      pad_id: the token id at the positions that no token has.
    """
    if lengths is None:
        lengths = [[len(ids)] if len(ids) else [] for ids in token_ids]
    of_sequences = _padded(lengths, num_sequences, 0, np.int32)
    is_sequence = np.arange(num_sequences) < _counts(lengths)
    sequence_ids = np.zeros((len(token_ids), row_length), np.int32)
    is_token = np.arange(row_length) < of_sequences.sum(axis=1, keepdims=True)
    sequence_ids[is_token] = np.repeat(
        np.tile(np.arange(1, num_sequences + 1), len(lengths)), of_sequences.ravel()
    )
    return Batch(
        token_ids=_padded(token_ids, row_length, pad_id, np.int32),
        type_ids=_padded(type_ids or [()] * len(token_ids), row_length, 0, np.uint8),
        sequence_ids=sequence_ids,
        cls_positions=np.where(
            is_sequence, of_sequences.cumsum(axis=1, dtype=np.int32) - of_sequences, 0
        ),
        sequence_weights=is_sequence.astype(np.float32),
    )


def _padded(
    rows: Sequence[np.ndarray | Sequence[int]], length: int, filling: int, dtype: type
) -> np.ndarray:
    """Returns rows of numbers as an array [rows, length]."""
    array = np.full((len(rows), length), filling, dtype)
    numbers = np.concatenate([np.zeros(0, dtype), *rows], dtype=dtype, casting="unsafe")
    array[np.arange(length) < _counts(rows)] = numbers
    return array


def _counts(rows: Sequence[np.ndarray | Sequence[int]]) -> np.ndarray:
    """Returns the number of values in each row, [rows, 1]."""
    return np.array([len(row) for row in rows], np.int32).reshape(-1, 1)
