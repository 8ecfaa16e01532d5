# SPDX-License-Identifier: Apache-2.0
"""Values of JSON that somebody has written, with errors that say where."""

import json
from typing import Any

from bert_jax.errors import InputError


def parse_json(text: str, where: str) -> Any:
    """Returns a value of JSON. Raises: InputError if it is not JSON, or holds half of a character."""
    value = load_json(text, where)
    check_characters(text, value, where)
    return value


def load_json(text: str, where: str, is_file: bool = False) -> Any:
    """Returns a value of JSON. Raises: InputError if it is not JSON; of a file it names the line."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        is_known = isinstance(error, json.JSONDecodeError)
        reason = f"{error.msg} at column {error.colno}" if is_known else str(error)[:80]
        where = f"{where}:{error.lineno if is_known else 1}" if is_file else where
        raise InputError(f"{where} is not JSON ({reason}); correct or remove it") from error


def check_characters(text: str, value: object, where: str) -> None:
    """Raises: InputError if a string holds half of a character, which no file can be written of."""
    if "\\u" not in text:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise InputError(f"{where} holds {half}, half of a character; correct the text") from None
