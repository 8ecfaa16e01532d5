# SPDX-License-Identifier: Apache-2.0
"""Parses user-written JSON, with errors that name the location."""

import json
from typing import Any

from bert_jax.errors import InputError


def parse_json(text: str, where: str, is_file: bool = False) -> Any:
    """Returns the value of a JSON text. Raises: InputError if it is not JSON, with the line in a file.

    Half of a character is refused too: it cannot be written to a file.
    """
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeEncodeError as error:
        raise InputError(
            f"{where} holds half of a character ({error.reason}); correct the text"
        ) from None
    except (ValueError, RecursionError) as error:
        is_known = isinstance(error, json.JSONDecodeError)
        reason = f"{error.msg} at column {error.colno}" if is_known else str(error)[:80]
        where = f"{where}:{error.lineno if is_known else 1}" if is_file else where
        raise InputError(f"{where} is not JSON ({reason}); correct or remove it") from error
