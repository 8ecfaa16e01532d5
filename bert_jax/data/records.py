# SPDX-License-Identifier: Apache-2.0
"""The row format on disk: atomic writes and random access (docs/decisions/0004-row-format.md).

A data set is a directory: `manifest.json`, the tokenizer, the counts of its tokens, and shards. A shard is a
`.npy` file of fixed-size records (`row_dtype`), so row i is at a known offset and a memory map reads it without
parsing. Letters: L positions of a row, M places for sequences in a row, V vocabulary, R rows.
"""

import hashlib
import io
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np

from bert_jax.data.blocks import BlockSums, RowSource, block_rows
from bert_jax.errors import InputError, shown
from bert_jax.storage import files, schema, urls, writing
from bert_jax.storage.files import JsonObject
from bert_jax.storage.resolve import MANIFEST, Resolved, resolve
from bert_jax.storage.schema import Count, FileName, Meta, Sha256
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.tokenizing import load_tokenizer

FORMAT = "bert_jax rows"
VERSION = 1
PAIRS = "bert_jax pairs"  # the format of texts that belong together, of the same version
TOKENIZER = "tokenizer"
TOKEN_COUNTS = "token_counts.npy"
LENGTHS = "lengths.npy"
NO_LABEL = -1
_SPECIAL_IDS = ("pad_id", "unk_id", "cls_id", "sep_id", "mask_id")
_REMEDY = "copy it again, or delete the directory and prepare the data set again"


class _File(TypedDict):
    name: FileName
    bytes: Count
    sha256: Sha256


class _Blocks(TypedDict):
    rows: Annotated[int, Meta(ge=1)]
    crc32c: Annotated[str, Meta(pattern=r"^([0-9a-f]{8})*\Z")]


class _Shard(_File):
    rows: Count
    blocks: NotRequired[_Blocks]


class _Split(TypedDict):
    sequences: Count
    shards: list[_Shard]


class _Splits(TypedDict):
    train: _Split
    heldout: _Split


class _Inputs(TypedDict):
    names: list[str]
    files: Count
    bytes: Count


class _Options(TypedDict, total=False):
    next_sentence: Literal["nsp", "sop", "none"]


class _Identity(TypedDict):
    options: _Options


class _Row(TypedDict):
    length: Annotated[int, Meta(ge=1, lt=2**16)]
    max_sequences: Annotated[int, Meta(ge=1, lt=2**16)]
    predictions: NotRequired[Annotated[int, Meta(ge=0, lt=2**16)]]


class _Tokenizer(TypedDict):
    fingerprint: str
    vocab_size: Annotated[int, Meta(ge=1, lt=2**31)]
    pad_id: Count
    unk_id: Count
    cls_id: Count
    sep_id: Count
    mask_id: Count


class _Manifest(TypedDict):
    """The part of a manifest that is read. The rest is figures for people, and the versions that made the data set."""

    identity: _Identity
    row: _Row
    tokenizer: _Tokenizer
    splits: _Splits
    token_counts: _File
    inputs: NotRequired[_Inputs]  # since version 0.3


