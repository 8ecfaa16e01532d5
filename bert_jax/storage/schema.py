# SPDX-License-Identifier: Apache-2.0
"""Types of the JSON files that this program writes: manifests, work directories, seals, exported models.

The types are Python's: dataclasses, `TypedDict`, `Annotated` with a range or a pattern. msgspec checks them; keys that
a type does not name may be there too. Files that people write have their own readers.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from bert_jax.errors import InputError
from bert_jax.storage.files import JsonObject, read_json
from bert_jax.storage.places import AnyPath

MOST = 2**53 - 1  # largest integer that every JSON reader represents exactly

Count = Annotated[int, Meta(ge=0, le=MOST)]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
# of a file in the directory of the file that names it, or below
FileName = Annotated[
    str, Meta(pattern=r"^(?!/)(?!(.*/)?\.\.(/|\Z))[^\x00-\x1f\ud800-\udfff]{1,4000}\Z")
]


def record(kinds: Mapping[str, Any]) -> type:
    """Returns the type of an object with these keys."""
    return msgspec.defstruct("Record", list(kinds.items()))


def read_record(path: AnyPath, kind: Any, remedy: str) -> JsonObject:
    """Returns the value in a JSON file of the program's own. Raises: InputError as `read_json` and `check`."""
    value = read_json(path)
    check(value, kind, path, remedy)
    return value


def check(value: object, kind: Any, where: object, remedy: str) -> None:
    """Raises: InputError, with the file and the place in it, unless a value of JSON is of a type."""
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError, UnicodeError) as error:
        raise InputError(f"{where}: {error}; {remedy}") from None
