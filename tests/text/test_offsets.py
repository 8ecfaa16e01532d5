# SPDX-License-Identifier: Apache-2.0
"""Offsets: what a token's span holds becomes that token, in every script, and ids are those of `encode`."""

import gzip
import itertools
import json
import unicodedata

import numpy as np
import pytest

from bert_jax import load_tokenizer
from bert_jax.text.sentencepieces import BLANK, learn_sentencepieces
from bert_jax.text.tokenizer import Tokenizer, wordpiece_tokenizer
from tests.reference.make_tokenizer_goldens import fuzz_texts
from tests.text.test_sentencepieces import ENGLISH, JAPANESE
from tests.text.test_tokenizer import SPECIAL

LETTERS = "abcdefghijklmnopqrstuvwxyz0σςкд中文.!각"
LANGUAGES = "ar de el en es hi ro ru th tr vi zh".split()
TOKENS = [*SPECIAL, *LETTERS, *("##" + letter for letter in LETTERS), "cafe", "straße", "the", "##bar", "foo"]


@pytest.fixture(scope="module")
def small():
    return wordpiece_tokenizer(TOKENS, lowercase=True)


@pytest.fixture(scope="module")
def cased():
    return wordpiece_tokenizer([*TOKENS, "É", "##É", "##́"], lowercase=False)


@pytest.fixture(scope="module", params=[("unigram", False, False), ("bpe", True, True)], ids=["unigram", "bpe"])
def sentencepiece_tokenizer(request):
    kind, lowercase, strip_accents = request.param
    lines = [*ENGLISH, *JAPANESE, *["the naïve café, ﬁne lines", "가나다 라마바"] * 20]
    return Tokenizer(learn_sentencepieces(lines, 120, kind, lowercase, strip_accents, character_coverage=1))


def spans(tokenizer, text):
    """Returns each token with the text of its span."""
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    assert offsets.shape == (len(ids), 2) and offsets.dtype == np.int32
    return [(tokenizer.vocab[index], text[start:end]) for index, (start, end) in zip(ids, offsets)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cafe!", [("the", "The"), ("cafe", "cafe"), ("!", "!")]),
        ("  Foobar\n the", [("foo", "Foo"), ("##bar", "bar"), ("the", "the")]),
        ("Café foo", [("cafe", "Café"), ("foo", "foo")]),
        ("Cafe\u0301 foo", [("cafe", "Cafe\u0301"), ("foo", "foo")]),  # the accent belongs to its letter
        ("\u0301the", [("the", "the")]),  # this one to none
        ("foo\u200bbar", [("foo", "foo"), ("##bar", "bar")]),  # deleted, so it joins
        ("foo\x0bbar the", [("foo", "foo"), ("##bar", "bar"), ("the", "the")]),  # a blank to `str.split`, not to Google
        ("\x0b the", [("the", "the")]),
        ("a中文b", [("a", "a"), ("中", "中"), ("文", "文"), ("b", "b")]),
        ("각", [("ᄀ", "각"), ("##ᅡ", "각"), ("##ᆨ", "각")]),  # one character, three tokens
        ("ΣΣ.", [("σ", "Σ"), ("##ς", "Σ"), (".", ".")]),
        (
            "the 语言语言 Q€x.",
            [("the", "the"), *[("[UNK]", char) for char in "语言语言"], ("[UNK]", "Q€x"), (".", ".")],
        ),
        ("a" * 201 + ".", [("[UNK]", "a" * 201), (".", ".")]),
        ("x" + "ㅎ" * 5 + "!", [("[UNK]", "xㅎㅎㅎㅎㅎ"), ("!", "!")]),
        ("İx", [("i", "İ"), ("##x", "x")]),  # small it is two characters, without accents one
        ("", []),
        ("\u200b \t", []),
    ],
)
def test_spans_of_wordpiece(small, text, expected):
    assert spans(small, text) == expected


def test_accents_that_stay_are_tokens(cased):
    assert spans(cased, "cÉ e\u0301") == [("c", "c"), ("##É", "É"), ("e", "e"), ("##\u0301", "\u0301")]