def row_dtype(
    row_length: int, max_sequences: int, vocab_size: int, predictions: int = 0
) -> np.dtype:
    """Returns the record of one row of L positions and M sequences. Its arrays come out as [R, L] and [R, M].

    With `predictions`, P, a row also holds the tokens to predict: static masks, made before training
    (docs/decisions/0006-what-is-predicted.md). `token_ids` are then the masked ids that the model sees.
    """
    # Ids take most of a row: two bytes each in place of four halve the disk and what is read in
    # training.
    ids = np.min_scalar_type(vocab_size - 1).newbyteorder("<")
    fields: list[tuple] = [
        ("token_ids", ids, (row_length,)),
        ("word_starts", "u1", (-(-row_length // 8),)),  # L bits, see `pack_word_starts`
        ("lengths", "<u2", (max_sequences,)),  # tokens with [CLS] and [SEP]; 0 is an empty place
        ("first_lengths", "<u2", (max_sequences,)),  # those of type 0: [CLS] A [SEP]
        ("labels", "i1", (max_sequences,)),  # 0 B follows A, 1 B is from elsewhere, NO_LABEL
        # the sequence's own number in its split, however it is packed
        ("numbers", "<u4", (max_sequences,)),
    ]
    if predictions:
        fields += [
            ("mlm_positions", "<u2", (predictions,)),  # indices into the row, then zeros
            ("mlm_labels", ids, (predictions,)),  # the ids that stood there, then zeros
            ("mlm_counts", "<u2"),  # the number of predictions
        ]
    return np.dtype(fields)


def pair_dtype(row_length: int, max_texts: int, vocab_size: int) -> np.dtype:
    """Returns the record of an example of up to M texts that belong together, L tokens in all."""
    ids = np.min_scalar_type(vocab_size - 1).newbyteorder("<")
    return np.dtype(
        [
            ("token_ids", ids, (row_length,)),  # [CLS] A [SEP] [CLS] B [SEP] ..., then padding
            ("lengths", "<u2", (max_texts,)),  # of each text, with [CLS] and [SEP]; 0 is no text
            ("texts", "<u8", (max_texts,)),  # the same for equal texts; 0 is no text
            # of each text after the first: a graded pair's score, or a teacher's; else 0
            ("scores", "<f4", (max_texts - 1,)),
        ]
    )


def pack_word_starts(word_starts: np.ndarray) -> np.ndarray:
    """Returns bool [R, L] as bits, uint8 [R, ceil(L / 8)], the first position in the highest bit."""
    return np.packbits(word_starts, axis=-1)


def unpack_word_starts(packed: np.ndarray, row_length: int) -> np.ndarray:
    """Returns bool [R, L] from the bits of `pack_word_starts`."""
    return np.unpackbits(packed, axis=-1, count=row_length).view(np.bool_)


def shard_name(split: str, index: int, num_shards: int) -> str:
    """Returns the file name of a shard, such as train-00000-of-00004.npy."""
    return f"{split}-{index:05d}-of-{num_shards:05d}.npy"


def write_shard(
    path: Path, dtype: np.dtype, num_rows: int, chunks: Iterable[np.ndarray]
) -> JsonObject:
    """Writes a shard of `num_rows` records and returns its name, rows, bytes, sha256 and the checksums of its blocks.

    Plain writes, no memory map: on a full disk a write fails with an error where a map kills the process.
    Raises: InputError if it cannot be written; nothing half-written is left.
    """
    # By hand, since np.save would hold all rows in memory at once.
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header,
        {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": False,
            "shape": (num_rows,),
        },
    )
    digest = hashlib.sha256()
    blocks = BlockSums(block_rows(dtype), dtype.itemsize)
    num_bytes = 0
    with writing.atomic_path(path) as temporary, open(temporary, "wb") as stream:
        for part in itertools.chain(
            [header.getvalue()], (chunk.astype(dtype, copy=False).tobytes() for chunk in chunks)
        ):
            if num_bytes:
                blocks.update(part)
            num_bytes += stream.write(part)
            digest.update(part)
        if num_bytes != len(header.getvalue()) + num_rows * dtype.itemsize:
            raise ValueError(f"{path}: {num_rows} rows were promised, another number was given")
    sha256 = digest.hexdigest()
    return {
        "name": path.name,
        "rows": num_rows,
        "bytes": num_bytes,
        "sha256": sha256,
        "blocks": blocks.result(),
    }


def read_part(path: Path, names: Iterable[str]) -> JsonObject | None:
    """Returns the record of a part that a stopped run had finished; None if it is missing or damaged.

    `names` are the keys that it must have: keys of the result of `write_shard`, "file" for a whole such result,
    "shards" for a list of them, and others for numbers.
    """
    known = _File.__annotations__ | {"file": _Shard, "shards": list[_Shard]}
    form = schema.record({name: known.get(name, float) for name in names})
    try:
        return schema.read_record(path, form, "") if path.is_file() else None
    except InputError:  # the part is made again
        return None


def finish_dataset(
    path: Path,
    identity: JsonObject,
    row: dict[str, int],
    tokenizer: Tokenizer,
    splits: dict[str, JsonObject],
    token_counts: np.ndarray,
    made_with: dict[str, str],
    form: str = FORMAT,
    **figures: object,
) -> JsonObject:
    """Returns the manifest of a directory that has its shards, after writing the counts of tokens and the manifest.

    Args:
      path: the directory.
      identity: the origin of the data set: format, version, options, input, tokenizer.
      row: length (L), max_sequences (M), and predictions (P) if masks are static.
      tokenizer: the `text.tokenizer.Tokenizer` that made the ids.
      splits: of "train" and "heldout": sequences, shards as `write_shard` describes them, and any figures.
      token_counts: int64 [V].
      made_with: versions.
      form: the format of the records.
      figures: more to keep in the manifest.
    """
    counts_path = path / TOKEN_COUNTS
    writing.write_array(counts_path, token_counts)
    manifest = {
        "format": form,
        "version": VERSION,
        "identity": identity,
        "row": row,
        "tokenizer": {
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            **{name: int(getattr(tokenizer, name)) for name in _SPECIAL_IDS},
        },
        "splits": splits,
        "token_counts": {
            "name": counts_path.name,
            "bytes": counts_path.stat().st_size,
            "sha256": files.sha256_file(counts_path),
        },
        "made_with": made_with,
        **figures,
    }
    # Last: a directory without it is not a data set.
    writing.write_json(path / MANIFEST, manifest)
    return manifest


@dataclass(frozen=True)
class LocalRows:
    """The rows of all shards of a split, numbered through, on the local disk."""

    dtype: np.dtype
    num_sequences: int
    shards: tuple[np.ndarray, ...]  # uint8 [rows of the shard, bytes of a row], memory maps
    ends: np.ndarray  # int64 [number of shards]: where each shard's rows end

    @property
    def num_rows(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def gather(self, row_indices: np.ndarray) -> np.ndarray:
        """Returns the rows [n] with these indices [n], in their order, as records of `dtype` in memory.

        Raises: IndexError if an index is not in [0, num_rows).
        """
        indices = np.asarray(row_indices, np.int64)
        if len(indices) and not (0 <= indices.min() and indices.max() < self.num_rows):
            raise IndexError(
                f"row indices {indices.min()}..{indices.max()} are not in [0, {self.num_rows})"
            )
        # Bytes are copied row by row (memcpy); indexing records would copy them field by field.
        if len(self.shards) == 1:
            rows = self.shards[0].take(indices, axis=0)
        else:
            rows = np.empty((len(indices), self.dtype.itemsize), np.uint8)
            homes = np.searchsorted(self.ends, indices, side="right")
            for home in np.unique(homes):
                (places,) = np.nonzero(homes == home)
                shard = self.shards[home]
                rows[places] = shard.take(indices[places] - (self.ends[home] - len(shard)), axis=0)
        return rows.view(self.dtype)[:, 0] if len(rows) else np.empty(0, self.dtype)

    def close(self) -> None:
        """Does nothing: memory maps need not be closed."""


@dataclass(frozen=True)
class Dataset:
    """A prepared data set, open for reading."""

    path: Path
    manifest: JsonObject
    train: RowSource
    heldout: RowSource  # without rows if nothing was held out
    # int64 [V]: how often each id occurs in the text of the training documents
    token_counts: np.ndarray

    @property
    def tokenizer_path(self) -> str:
        """The directory of the tokenizer that made the data set."""
        return str(self.path / TOKENIZER)

    def load_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer that made the data set.

        Raises: InputError if it cannot be read, or is not the one that the manifest names.
        """
        tokenizer = load_tokenizer(self.tokenizer_path)
        named = self.manifest["tokenizer"]["fingerprint"]
        if tokenizer.fingerprint != named:
            ids = f"other ids than the rows (fingerprint {tokenizer.fingerprint[:12]}, not {shown(named[:12])})"
            raise InputError(
                f"{self.tokenizer_path} is damaged or was replaced: it gives {ids}; copy it again"
            )
        return tokenizer

    @property
    def fingerprint(self) -> str:
        """The sha256 of the contents of all shards."""
        return fingerprint_of(self.manifest)

    @property
    def row_length(self) -> int:
        """L, the positions of a row."""
        return self.manifest["row"]["length"]

    @property
    def words_of_row(self) -> float:
        """The words of the text that a row stands for, on average. Raises: InputError if the manifest has no count."""
        split = self.manifest["splits"]["train"]
        if not split.get("words"):
            raise InputError(
                f"{self.path} does not say how many words its text has; leave checkpoint.keep_words out"
            )
        # [CLS] and the [SEP]s of a sequence, which are no words of its text
        special = 2 if self.manifest["identity"]["options"].get("next_sentence") == "none" else 3
        tokens = split["fill"] * split["rows"] * self.row_length - special * split["sequences"]
        return split["words"] * tokens / split["tokens"] / split["rows"]

    def close(self) -> None:
        """Stops background reads of remote rows, which cannot be read afterwards."""
        self.train.close()
        self.heldout.close()


def fingerprint_of(manifest: JsonObject) -> str:
    """Returns the sha256 of the contents of all shards."""
    shards = [shard for split in manifest["splits"].values() for shard in split["shards"]]
    return hashlib.sha256(" ".join(shard["sha256"] for shard in shards).encode()).hexdigest()


class About(NamedTuple):
    """A data set without its rows."""

    url: str  # without a last "/"; "" if it is on this machine
    path: Path  # of its directory, or of a copy of the manifest, the tokenizer and the counts
    manifest: JsonObject
    dtype: np.dtype  # of a row
    token_counts: np.ndarray  # int64 [V]

    @property
    def num_bytes(self) -> int:
        """The bytes of all shards."""
        return sum(shard["bytes"] for shard in self.shards)

    @property
    def shards(self) -> list[JsonObject]:
        """The manifest's records of all shards."""
        return [shard for split in self.manifest["splits"].values() for shard in split["shards"]]


def open_dataset(path: str | Path, tokenizer_fingerprint: str = "", verify: bool = True) -> Dataset:
    """Returns the data set in a directory, after checking that it is whole.

    The directory may be a URL, whose files are copied to the cache. `tokenizer_fingerprint` must be that of the data if
    given. Sizes and headers are always checked; `verify` also compares all checksums, about a second per gigabyte.

    Raises: InputError if there is no data set, or one of another format, tokenizer or version, or a damaged one.
    """
    return open_rows(open_about(resolve(path), tokenizer_fingerprint, verify), verify)


def open_rows(about: About, verify: bool = True) -> Dataset:
    """Returns the data set with its rows, which are copied if they are at a URL; see `open_dataset`."""
    files.allow_many_files()  # each shard is one
    if about.url:
        urls.copy_beside(
            str(about.path / MANIFEST), about.url, [shard["name"] for shard in about.shards]
        )
    files.check_sizes(about.path, about.shards, _REMEDY)
    if verify:
        files.check_sums(about.path, about.shards, _REMEDY)
    splits = about.manifest["splits"]
    rows = {}
    for name in ("train", "heldout"):
        shards = []
        for shard in splits[name]["shards"]:
            records = _load(about.path / shard["name"])
            # The header of the file against the manifest: a size alone may be right by chance.
            if records.dtype != about.dtype or records.shape != (shard["rows"],):
                raise InputError(
                    f"{about.path / shard['name']} does not hold {shard['rows']} rows; prepare it again"
                )
            shards.append(records.view(np.uint8).reshape(len(records), about.dtype.itemsize))
        rows[name] = LocalRows(
            dtype=about.dtype,
            num_sequences=splits[name]["sequences"],
            shards=tuple(shards),
            ends=np.cumsum([len(shard) for shard in shards], dtype=np.int64),
        )
    return Dataset(about.path, about.manifest, rows["train"], rows["heldout"], about.token_counts)


def open_about(
    source: Resolved, tokenizer_fingerprint: str = "", verify: bool = True, form: str = FORMAT
) -> About:
    """Returns a data set of a format without its rows; see `open_dataset`."""
    source.expect("data")
    path = source.place
    url = ""
    if not isinstance(path, Path):
        path, url = Path(urls.local_copy(f"{path}/{MANIFEST}")).parent, str(path)
    manifest = _read_manifest(path, form)
    made_by = manifest["tokenizer"]["fingerprint"]
    if tokenizer_fingerprint and tokenizer_fingerprint != made_by:
        made = f"{path} was made with tokenizer {made_by[:12]}, not {tokenizer_fingerprint[:12]}"
        raise InputError(
            f"{made}; use the tokenizer in {path / TOKENIZER} or prepare the text again"
        )
    counts = manifest["token_counts"]
    if url:
        urls.copy_beside(str(path / MANIFEST), url, [f"{TOKENIZER}/", counts["name"]])
    files.check_sizes(path, [counts], _REMEDY)
    if verify:
        files.check_sums(path, [counts], _REMEDY)
    row = manifest["row"]
    vocab_size = manifest["tokenizer"]["vocab_size"]
    sizes = row["length"], row["max_sequences"], vocab_size
    if form == PAIRS:
        dtype = pair_dtype(*sizes)
    else:
        dtype = row_dtype(*sizes, predictions=row.get("predictions", 0))
    token_counts = _load(path / counts["name"])
    if token_counts.shape != (vocab_size,) or token_counts.dtype.kind not in "iu":
        raise InputError(
            f"{path / counts['name']} does not hold the counts of {vocab_size} tokens; prepare it again"
        )
    return About(url, path, manifest, dtype, token_counts)


def _read_manifest(path: Path, form: str) -> JsonObject:
    """Returns the manifest of a directory. Raises: InputError if it is damaged or of another format."""
    manifest = files.read_json(path / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != form:
        other = str(manifest.get("format")) if isinstance(manifest, dict) else ""
        uses = {FORMAT: "for pre-training", PAIRS: "for finetune:embeddings"}
        fix = f"it is {uses[other]}" if other in uses else "it belongs to something else"
        raise InputError(f"{path / MANIFEST} does not describe {form!r}; {fix}")
    if manifest.get("version") != VERSION:
        theirs = shown(manifest.get("version"))
        raise InputError(
            f"{path} has format version {theirs}, not {VERSION}; prepare the text again"
        )
    remedy = "it is damaged, so copy it again or prepare the text again"
    schema.check(manifest, _Manifest, path / MANIFEST, remedy)
    schema.check(manifest["splits"], dict[str, _Split], path / MANIFEST, remedy)
    return manifest


def _load(path: Path) -> np.ndarray:
    """Returns the memory map of a `.npy` file. Raises: InputError if it is not a valid one."""
    # any error: the header of such a file is Python, and fails as Python does
    with files.reading(str(path)):
        return np.lib.format.open_memmap(path, mode="r")
