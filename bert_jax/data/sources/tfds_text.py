# SPDX-License-Identifier: Apache-2.0
"""Text data sets of TensorFlow Datasets as documents, without TensorFlow.

An input is tfds:NAME[:VERSION][:SPLIT[:FEATURE]], such as tfds:lm1b, tfds:wikipedia/20230601.en:1.0.0,
tfds:my_texts:train[:10%] or tfds:imdb_reviews:train+unsupervised:text. NAME may end in a configuration. Left out,
VERSION is the newest that is prepared, SPLIT is train, and FEATURE is "text", or the only feature that is a text.
An example is a document.

Only prepared data sets are read, from TFDS_DATA_DIR or ~/tensorflow_datasets: a word in a command should not
set off a download of many gigabytes. It must be in a format with random access (array_record), for the sake of
ranges of examples that are prepared in parallel, and as TFDS needs TensorFlow to read any other.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from typing import Any

from bert_jax.data.sources.formats import Piece, text_lines
from bert_jax.errors import InputError, not_utf8, package_needed
from bert_jax.storage import files

TFDS = "TFDS"
PREFIX = "tfds:"

_INPUT = re.compile(
    r"tfds:(?P<name>[A-Za-z]\w*(/[\w.\-]+)?)(:(?P<version>\d+\.\d+\.\d+))?"
    # a split may have colons in its brackets
    r"(:(?P<split>([^:\[]|\[[^\]]*\])+)(:(?P<feature>[^:]+))?)?"
)
_EXAMPLES_AT_ONCE = 64


def plan_examples(source: str, piece_bytes: int) -> list[Piece]:
    """Returns the pieces of an input, ranges of examples of about `piece_bytes`; an empty split has none.

    Raises: InputError if there is no such data set, split or feature, or TFDS cannot read it without TensorFlow.
    """
    builder, split, _ = _open(source)
    num_examples = builder.info.splits[split].num_examples
    splits = builder.info.splits.values()  # TFDS does not know the bytes of parts and sums
    total_examples, total_bytes = (
        sum(part.num_examples for part in splits),
        sum(part.num_bytes for part in splits),
    )
    if num_examples:
        random_access(source, builder, split)  # raises an error now, before anything is written
    step = max(1, piece_bytes * total_examples // max(1, total_bytes))
    return [
        Piece(source, TFDS, start=start, end=min(start + step, num_examples))
        for start in range(0, num_examples, step)
    ]


def read_texts(piece: Piece) -> Iterator[list[str]]:
    """Yields the documents of a piece, without those that are blank.

    Raises: InputError if an example is not UTF-8 or cannot be read.
    """
    builder, split, feature = _open(piece.source)
    examples = random_access(piece.source, builder, split)
    for start in range(piece.start, piece.end, _EXAMPLES_AT_ONCE):
        numbers = list(range(start, min(start + _EXAMPLES_AT_ONCE, piece.end)))
        with tfds_errors(piece.source):
            batch = examples.__getitems__(numbers)
        for number, example in zip(numbers, batch):
            try:
                text = example[feature].decode("utf-8")
            except UnicodeDecodeError as error:
                raise not_utf8(error, f"{piece.source}, example {number}: {feature!r}") from None
            if document := text_lines(text):
                yield document


def examples_fingerprint(source: str) -> str:
    """Returns a sha256 of an input's identity: its full name with the version, split, feature, and TFDS's own metadata.

    The metadata hold the number of examples and bytes of every shard; the shards themselves are not read.
    """
    builder, split, feature = _open(source)
    digest = hashlib.sha256(" ".join([builder.info.full_name, split, feature]).encode())
    for name in ("dataset_info.json", "features.json"):
        with tfds_errors(source):
            digest.update((builder.data_path / name).read_bytes())
    return digest.hexdigest()


def open_builder(source: str, default_split: str = "") -> tuple[Any, str, str]:
    """Returns TFDS's builder of a prepared data set, and the split and the feature that an input names, or "".

    Raises: InputError if there is no such data set or split, or TFDS cannot read it without TensorFlow.
    """
    name, version, split, feature = _parse(source)
    split = split or default_split
    data_dir = os.environ.get("TFDS_DATA_DIR", "")
    with tfds_errors(source):
        with package_needed("tensorflow_datasets", source, "'bert_jax[tfds]'"):
            import tensorflow_datasets as tfds  # takes a second
        from tensorflow_datasets.core.constants import DATA_DIR
        from tensorflow_datasets.core.read_only_builder import builder_from_files

        builder: Any
        try:
            builder = builder_from_files(
                f"{name}:{version}" if version else name, data_dir=data_dir or None
            )
        except tfds.core.DatasetNotFoundError:
            wanted = f"{name}:{version}" if version else name
            raise InputError(
                f"{source} is not prepared in {data_dir or DATA_DIR}; set TFDS_DATA_DIR to where it is, or prepare it "
                f"once with 'tfds build {wanted} --file_format=array_record', which needs bert_jax[tf]"
            ) from None
        try:
            if split:
                builder.info.splits[split].num_examples  # noqa: B018  parses the split
        except (KeyError, ValueError):
            splits = ", ".join(builder.info.splits)
            raise InputError(
                f"{source} has no split {split!r}; it has {splits}, and parts as train[:10%]"
            ) from None
    return builder, split, feature


def _open(source: str) -> tuple[Any, str, str]:
    """Returns TFDS's builder of a prepared data set, and the split and the text feature that an input stands for."""
    builder, split, feature = open_builder(source, "train")
    with tfds_errors(source):
        import tensorflow_datasets as tfds

        kinds = dict(sorted(builder.info.features.items()))
        texts = [name for name, kind in kinds.items() if isinstance(kind, tfds.features.Text)]
    chosen = feature or ("text" if "text" in texts or len(texts) != 1 else texts[0])
    if chosen not in texts:
        example = f"{PREFIX}{_parse(source)[0]}:{split}:FEATURE"
        raise InputError(
            f"{source} has no text {chosen!r}, but {', '.join(texts) or 'none'}; choose one, as {example}"
        )
    return builder, split, chosen


def _parse(source: str) -> tuple[str, str, str, str]:
    """Returns the name, version, split and feature that an input names; "" for parts left out."""
    match = _INPUT.fullmatch(source)
    if not match:
        raise InputError(
            f"input {source!r} is not tfds:NAME[:VERSION][:SPLIT[:FEATURE]], such as tfds:lm1b"
        )
    return match["name"], match["version"] or "", match["split"] or "", match["feature"] or ""


def random_access(source: str, builder: Any, split: str) -> Any:
    """Returns the examples of a split, with random access.

    Raises: InputError if they are prepared in a format without random access.
    """
    with tfds_errors(source):
        try:
            return builder.as_data_source(split)
        except NotImplementedError:
            name = builder.info.full_name.rpartition("/")[0]
            raise InputError(
                f"{source} is prepared as {builder.info.file_format.value}, which has no random access; prepare it "
                f"again with 'tfds build {name} --file_format=array_record --overwrite', which needs bert_jax[tf]"
            ) from None


@contextlib.contextmanager
def tfds_errors(source: str) -> Iterator[None]:
    """Turns the errors of TFDS about an input into `InputError`s of one line."""
    with files.reading(source):
        try:
            yield
        except ImportError as error:
            raise InputError(
                f"{source}: TFDS needs TensorFlow for it ({error}); pip install 'bert_jax[tf]'"
            ) from None
