# SPDX-License-Identifier: Apache-2.0
"""Writes bert_jax/text/unicode_library.json: where the library `tokenizers` knows other characters than Unicode 14.

    python tests/golden/make_unicode_library.py        # with tokenizers 0.23

Sets have the characters of which one of the two says otherwise; `lower` and `decomposition` are the library's.
"""

import json

from tokenizers import normalizers, pre_tokenizers

from bert_jax.text.normalize import TABLES_PATH, unicode_tables

PRIVATE = {*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)}


def bert(**options):
    usual = {"clean_text": False, "handle_chinese_chars": False, "strip_accents": False, "lowercase": False}
    return normalizers.BertNormalizer(**usual | options).normalize_str


def ranges(codes) -> str:
    found: list[list[int]] = []
    for code in sorted(codes):
        if found and found[-1][1] == code - 1:
            found[-1][1] = code
        else:
            found.append([code, code])
    return " ".join(f"{first:x}" if first == last else f"{first:x}-{last:x}" for first, last in found)


def images(theirs, ours) -> str:
    other = {code: image for code, image in theirs.items() if image != ours.get(code, chr(code))}
    return " ".join(f"{code:x}=" + ".".join(f"{ord(char):x}" for char in image) for code, image in other.items())


def main() -> None:
    tables = unicode_tables()
    codes = [code for code in range(1, 0x110000) if not 0xD800 <= code < 0xE000 and code not in PRIVATE]
    clean, strip, split = bert(clean_text=True), bert(strip_accents=True), pre_tokenizers.BertPreTokenizer()
    control = {code for code in codes if not clean(chr(code))} - {0xFFFD}
    marks = {code for code in codes if not strip(chr(code))}
    punctuation = {code for code in codes if len(split.pre_tokenize_str(f"a{chr(code)}b")) == 3}
    lower, decompose = normalizers.Lowercase().normalize_str, normalizers.NFD().normalize_str
    decomposed = {code: tables.decompose(chr(code)) for code in codes}
    content = {
        "control": ranges(control ^ tables.control & set(codes)),
        "punctuation": ranges(punctuation ^ tables.punctuation),
        "nonspacing_mark": ranges(marks ^ tables.nonspacing_mark),
        "lower": images({code: lower(chr(code)) for code in codes}, tables.lower),
        "decomposition": images({code: decompose(chr(code)) for code in codes}, decomposed),
    }
    path = TABLES_PATH.with_name("unicode_library.json")
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
