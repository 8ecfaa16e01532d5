# SPDX-License-Identifier: Apache-2.0
"""The tensors of a Hugging Face directory: model.safetensors, shards of it, or a pickle. The only home of safetensors.

Shards are model-00001-of-00002.safetensors and so on, and model.safetensors.index.json maps tensors to shards.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from bert_jax.checkpoints.families import FAMILIES, table_of
from bert_jax.checkpoints.hf_extras import find_prefix
from bert_jax.checkpoints.names import Arrays, canonical_names
from bert_jax.errors import InputError
from bert_jax.storage import files, schema, writing
from bert_jax.storage.folder import Folder

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
_METADATA = {"format": "pt"}  # without it older versions of transformers refuse the file


@contextlib.contextmanager
def open_weights(
    folder: Folder, family: str = "bert", kind: str = "", shares_words: bool = False
) -> Iterator[tuple[Path, dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]]:
    """Yields the file (for messages), {name: shape} of all tensors, and a function that reads a tensor.

    `family` and `kind`, the class of the model if known, determine which tensors repeat others; these are left out. If
    it `shares_words`, the table of words is there once and stands for the masked language model's own, too.
    """
    shards = folder.matching("model-*-of-*.safetensors")
    if WEIGHTS in folder and (shards or INDEX in folder):
        raise InputError(
            f"{folder.path} has both {WEIGHTS} and shards of it; remove those of another model"
        )
    with contextlib.ExitStack() as stack:
        if INDEX in folder or WEIGHTS in folder:
            name = folder / WEIGHTS
            files_of = {WEIGHTS}
            if INDEX in folder:
                name = folder / INDEX
                files_of = set(_weight_map(folder, INDEX).values())
            streams = [_open(folder, file, stack) for file in sorted(files_of)]
            homes = {tensor: stream for stream in streams for tensor in stream.keys()}
            shapes = {
                tensor: tuple(stream.get_slice(tensor).get_shape())
                for tensor, stream in homes.items()
            }

            def read(tensor: str) -> np.ndarray:
                return _read(homes[tensor], tensor, name)
        else:
            name, arrays = _load_pickles(folder)
            shapes = {key: tuple(array.shape) for key, array in arrays.items()}

            def read(tensor: str) -> np.ndarray:
                return arrays[tensor]

        table = {row.ours: row.hf for row in table_of(family)}
        words = table["encoder/embeddings/word/embedding"]
        prefix = find_prefix(
            shapes, lambda names: words in canonical_names(names, "hf", name, family)
        )
        shapes = {tensor.removeprefix(prefix): shape for tensor, shape in shapes.items()}
        shapes, read_one = _of_today(family, shapes, lambda tensor: read(prefix + tensor), name)
        yield name, *_without_ties(family, kind, shares_words, shapes, read_one, name)


def read_tensors(folder: Folder) -> Arrays:
    """Returns the tensors of a single file of a directory, such as those of a module beside a model."""
    if WEIGHTS not in folder:
        return _load_pickles(folder)[1]
    with contextlib.ExitStack() as stack:
        stream = _open(folder, WEIGHTS, stack)
        return {name: _read(stream, name, folder / WEIGHTS) for name in stream.keys()}


def _read(stream: Any, tensor: str, where: Path) -> np.ndarray:
    """Returns a tensor of an open file. Raises: InputError if numpy has no such numbers."""
    with files.reading(f"{where}: {tensor} of type {stream.get_slice(tensor).get_dtype()}"):
        return stream.get_tensor(tensor)


def write_weights(directory: Path, arrays: Mapping[str, np.ndarray], max_bytes: int) -> None:
    """Writes model.safetensors; shards of at most `max_bytes`, or of one tensor, where it would have more."""
    shards: list[Arrays] = [{}]
    size = 0
    for name, array in sorted(arrays.items()):
        if shards[-1] and size + array.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = array
        size += array.nbytes
    if len(shards) == 1:
        _save(shards[0], directory / WEIGHTS)
        return
    homes = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save(shard, directory / file)
        homes |= dict.fromkeys(shard, file)
    total = sum(array.nbytes for array in arrays.values())
    writing.write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": homes})


def _save(arrays: Arrays, path: Path) -> None:
    """Writes a file of arrays. Raises: StoppedError if it cannot be written, as on a full disk."""
    try:
        path.touch()
        mode = path.stat().st_mode
        safetensors.numpy.save_file(arrays, path, metadata=_METADATA)
        # as a new file of this user has it: from version 0.8 on the library lets only the owner read
        path.chmod(mode)
    except (safetensors.SafetensorError, OSError) as error:
        raise writing.cannot_write(path, error) from error


def _open(folder: Folder, name: str, stack: contextlib.ExitStack) -> Any:
    path = folder.large(name)
    with files.reading(str(path)):
        return stack.enter_context(safetensors.safe_open(path, framework="np"))


def _weight_map(folder: Folder, index: str) -> dict[str, str]:
    """Returns {tensor: name of the file that has it}."""
    where = folder / index
    with files.reading(str(where)):
        homes = folder.json(index)["weight_map"]
    schema.check(homes, dict[str, schema.FileName], f"{where}: weight_map", "copy it again")
    return homes


def _load_pickles(folder: Folder) -> tuple[Path, Arrays]:
    """Returns the tensors of pytorch_model.bin, through torch's loader that runs no code."""
    path = folder / PICKLE
    index = f"{PICKLE}.index.json"
    if PICKLE not in folder and index not in folder:
        raise InputError(
            f"{folder.path} has no {WEIGHTS}, {INDEX} or {PICKLE}; copy the one that it came with"
        )
    torch = import_torch(path)
    names = sorted(set(_weight_map(folder, index).values())) if index in folder else [PICKLE]
    arrays: Arrays = {}
    for name in names:
        file = folder.large(name)
        with files.reading(str(file)):
            tensors = torch.load(file, map_location="cpu", weights_only=True)
            for key, tensor in tensors.items():
                tensor = tensor.detach()  # a Parameter has a gradient
                arrays[str(key)] = (
                    tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()
                )
    return path, arrays


