# SPDX-License-Identifier: Apache-2.0
"""The task made of Python's documentation: areas are balanced, no module is in two splits, and all is as before."""

import collections
import itertools

import pytest

from bert_jax.errors import InputError
from bert_jax.tasks import docs_task
from bert_jax.tasks.docs_task import AREAS, SPLITS, Described, make_docs_task, split_by_module


@pytest.fixture(scope="module")
def examples():
    return list(docs_task.read_described())


@pytest.fixture(scope="module")
def splits(examples):
    return split_by_module(examples, SPLITS)


def test_areas_are_different_modules():
    modules = [module for names in AREAS.values() for module in names.split()]
    assert len(modules) == len(set(modules)) and 6 <= len(AREAS) <= 8


@pytest.mark.slow
def test_a_text_is_there_once_and_long_enough(examples):
    assert len(examples) > 3000 and {example.area for example in examples} == set(AREAS)
    assert len({example.text for example in examples}) == len(examples)
    assert all(8 <= len(example.text.split()) <= 40 and "\t" not in example.text for example in examples)


@pytest.mark.slow
def test_no_module_is_in_two_splits(splits):
    for one, other in itertools.combinations(splits.values(), 2):
        assert not {example.module for example in one} & {example.module for example in other}
        assert not {example.text for example in one} & {example.text for example in other}


@pytest.mark.slow
def test_a_constant_answer_is_worth_little(splits):
    for name, chosen in splits.items():
        counts = collections.Counter(example.area for example in chosen)
        assert set(counts) == set(AREAS) and max(counts.values()) <= SPLITS[name]
        assert max(counts.values()) < 0.16 * len(chosen)
        assert max(collections.Counter(example.module for example in chosen).values()) <= 15


@pytest.mark.slow
def test_splits_follow_from_names_alone(examples, splits):
    assert split_by_module(reversed(examples), SPLITS) == splits


def test_files_are_tables_that_the_task_reads(tmp_path, monkeypatch):
    made = [
        Described(f"{area} text {number} of module {letter}", area, f"{area}.{letter}")
        for area in ("files", "mail")
        for letter in "abcdef"
        for number in range(3)
    ]
    monkeypatch.setattr(docs_task, "read_described", lambda: iter(made))
    sizes = {"dev": 3, "test": 3, "train": 9}
    make_docs_task(tmp_path / "task", sizes)
    lines = {path.stem: path.read_text().splitlines() for path in (tmp_path / "task").iterdir()}
    assert {name: len(each) for name, each in lines.items()} == {"train": 19, "dev": 7, "test": 7}
    assert all(each[0] == "text\tarea" and all(line.count("\t") == 1 for line in each) for each in lines.values())
    with pytest.raises(InputError, match="exists"):
        make_docs_task(tmp_path / "task", sizes)
    monkeypatch.setattr(docs_task, "read_described", lambda: iter([]))
    with pytest.raises(InputError, match="without the docstrings"):
        make_docs_task(tmp_path / "other")
    assert not (tmp_path / "other").exists()
