# SPDX-License-Identifier: Apache-2.0
"""Values of JSON that somebody has written, with errors that say where."""

import json

from bert_jax.errors import InputError


def parse_json(text: str, where: str) -> object:
    """Returns a value of JSON. Raises: InputError if it is not JSON, or holds half of a character."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise not_json(where, error) from None
    check_characters(text, value, where)
    return value


def check_characters(text: str, value: object, where: str) -> None:
    """Raises: InputError if a string holds half of a character, which no file can be written of."""
    if "\\u" not in text:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise InputError(f"{where} holds {half}, half of a character; correct the text") from None


def not_json(where: str, error: Exception) -> InputError:
    """Returns the error that says where a text is no JSON, and why."""
    reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)[:80]
    return InputError(f"{where} is not JSON ({reason}); correct or remove it")
