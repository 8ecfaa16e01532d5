# SPDX-License-Identifier: Apache-2.0
"""Google's pre-training examples: TFRecord files of sequences with masks already drawn.

An example is written by create_pretraining_data.py of google-research/bert: seven features, three of length L
(`input_ids`, `input_mask`, `segment_ids`), three of length P (`masked_lm_positions`, `masked_lm_ids`,
`masked_lm_weights`) and `next_sentence_labels`. P is --max_predictions_per_seq; unused places have weight 0.
Letters: R examples, L positions, P places for predictions.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from bert_jax.data import records
from bert_jax.data.google import tfrecord
from bert_jax.errors import InputError
from bert_jax.storage import files
from bert_jax.text.tokenizer import Tokenizer

INPUTS = ("input_ids", "input_mask", "segment_ids")  # [R, L]
PREDICTIONS = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")  # [R, P]
LABELS = "next_sentence_labels"  # [R, 1]
AT_ONCE = 1024  # examples that are read together

Columns = dict[str, np.ndarray]  # a feature of R examples, [R, length of the feature]

# Reading


def read_examples(path: str) -> Iterator[tuple[int, Columns]]:
    """Yields the examples of a file, `AT_ONCE` at a time: the number of the first, from 1, and their features.

    Features are int64, `masked_lm_weights` float32, [R, length of the feature].

    Raises: InputError, with the number of the record, for damage, for a record that is not a tf.train.Example, and if
    a feature is missing, of another kind or of another length than in the first record.
    """
    stream = tfrecord.read_records(path)
    lengths: dict[str, int] = {LABELS: 1}
    first = 1
    while data := list(itertools.islice(stream, AT_ONCE)):
        yield first, _columns(path, first, data, lengths)
        first += len(data)


def _columns(path: str, first: int, data: list[bytes], lengths: dict[str, int]) -> Columns:
    """Returns the features of some records. `lengths` has their lengths, and is filled from the first record."""
    examples = []
    for number, record in enumerate(data, first):
        with files.reading(f"{path}, record {number}"):
            examples.append(tfrecord.parse_example(record))
    columns = {}
    for name in (*INPUTS, *PREDICTIONS, LABELS):
        kind = tfrecord.FLOATS if name == "masked_lm_weights" else tfrecord.INTEGERS
        payloads: list[bytes] = []
        for number, example in enumerate(examples, first):
            feature = example.get(name)
            if feature is None or feature.kind != kind:
                raise refusal(path, number, f"feature {name} is missing, or of another kind")
            payloads.append(feature.payload)  # type: ignore[arg-type]
        values, counts = _decode(path, first, name, kind, payloads)
        same = INPUTS if name in INPUTS else PREDICTIONS if name in PREDICTIONS else (LABELS,)
        length = next((lengths[other] for other in same if other in lengths), int(counts[0]))
        lengths[name] = length
        for index in np.flatnonzero(counts != length)[:1]:
            raise refusal(
                path,
                first + int(index),
                f"{name} has {counts[index]} values, and others here {length}",
            )
        columns[name] = values.reshape(len(data), length)
    return columns


def _decode(
    path: str, first: int, name: str, kind: int, payloads: list[bytes]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns all values of a feature, and the number of values of each record."""
    try:
        return tfrecord.decode_payloads(kind, payloads)
    except ValueError:
        for number, payload in enumerate(payloads, first):  # find the damaged one
            with files.reading(f"{path}, record {number}, feature {name}"):
                tfrecord.decode_payloads(kind, [payload])
        raise


_MADE = (
    "give the vocabulary that they were made with, or make them again by create_pretraining_data.py"
)


def refusal(path: str, number: int, reason: str, fix: str = _MADE) -> InputError:
    """Returns the error of a record, which are numbered from 1."""
    return InputError(f"{path}, record {number}: {reason}; {fix}")


# Rows


