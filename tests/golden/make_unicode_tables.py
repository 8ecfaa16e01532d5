# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of Unicode 14.0 that text normalisation uses to `bert_jax/text/unicode_14.json`.

    python3.11 tests/golden/make_unicode_tables.py

Each Python release brings newer Unicode tables, so a tokenizer that asked the interpreter would split the
same text differently on different machines. The file is written once, by Python 3.11, and read everywhere.
Numbers are hexadecimal code points; ranges include both ends.
"""

import unicodedata
from collections.abc import Callable, Iterable

from bert_jax.errors import InputError
from bert_jax.storage import writing
from bert_jax.storage.files import JsonObject
from bert_jax.text.normalize import TABLES_PATH, UNICODE_VERSION

_HANGUL_SYLLABLES = range(0xAC00, 0xD7A4)  # decomposed by arithmetic, not by table


def ranges(codes: Iterable[int]) -> str:
    """Returns ascending code points as ranges: "9 b-d 20"."""
    runs: list[list[int]] = []
    for code in codes:
        if runs and runs[-1][1] == code - 1:
            runs[-1][1] = code
        else:
            runs.append([code, code])
    return " ".join(f"{start:x}-{end:x}" if end > start else f"{start:x}" for start, end in runs)


def property_ranges(has_property: Callable[[str], bool]) -> str:
    """Returns the ranges of the code points with a property."""
    return ranges(code for code in range(0x110000) if has_property(chr(code)))


def combining_classes() -> dict[str, str]:
    """Returns the ranges of each non-zero canonical combining class: {"230": "300-314 ..."}."""
    members: dict[str, list[int]] = {}
    for code in range(0x110000):
        if value := unicodedata.combining(chr(code)):
            members.setdefault(str(value), []).append(code)
    return {value: ranges(codes) for value, codes in members.items()}


def lower_mappings() -> str:
    """Returns runs "start-end/step+shift" (or "-shift") of the letters whose lower-case form is one letter."""
    runs: list[list[int]] = []  # first, last, step (0 while there is but one letter), shift
    for code in range(0x110000):
        lower = chr(code).lower()
        if len(lower) != 1 or lower == chr(code):
            continue
        shift = ord(lower) - code
        if runs and runs[-1][3] == shift and runs[-1][2] in (0, code - runs[-1][1]) and code - runs[-1][1] <= 2:
            # Where capital and small letters alternate, as in Cyrillic, the step is 2.
            runs[-1][1:3] = [code, code - runs[-1][1]]
        else:
            runs.append([code, code, 0, shift])
    return " ".join(f"{start:x}-{end:x}/{step or 1}{shift:+x}" for start, end, step, shift in runs)


def mappings(image: Callable[[str], str], codes: Iterable[int]) -> str:
    """Returns "c0=41.300 ..." for the code points that `image` changes."""
    return " ".join(
        f"{code:x}=" + ".".join(f"{ord(char):x}" for char in image(chr(code)))
        for code in codes
        if image(chr(code)) != chr(code)
    )


def unicode_tables() -> JsonObject:
    """Returns every table, from the interpreter that runs this.

    Raises: InputError if its Unicode version is not the frozen one.
    """
    if unicodedata.unidata_version != UNICODE_VERSION:
        raise InputError(
            f"this Python knows Unicode {unicodedata.unidata_version}, the tables are of {UNICODE_VERSION};"
            " run this with Python 3.11"
        )
    category = unicodedata.category
    several_letters = [code for code in range(0x110000) if len(chr(code).lower()) > 1]
    not_hangul = [code for code in range(0x110000) if code not in _HANGUL_SYLLABLES]
    return {
        "unicode_version": UNICODE_VERSION,
        "control": property_ranges(lambda char: category(char) in ("Cc", "Cf")),
        "space": property_ranges(lambda char: category(char) in ("Zs", "Zl", "Zp")),
        "punctuation": property_ranges(lambda char: category(char).startswith("P")),
        "nonspacing_mark": property_ranges(lambda char: category(char) == "Mn"),
        "combining_class": combining_classes(),
        "cased": property_ranges(_is_cased),
        "case_ignorable": property_ranges(_is_case_ignorable),
        "lower": lower_mappings(),
        "lower_to_several": mappings(str.lower, several_letters),
        "decomposition": mappings(lambda char: unicodedata.normalize("NFD", char), not_hangul),
    }


def _is_case_ignorable(char: str) -> bool:
    # Python does not name the property, but str.lower() shows it: a sigma is final at the end of a word,
    # and what is ignored there neither ends the word nor goes on with it.
    return ("ΑΣ" + char).lower()[1] == "ς" and ("ΑΣ" + char + "Α").lower()[1] == "σ"


def _is_cased(char: str) -> bool:
    return ("ΑΣ" + char).lower()[1] == "σ"


if __name__ == "__main__":
    writing.write_json(TABLES_PATH, unicode_tables())
    print(f"{TABLES_PATH}: {TABLES_PATH.stat().st_size:,} bytes")
