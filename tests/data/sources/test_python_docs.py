# SPDX-License-Identifier: Apache-2.0
"""The documentation of Python comes out as prose, and without importing what it reads."""

import sys

import pytest

from bert_jax.data.sources import corpus, python_docs


@pytest.fixture(scope="module")
def documents() -> list[list[str]]:
    return list(corpus.iterate_documents("python-docs"))


def test_python_docs_is_hundreds_of_documents_of_prose(documents):
    paragraphs = [paragraph for document in documents for paragraph in document]
    text = "\n".join(paragraphs)
    assert len(documents) > 300
    assert len(text.split()) > 200_000
    assert all(len(document) > 1 for document in documents)
    assert all(paragraph == paragraph.strip() and "\n" not in paragraph for paragraph in paragraphs)
    for markup in (">>>", "``", ":func:", ":class:", "::=", "====", "----"):
        assert markup not in text, markup
    share_of_letters = sum(character.isalpha() or character == " " for character in text) / len(text)
    assert share_of_letters > 0.93


def test_python_docs_holds_topics_and_modules(documents):
    starts = [document[0] for document in documents]
    assert any(start.startswith("Augmented assignment is the combination") for start in starts), "a help topic"
    assert any("Heap queue algorithm" in start for start in starts), "a module"


def test_python_docs_imports_no_module_it_reads(documents):
    assert {"this", "antigravity", "turtle"}.isdisjoint(sys.modules)


@pytest.mark.parametrize(
    ("text", "paragraphs"),
    [
        ("A first line\nwrapped onto a second one.", ["A first line wrapped onto a second one."]),
        ("Title of it\n***********\n\nIt is about something else.", ["It is about something else."]),
        ("Use it like this:\n\n   call(now)\n\n   and then again here\n\nThat is all there is.",
         ["Use it like this:", "That is all there is."]),
        (">>> print(1)\n1\n\nThe doctest above is dropped.", ["The doctest above is dropped."]),
        ('   augop ::= "+=" | "-=" and more\n\nThe grammar above is dropped.', ["The grammar above is dropped."]),
        ("* one item of the list\n  goes on here\n* another item of the list",
         ["one item of the list goes on here", "another item of the list"]),
        ("Return ``None`` if *name* is :class:`~io.Bytes` or **so**.", ["Return None if name is io.Bytes or so."]),
        ("Two words", []),
    ],
)  # fmt: skip
def test_prose_of_marked_up_text(text, paragraphs):
    assert python_docs._prose_paragraphs(text) == paragraphs
