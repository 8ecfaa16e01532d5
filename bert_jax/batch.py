# SPDX-License-Identifier: Apache-2.0
"""The batch: the input of a model in one step, and the letters that name its dimensions.

Dimension letters, used in every shape of this project:

    B  rows of a batch (global)          N  attention heads
    L  positions of a row                D  size of one head
    M  sequences packed into a row       H  hidden size (N x D)
    P  predictions of a row              F  intermediate size of the feed-forward block
    V  vocabulary                        K  classes
"""

from typing import Any, NamedTuple, TypeAlias

Array: TypeAlias = Any  # a numpy array on the host, a jax.Array on devices; this file imports neither library
PyTree: TypeAlias = Any  # nested dicts, lists, tuples and named tuples of arrays, as in JAX


class Batch(NamedTuple):
    """Rows of token sequences, and the labels to predict.

    A row holds M >= 1 sequences one after the other. `sequence_ids` numbers them: 0 is padding, 1 is the
    first sequence. A token attends to another iff their sequence ids are equal and not 0, so this one field
    is both the padding mask and the packing mask. Fields that a task does not use are None.
    """

    token_ids: Array  # [B, L] int: ids in the vocabulary
    type_ids: Array  # [B, L] int: 0 in sentence A, 1 in sentence B
    sequence_ids: Array  # [B, L] int: 0 is padding, 1.. number the sequences of the row
    cls_positions: Array  # [B, M] int: where each sequence starts
    sequence_weights: Array  # [B, M] float: 1 for a sequence, 0 for an empty place
    next_sentence_labels: Array = None  # [B, M] int: 0 the true next sentence, 1 a random one
    # Input of masking (`masking.mask_tokens`), which fills in the predictions:
    sequence_numbers: Array = None  # [B, M] uint32: the sequence's number in the data set
    epochs: Array = None  # [B] int: how often the row has been seen before
    word_starts: Array = None  # [B, L] bool: the token begins a word
    # Masked tokens to predict:
    mlm_positions: Array = None  # [B, P] int: indices into the row; 0 where the weight is 0
    mlm_labels: Array = None  # [B, P] int: the original ids at these positions
    mlm_weights: Array = None  # [B, P] float: 1 for a prediction, 0 for padding
    # Labels of a fine-tuning task, by its head. Sequence classification: [B, M] int, or float for a regression;
    # multiple choice: [B, 1] int, the right one of the M sequences; token classification: [B, L] int, -1 for tokens
    # without a label; question answering: [B, 2] int, the first and the last token of the answer.
    labels: Array = None