def import_torch(path: str | Path) -> ModuleType:
    """Returns torch, for its safe loader of pickles. Raises: InputError, with `path`, if it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise InputError(
            f"{path} is a pickle, and torch, whose loader runs no code, is not installed; install it, or write "
            "model.safetensors by save_pretrained of the model's class in transformers"
        ) from None


def _of_today(
    family: str,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    where: Path,
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """Returns shapes and reader by today's names, of a file that may be in an older layout of its family.

    Raises: InputError if it has tensors that cannot be computed.
    """
    of = FAMILIES[family]
    if not of.older:
        return shapes, read
    for part, what in of.foreign.items():
        if name := next((name for name in shapes if part in name), ""):
            raise InputError(f"{where}: {name} is {what}")
    places = {}
    for name in shapes:
        parts = of.names_of_today(name)
        places |= {part: (name, number, len(parts)) for number, part in enumerate(parts)}

    def read_part(tensor: str) -> np.ndarray:
        name, number, count = places[tensor]
        return np.split(read(name), count)[number] if count > 1 else read(name)

    of_parts = {}
    for tensor, (name, _, count) in places.items():
        rows, *rest = shapes[name] or (0,)
        of_parts[tensor] = (rows // count, *rest) if count > 1 else shapes[name]
    return of_parts, read_part


def _without_ties(
    family: str,
    kind: str,
    shares_words: bool,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    where: Path,
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """Returns shapes and reader without the output table and bias that repeat others.

    Raises: InputError if they do not repeat them.
    """
    names = canonical_names(shapes, "hf", where, family, kind)
    table = {row.ours: row.hf for row in table_of(family)}
    words = table["encoder/embeddings/word/embedding"]
    pairs = list(zip(FAMILIES[family].tied, (words, table["mlm/output_bias"]), strict=True))
    if shares_words:
        pairs.append((words, table["mlm/words/embedding"]))
    aliases = {}
    for copy, original in pairs:
        if copy in names and original not in names:
            aliases[original] = names[copy]
        elif copy in names and not np.array_equal(read(names[copy]), read(names[original])):
            raise InputError(
                f"{where}: {names[copy]} differs from {names[original]}, and here they are one table"
            )
    shapes = shapes | {original: shapes[copy] for original, copy in aliases.items()}
    return shapes, lambda name: read(aliases.get(name, name))