def check_wordpiece(tokenizer, text, language="en"):
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    vocab, normalizer = tokenizer.vocab, tokenizer.pieces.normalizer
    last = 0
    for index, (start, end) in zip(ids, offsets.tolist()):
        normal = "".join(normalizer(text[start:end]))
        token = vocab[index].removeprefix("##")
        assert 0 <= start < end <= len(text)
        if index == tokenizer.unk_id or normal == token:
            assert start >= last
        else:  # a token of a character that became several, or a sigma that ends a word
            assert token in normal or "Σ" in text[start:end], (text[start:end], normal, token)
        last = end


@pytest.mark.parametrize("casing", ["tokenizer", "tokenizer_cased"])
def test_spans_of_fuzzed_text(repository, casing):
    tokenizer = load_tokenizer(repository / "tests/fixtures" / casing)
    for text in itertools.islice(fuzz_texts(), 0, None, 24):
        check_wordpiece(tokenizer, text)


def contexts(shared_data, language, stop):
    with gzip.open(shared_data / "xquad" / f"xquad.{language}.json.gz") as stream:
        articles = json.load(stream)["data"]
    return [paragraph["context"] for article in articles[:stop] for paragraph in article["paragraphs"]]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("stop", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_spans_of_twelve_languages(shared_data, language, stop):
    for casing in ("uncased", "cased", "chinese"):
        tokenizer = load_tokenizer(shared_data / "vocab" / f"bert-base-{casing}-vocab.txt")
        for text in contexts(shared_data, language, stop):
            check_wordpiece(tokenizer, text)
            if stop:
                break


def check_sentencepiece(tokenizer, text):
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    last = 0
    for index, (start, end) in zip(ids, offsets.tolist()):
        piece = tokenizer.vocab[index]
        assert 0 <= start <= end <= len(text)
        assert start < end or piece == BLANK
        assert text[start:end] == text[start:end].strip()
        letters = tokenizer.pieces._letters
        span = text[start:end].translate(letters) if letters else text[start:end]
        normal = tokenizer.pieces._model.normalize(span).replace(BLANK, "")
        if index != tokenizer.unk_id and normal != piece.replace(BLANK, ""):
            # Of a character that became several: a part of it, or the end of one piece and the start of the next.
            bare = piece.replace(BLANK, "")
            assert bare in normal or bare.startswith(normal), (span, normal, piece)
        shared = [char for char in text[start:last] if not unicodedata.category(char).startswith("M")]
        assert len(shared) <= 1  # a character that two pieces come from
        last = end


def test_spans_of_sentencepiece(sentencepiece_tokenizer):
    text = "The  wanted\u3000ﬁne café,\n吾輩は ½ 🙂猫 "
    check_sentencepiece(sentencepiece_tokenizer, text)
    _, offsets = sentencepiece_tokenizer.encode_with_offsets(text)
    covered = sorted({place for start, end in offsets for place in range(start, end)})
    assert "".join(text[place] for place in covered) == "".join(text.split())


@pytest.mark.parametrize("text", ["", " ", "\n\n", "½", "e\u0301", "㍿", "🙂", "ａ b", "\u200b", "é" * 300])
def test_spans_of_odd_text(sentencepiece_tokenizer, small, text):
    check_sentencepiece(sentencepiece_tokenizer, text)
    check_wordpiece(small, text)


def test_spans_of_fuzzed_pieces(sentencepiece_tokenizer):
    for text in itertools.islice(fuzz_texts(), 0, None, 48):
        if not any(0xD800 <= ord(char) < 0xE000 for char in text):
            check_sentencepiece(sentencepiece_tokenizer, text)


@pytest.mark.parametrize("language", LANGUAGES)
def test_spans_of_pieces_of_twelve_languages(shared_data, sentencepiece_tokenizer, language):
    for text in contexts(shared_data, language, 1)[:2]:
        check_sentencepiece(sentencepiece_tokenizer, text)
