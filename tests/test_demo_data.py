# SPDX-License-Identifier: Apache-2.0
"""The demo's data: Python's documentation as prose, and a task in which no module is in two splits."""

import collections
import importlib.util
import itertools
import sys

import pytest
from conftest import ROOT

from bert_jax.tools import recipes


def load():
    spec = importlib.util.spec_from_file_location("demo_data", ROOT / "configs" / "demo_data.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo_data"] = module  # its named tuples ask for it
    spec.loader.exec_module(module)
    return module


demo_data = load()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Returns the directory that the script writes, and the examples of each split."""
    output = tmp_path_factory.mktemp("demo")
    return output, demo_data.write_demo_data(output)


@pytest.mark.slow
def test_the_text_is_prose_of_topics_and_modules_none_of_which_is_imported(written):
    text = (written[0] / "text.txt").read_text("utf-8")
    documents = [document.splitlines() for document in text.split("\n\n")]
    assert len(documents) > 300 and len(text.split()) > 200_000 and min(map(len, documents)) > 1
    for markup in (">>>", "``", ":func:", ":class:", "::=", "====", "----"):
        assert markup not in text, markup
    assert sum(character.isalpha() or character.isspace() for character in text) / len(text) > 0.93
    assert {"this", "antigravity", "turtle"}.isdisjoint(sys.modules)


@pytest.mark.slow
def test_no_module_is_in_two_splits_and_a_constant_answer_is_worth_little(written):
    output, splits = written
    for one, other in itertools.combinations(splits.values(), 2):
        assert not {each.module for each in one} & {each.module for each in other}
        assert not {each.text for each in one} & {each.text for each in other}
    for name, chosen in splits.items():
        counts = collections.Counter(each.area for each in chosen)
        assert set(counts) == set(demo_data.AREAS) and max(counts.values()) < 0.16 * len(chosen)
        header, *lines = (output / "areas" / f"{name}.tsv").read_text("utf-8").splitlines()
        assert header == "text\tarea" and [line.split("\t")[1] for line in lines] == [each.area for each in chosen]
        assert all(8 <= len(each.text.split()) <= 40 for each in chosen)


def test_what_is_there_is_kept(tmp_path):
    (tmp_path / "text.txt").write_text("mine")
    demo_data._write(tmp_path / "text.txt", "another")
    demo_data._write(tmp_path / "new.txt", "new")
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["new", "mine"]


@pytest.mark.parametrize(
    ("text", "paragraphs"),
    [
        ("A first line\nwrapped onto a second one.", ["A first line wrapped onto a second one."]),
        ("Title of it\n***********\n\nIt is about something else.", ["It is about something else."]),
        (
            "Use it like this:\n\n   call(now)\n\n   and then again here\n\nThat is all there is.",
            ["Use it like this:", "That is all there is."],
        ),
        (">>> print(1)\n1\n\nThe doctest above is dropped.", ["The doctest above is dropped."]),
        ('   augop ::= "+=" | "-=" and more\n\nThe grammar above is dropped.', ["The grammar above is dropped."]),
        (
            "* one item of the list\n  goes on here\n* another item of the list",
            ["one item of the list goes on here", "another item of the list"],
        ),
        ("Return ``None`` if *name* is :class:`~io.Bytes` or **so**.", ["Return None if name is io.Bytes or so."]),
        ("Two words", []),
    ],
)
def test_prose_of_marked_up_text(text, paragraphs):
    assert demo_data._prose_paragraphs(text) == paragraphs


def test_it_is_no_recipe():
    assert "demo_data" not in recipes.names() and "demo" in recipes.names()
