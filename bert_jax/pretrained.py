# SPDX-License-Identifier: Apache-2.0
"""A trained BERT in one hand: its shape, its parameters and its tokenizer."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from bert_jax.batch import Batch
from bert_jax.checkpoint import SEAL, check_arrays, describe, find_damage, newest_whole, restore_tree, save_tree, seal
from bert_jax.config import ModelConfig, from_dict, to_dict
from bert_jax.errors import InputError
from bert_jax.model.objective import Params, init_params, pretraining_forward
from bert_jax.storage import read_json, write_json
from bert_jax.text.tokenizer import Tokenizer, load_tokenizer


class Encodings(NamedTuple):
    """What the encoder says of some texts. Arrays are on the host, float32."""

    hidden: np.ndarray  # [B, L, H]: the last layer, one vector a token
    pooled: np.ndarray  # [B, H]: what the next sentence head reads; no similarity embedding
    token_ids: np.ndarray  # [B, L] int32, [CLS] first, padded
    mask: np.ndarray  # [B, L] bool: True for a token, False for padding


@dataclass(frozen=True)
class Pretrained:
    """Configuration, parameters and tokenizer of a pre-trained BERT."""

    config: ModelConfig
    params: Params
    tokenizer: Tokenizer

    def encode(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> Encodings:
        """Returns the encodings of texts, or of pairs of texts, in one batch as long as the longest.

        Raises: InputError if there is no text or one has more tokens than the model has positions.
        """
        batch = make_batch(self.tokenizer, texts, self.config.max_positions)
        hidden, pooled = _encode(self.config, self.params, batch)
        mask = np.asarray(batch.sequence_ids) > 0
        return Encodings(np.asarray(hidden, np.float32), np.asarray(pooled[:, 0], np.float32), batch.token_ids, mask)


@partial(jax.jit, static_argnums=0)
def _encode(config: ModelConfig, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    encoded = pretraining_forward(config, params, batch).encoded
    return encoded.hidden, encoded.pooled


def make_batch(
    tokenizer: Tokenizer, texts: Sequence[str] | Sequence[tuple[str, str]], max_length: int, allow_special: bool = False
) -> Batch:
    """Returns [CLS] A [SEP] or [CLS] A [SEP] B [SEP] rows of numpy arrays, padded to the longest.

    With `allow_special`, "[MASK]" and its like in a text are taken as those tokens.

    Raises: InputError if there is no text or one is longer than `max_length` tokens, [CLS] and [SEP] included.
    """
    if not texts or isinstance(texts, str):
        raise InputError("there is no text to encode; give a list of texts or of pairs of texts")
    rows = []
    for number, text in enumerate(texts, 1):
        parts = [text] if isinstance(text, str) else list(text)
        pieces = [tokenizer.encode(part, allow_special=allow_special) for part in parts]
        token_ids = [tokenizer.cls_id]
        type_ids = [0]
        for kind, piece in enumerate(pieces):
            token_ids += [*piece, tokenizer.sep_id]
            type_ids += [kind] * (len(piece) + 1)
        if len(token_ids) > max_length:
            raise InputError(
                f"text {number} has {len(token_ids)} tokens with [CLS] and [SEP]; the model has {max_length} "
                "positions, so shorten or split it"
            )
        rows.append((token_ids, type_ids))
    num_rows, length = len(rows), max(len(token_ids) for token_ids, _ in rows)
    batch = Batch(
        token_ids=np.full((num_rows, length), tokenizer.pad_id, np.int32),
        type_ids=np.zeros((num_rows, length), np.int32),
        sequence_ids=np.zeros((num_rows, length), np.int32),
        cls_positions=np.zeros((num_rows, 1), np.int32),
        sequence_weights=np.ones((num_rows, 1), np.float32),
        mlm_positions=np.zeros((num_rows, 1), np.int32),
    )
    for row, (token_ids, type_ids) in enumerate(rows):
        batch.token_ids[row, : len(token_ids)] = token_ids
        batch.type_ids[row, : len(type_ids)] = type_ids
        batch.sequence_ids[row, : len(token_ids)] = 1
    return batch


def save_pretrained(directory: Path, config: ModelConfig, params: Params, tokenizer: Tokenizer) -> None:
    """Writes config.json, tokenizer/ and params/ with checksums: all that `load_pretrained` needs, no optimizer.

    The directory appears whole, in place of an older one of this kind.
    """
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_json(temporary / "config.json", {"format": 1, "model": to_dict(config)})
    tokenizer.save(temporary / "tokenizer")
    save_tree(temporary / "params", params)
    seal(temporary, {"arrays": describe(params)})
    if directory.exists():
        if not (directory / SEAL).exists():
            raise InputError(f"{directory} is there and is no exported model; choose another place")
        shutil.rmtree(directory)
    temporary.rename(directory)


def load_pretrained(path: str | Path) -> Pretrained:
    """Returns the pre-trained BERT at `path`: an exported directory, or a work directory of train.py.

    Of a work directory the newest whole checkpoint is taken.

    Raises: InputError if nothing of the kind is there, or if a file is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path} does not exist; give a work directory of train.py or an exported model")
    if not (path / "config.json").is_file() or not (path / "tokenizer").is_dir():
        raise InputError(f"{path} has no config.json or no tokenizer/; it is no work directory and no exported model")
    config = from_dict(ModelConfig, read_json(path / "config.json")["model"])
    tokenizer = load_tokenizer(path / "tokenizer")
    abstract = jax.eval_shape(partial(init_params, config), jax.random.key(0))
    if (path / "params").is_dir():
        problem = find_damage(path)
        if problem:
            raise InputError(f"{path} is damaged: {problem}; copy or export it again")
        check_arrays(path, read_json(path / SEAL)["arrays"], describe(abstract))
        return Pretrained(config, restore_tree(path / "params", _on_one_device(abstract)), tokenizer)
    checkpoint = newest_whole(path / "checkpoints")
    arrays = read_json(checkpoint / SEAL)["arrays"]
    found = {name.removeprefix("params/"): value for name, value in arrays.items() if name.startswith("params/")}
    check_arrays(checkpoint, found, describe(abstract))
    return Pretrained(
        config, restore_tree(checkpoint / "state", {"params": _on_one_device(abstract)})["params"], tokenizer
    )


def _on_one_device(abstract: Params) -> Params:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract)
