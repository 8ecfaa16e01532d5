# SPDX-License-Identifier: Apache-2.0
"""What arrays that a user gives must be: their shapes, where a function is traced, and their numbers, on the host.

Without this, labels [B] beside logits [B, M, K] are a loss over [B, B], and ids beyond a table are NaN, without a word.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from bert_jax.batch import Batch, PyTree, Row
from bert_jax.errors import InputError
from bert_jax.settings.model import ModelConfig, check_type_ids

_SHAPES = {
    "token_ids": "BL",
    "type_ids": "BL",
    "sequence_ids": "BL",
    "cls_positions": "BM",
    "sequence_weights": "BM",
    "next_sentence_labels": "BM",
    "sequence_numbers": "BM",
    "epochs": "B",
    "word_starts": "BL",
    "mlm_positions": "BP",
    "mlm_labels": "BP",
    "mlm_weights": "BP",
    "causal": "B",
    "queries": "BM",
}
_ROWS_AT_ONCE = 4096  # whose ids are looked at together


def check_shapes(where: str, **named: tuple[Any, Sequence[str | int]]) -> None:
    """Raises: InputError if an array has not its shape: sizes, and letters, each for one size in all of the arrays.

    None is no array.
    """
    sizes: dict[str | int, int] = {}
    for name, (array, needed) in named.items():
        if array is None:
            continue
        shape = np.shape(array)
        for each, size in zip(needed, shape):
            sizes.setdefault(each, size if isinstance(each, str) else each)
        must = [sizes.get(each, each) for each in needed]
        if list(shape) != must:
            raise InputError(
                f"{where}: {name} has the shape {list(shape)} and must have [{', '.join(map(str, must))}]; make_batch "
                "makes such arrays, and bert_jax.Batch says what they hold"
            )


def check_fields(batch: Batch) -> None:
    """Raises: InputError if the fields of a batch, but for labels and a teacher's, do not have their shapes."""
    check_shapes("the batch", **{name: (getattr(batch, name), of) for name, of in _SHAPES.items()})


def check_batch(config: ModelConfig, batch: Batch) -> None:
    """Raises: InputError if a batch does not fit a model: its shapes, and its numbers where they are known.

    Or if a setting of the model breaks a rule.
    """
    config.validate()
    if config.compute_dtype == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise InputError(
            "model.compute_dtype float64 needs 64 bits; call jax.config.update('jax_enable_x64', True) first"
        )
    check_fields(batch)
    words = (*np.shape(batch.token_ids), config.embedding_width)
    check_shapes("the batch", word_vectors=(batch.word_vectors, words))
    (_, length), (_, places) = np.shape(batch.token_ids), np.shape(batch.cls_positions)
    # sizes of an exported program may be symbols
    is_known = isinstance(length, int) and isinstance(places, int)
    is_long = is_known and length > max(places, 1) * config.max_positions
    if is_long and config.positions == "learned":
        raise InputError(
            f"the batch has rows of {length} tokens and the model {config.max_positions} positions; give make_batch "
            f"the model in place of its tokenizer, or max_length={config.max_positions}"
        )
    below = {"token_ids": config.vocab_size, "cls_positions": length, "mlm_positions": length}
    # without types, or with a single one, they are not read
    if config.type_vocab_size > 1:
        below["type_ids"] = config.type_vocab_size
    for name, most in below.items():
        if (numbers := _known(getattr(batch, name))) is not None:
            check_below(f"{name} of the batch", numbers, most)


def _known(array: Any) -> np.ndarray | None:
    """Returns an array's numbers; None where it is traced, divided over hosts, or no array."""
    if isinstance(array, jax.Array) and not isinstance(array, Tracer):
        if array.is_fully_addressable:
            with jax.transfer_guard_device_to_host("allow"):
                return np.asarray(array)
    return array if isinstance(array, np.ndarray) else None


def check_rows(config: ModelConfig, rows: Sequence[Row], what: str) -> None:
    """Raises: InputError if rows have longer sequences, other ids or other types than the model has."""
    if not rows:
        return
    longest = max((length for row in rows for length in row.lengths), default=0)
    if longest > config.max_positions and config.positions == "learned":
        raise InputError(
            f"{what} has a sequence of {longest} tokens and the model {config.max_positions} positions; cut it there"
        )
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        ids = np.concatenate([row.token_ids for row in rows[first : first + _ROWS_AT_ONCE]])
        check_below(f"a token id in {what}", ids, config.vocab_size)
    check_type_ids(config, max(int(row.type_ids.max(initial=0)) for row in rows), what)


def check_below(name: str, numbers: np.ndarray, most: int) -> None:
    """Raises: InputError if one of the numbers is not from 0 to `most` - 1."""
    wrong = numbers[(numbers < 0) | (numbers >= most)]
    if wrong.size:
        raise InputError(
            f"{name} is {wrong[0]}, and the model has 0 to {most - 1}; correct it, or take the tokenizer of the model"
        )


def check_parts(params: PyTree, parts: Sequence[str]) -> None:
    """Raises: InputError if parameters lack parts of a model: "encoder", its "pooler", or those of a head."""
    encoder = params.get("encoder", {})
    missing = [part for part in parts if part not in (encoder if part == "pooler" else params)]
    if missing:
        there = ", ".join(sorted(params)) or "nothing"
        raise InputError(
            f"the parameters have no {', '.join(missing)}, but {there}; give all of a model's, or init_params makes "
            "those of a head"
        )
