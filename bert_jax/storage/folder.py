# SPDX-License-Identifier: Apache-2.0
"""A directory as one value: the names in it are asked for once, and its small files are read once.

What reads a model or a tokenizer takes a `Folder`, or what was read from one, and asks the disk nothing else.
"""

import fnmatch
import functools
import os
from pathlib import Path
from typing import Any

from bert_jax.errors import InputError
from bert_jax.storage import files
from bert_jax.storage.files import JsonObject


class Folder:
    """A directory of this machine, as it was when it was listed.

    `folder / name` is the path of a file, for messages; `name in folder` says whether there is such a file.
    """

    def __init__(self, path: Path, missing_ok: bool = False) -> None:
        """Lists the directory. Raises: OSError if it cannot be listed; `missing_ok` makes it empty if it is none."""
        self.path = path
        self._entries: dict[str, os.DirEntry[str]] = {}
        try:
            with os.scandir(path) as entries:
                self._entries = {entry.name: entry for entry in entries}
        except (FileNotFoundError, NotADirectoryError):
            if not missing_ok:
                raise
        self._json: dict[str, Any] = {}

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> list[str]:
        """The names of everything in it, sorted."""
        return sorted(self._entries)

    @functools.cached_property
    def _files(self) -> set[str]:
        with files.reading(str(self.path)):  # only symbolic links are asked for
            return {name for name, entry in self._entries.items() if entry.is_file()}

    def matching(self, pattern: str) -> list[str]:
        """Returns the names of the files that match a pattern, sorted."""
        return sorted(fnmatch.filter(self._files, pattern))

    def checked(self) -> "Folder":
        """Returns itself. Raises: InputError if a pipe or a device is in it, from which a program may wait for ever."""
        for name in sorted(self._entries.keys() - self._files):
            if not self._entries[name].is_dir() and os.path.exists(self / name):
                raise files.no_file(self / name)
        return self

    def inside(self, name: str) -> "Folder":
        """Returns a directory in it, or itself for "" and "."; an empty one if there is no such directory."""
        if name in ("", "."):
            return self
        with files.reading(str(self / name)):
            return Folder(self / name, missing_ok=True).checked()

    def json(self, name: str) -> Any:
        """Returns the value of a JSON file. Raises: InputError if it is missing or not JSON."""
        if name not in self._json:
            if name not in self:
                raise InputError(f"{self / name} does not exist; copy the whole directory again")
            self._json[name] = files.parse_json(self.read_bytes(name), self / name)
        return self._json[name]

    def object(self, name: str) -> JsonObject:
        """Returns the object in a JSON file, {} if there is no file. Raises: InputError if it holds something else."""
        content = self.json(name) if name in self else {}
        if not isinstance(content, dict):
            raise InputError(f"{self / name} is not a JSON object; copy it again")
        return content

    def read_bytes(self, name: str) -> bytes:
        """Returns the content of a file, as `files.read_file` does."""
        return files.read_file(self / name)

    def large(self, name: str) -> Path:
        """Returns the path of a file that a library opens. Raises: InputError if it is not the file itself."""
        with files.opened(self / name):
            return self / name


def open_folder(path: Path) -> Folder:
    """Returns a directory as a value. Raises: InputError if it cannot be listed, or a pipe or a device is in it."""
    with files.reading(str(path)):
        return Folder(path).checked()
