# SPDX-License-Identifier: Apache-2.0
"""Normalisation is Google's, character for character, on every Python."""

import itertools
import json
import pickle
import subprocess
import sys
import unicodedata

import pytest
from golden import make_unicode_tables

from bert_jax.text import normalize
from bert_jax.text.normalize import Normalizer
from tests.reference.make_tokenizer_goldens import LINES_PER_HASH, character_texts, fuzz_texts, hashes, sigma_texts

CASINGS = ("uncased", "cased")


@pytest.fixture(scope="module")
def goldens(repository):
    return json.loads((repository / "tests/golden/tokenizer.json").read_text())


def test_words_of_the_characters_of_all_scripts_are_those_of_the_reference(goldens):
    """Of Unicode's first two planes; the others are in the slow test below."""
    texts = itertools.islice(character_texts(), 5 * LINES_PER_HASH)
    assert hashes(map(Normalizer(lowercase=True), texts))[:5] == goldens["uncased"]["characters"][:5]


@pytest.mark.parametrize(
    ("texts", "casing"),
    [
        pytest.param(texts, casing, marks=[pytest.mark.slow] * (texts is character_texts))
        for texts in (character_texts, sigma_texts, fuzz_texts)
        for casing in CASINGS
    ],
)
def test_words_are_those_of_the_reference(goldens, casing, texts):
    key = {character_texts: "characters", sigma_texts: "sigmas", fuzz_texts: "fuzz_words"}[texts]
    words = Normalizer(lowercase=casing == "uncased")
    assert hashes(map(words, texts())) == goldens[casing][key]


@pytest.mark.slow
@pytest.mark.skipif(unicodedata.unidata_version != normalize.UNICODE_VERSION, reason="needs Python 3.11's tables")
def test_frozen_tables_are_those_of_python_3_11():
    assert make_unicode_tables.unicode_tables() == json.loads(normalize.TABLES_PATH.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text",
    [
        "x\u0897",  # ARABIC PEPET, a mark since Unicode 16
        "\ua7cb\u1c89",  # capital letters with small ones since Unicode 16
        "\u2ffc.\U00010ec0",
        "x\U00011f00y",  # a mark since Unicode 15
    ],
)
def test_characters_of_later_unicode_versions_stay_as_they_are(text):
    assert "".join(Normalizer(lowercase=True)(text)) == text


@pytest.mark.parametrize(
    ("lowercase", "strip_accents", "words"),
    [
        (True, None, ["elan", "가", "σας", "ist", "i"]),
        (True, True, ["elan", "가", "σας", "ist", "i"]),
        (True, False, ["élan", "가", "σάς", "ist", "i̇"]),
        (False, None, ["Élan", "가", "ΣΆΣ", "Ist", "İ"]),
        (False, False, ["Élan", "가", "ΣΆΣ", "Ist", "İ"]),
        (False, True, ["Elan", "가", "ΣΑΣ", "Ist", "I"]),
    ],
)
def test_accents_apart_from_letter_case(lowercase, strip_accents, words):
    strips = lowercase if strip_accents is None else strip_accents
    expected = [unicodedata.normalize("NFD", word) if strips else word for word in words]
    assert Normalizer(lowercase, strip_accents)("Élan 가 ΣΆΣ Ist İ") == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        (" \t\r\n\u00a0\u3000", []),
        ("Hello, World!", ["hello", ",", "world", "!"]),
        ("a\x00b\ufffdc\u200bd\u00ade\ufefff", ["abcdef"]),  # dropped characters join words
        ("a\x0bb\x1cc\x85d", ["abcd"]),  # even where Python sees blanks
        ("a\u2028b", ["a", "b"]),
        ("it's $5^2 €5", ["it", "'", "s", "$", "5", "^", "2", "€5"]),
        ("北京ab", ["北", "京", "ab"]),
        ("かな", ["かな"]),
        ("[MASK]", ["[", "mask", "]"]),
    ],
)
def test_words(text, words):
    assert Normalizer(lowercase=True)(text) == words


def test_chinese_characters_may_stay_together():
    assert Normalizer(True, split_chinese=False)("北京ab!") == ["北京ab", "!"]


def test_what_blanks_separate_can_be_normalised_apart():
    for words in (Normalizer(True), Normalizer(False), Normalizer(True, False), Normalizer(False, True)):
        for text in fuzz_texts(1000):
            assert [word for part in normalize.blank_separated(text) for word in words(part)] == words(text)


def test_characters_that_stand_alone():
    normalizer = Normalizer(lowercase=True)
    assert [char for char in "aZ9é.$北 か€\u0301" if normalizer.stands_alone(char)] == [".", "$", "北", " ", "\u0301"]


def test_pickled_normalizer_does_the_same():
    normalizer = pickle.loads(pickle.dumps(Normalizer(False, True)))
    assert normalizer("Élan") == ["Elan"]


def test_text_imports_no_jax():
    modules = "bert_jax.text.tokenizer, bert_jax.text.vocab, bert_jax.tools.build_vocab"
    code = f"import sys, bert_jax.text, {modules}; print(sorted({{'jax', 'flax', 'tensorflow'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