def check_examples(path: str, first: int, columns: Columns, tokenizer: Tokenizer) -> None:
    """Raises: InputError, with the number of the record, if a model cannot be trained on the examples."""
    ids, mask, types = (columns[name] for name in INPUTS)
    positions, labels, weights = (columns[name] for name in PREDICTIONS)
    lengths = mask.sum(axis=1, keepdims=True)
    real = np.arange(ids.shape[1]) < lengths
    used = weights == 1
    falls = np.diff(types, axis=1, prepend=0) < 0
    # Places that are not used get numbers below 0, each another: only used ones can be equal.
    ordered = np.sort(np.where(used, positions, -1 - np.arange(positions.shape[1])), axis=1)
    known = f"ids of the vocabulary, 0 to {tokenizer.vocab_size - 1}"
    # What values are, the values, and which of them are not: the first of these is told.
    rules = (
        (f"input_ids are {known}", ids, _beyond(ids, tokenizer)),
        (
            f"input_ids begin with {tokenizer.cls_id}, [CLS] of the vocabulary",
            ids,
            ids[:, :1] != tokenizer.cls_id,
        ),
        ("input_mask is ones, 2 or more, then zeros", mask, (mask != real) | (lengths < 2)),
        (
            "segment_ids are 0 in sentence A, 1 in B, and 0 in the padding",
            types,
            (types != np.where(real, types.clip(0, 1), 0)) | (real & falls),
        ),
        ("masked_lm_weights are 0 or 1", weights, ~used & (weights != 0)),
        (
            "masked_lm_weights of unused places come last",
            weights[:, 1:],
            used[:, 1:] & ~used[:, :-1],
        ),
        (
            "masked_lm_positions are in the sequence",
            positions,
            used & ((positions < 0) | (positions >= lengths)),
        ),
        ("masked_lm_positions are all different", ordered, ordered[:, 1:] == ordered[:, :-1]),
        (f"masked_lm_ids are {known}", labels, used & _beyond(labels, tokenizer)),
        (f"{LABELS} are 0 or 1", columns[LABELS], (columns[LABELS] < 0) | (columns[LABELS] > 1)),
    )
    for rule, values, wrong in rules:
        for row, column in np.argwhere(wrong)[:1].tolist():
            raise refusal(
                path, first + row, f"{rule}, and there is {values[row, column]:g} at place {column}"
            )


def _beyond(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Returns a mask of the ids that are not in the vocabulary."""
    return (ids < 0) | (ids >= tokenizer.vocab_size)


def examples_to_rows(
    columns: Columns, numbers: np.ndarray, tokenizer: Tokenizer, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Returns checked examples as rows [R] of `dtype`, and the ids [tokens] of their text without [CLS] and [SEP].

    If `dtype` has places for predictions, masks are kept as they are; if not, the labels are put back in the text.
    """
    positions, labels, weights = (columns[name] for name in PREDICTIONS)
    used = weights == 1
    text = columns["input_ids"].copy()
    text[np.nonzero(used)[0], positions[used]] = labels[used]
    real = columns["input_mask"] == 1
    rows = np.zeros(len(text), dtype)
    keep = "mlm_counts" in (dtype.names or ())
    rows["token_ids"] = np.where(real, columns["input_ids"] if keep else text, tokenizer.pad_id)
    rows["word_starts"] = records.pack_word_starts(tokenizer.word_starts[text] & real)
    rows["lengths"] = real.sum(axis=1, keepdims=True)
    rows["first_lengths"] = (real & (columns["segment_ids"] == 0)).sum(axis=1, keepdims=True)
    rows["labels"] = columns[LABELS]
    rows["numbers"] = numbers[:, None]
    if keep:
        rows["mlm_positions"] = np.where(used, positions, 0)
        rows["mlm_labels"] = np.where(used, labels, 0)
        rows["mlm_counts"] = used.sum(axis=1)
    return rows, text[real & (text != tokenizer.cls_id) & (text != tokenizer.sep_id)]
