# SPDX-License-Identifier: Apache-2.0
"""Every task reads the files of real data sets as their authors publish them, all of their rows."""

import pytest

from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.catalog import make_task

SICK = "sick/SICK_train.txt,sick/SICK_trial.txt"
CLASSES, NUMBERS = ({"label_column": name} for name in ("entailment_judgment", "relatedness_score"))


@pytest.mark.parametrize(
    ("name", "settings", "source", "split", "count"),
    [
        ("mrpc", {}, "glue", "train", 3668),
        ("rte", {}, "glue", "train", 2490),
        ("wnli", {}, "glue", "train", 635),
        ("stsb", {}, "glue", "train", 5749),
        ("mnli", {}, "advglue_mnli", "dev_matched", 121),
        ("mnli", {}, "advglue_mnli", "dev_mismatched", 162),
        ("ner", {}, "wnut17", "train", 3394),
        ("ner", {}, "wnut17", "dev", 1009),
        pytest.param("ner", {}, "wikiann_de", "train", 20000, marks=pytest.mark.slow),
        ("choice", {}, "swag_sample/swag.csv", "train", 11),
        ("choice", {}, "codah/codah.tsv", "train", 2221),
        ("choice", {}, "codah/codah.swag.csv", "train", 2221),
        ("classification", CLASSES, SICK, "train", 4500),
        ("classification", CLASSES, SICK, "dev", 500),
        ("regression", NUMBERS, SICK, "train", 4500),
    ],
)
def test_real_files_are_read(shared_data, monkeypatch, name, settings, source, split, count):
    monkeypatch.chdir(shared_data)
    task = make_task(TaskConfig(name=name, **settings))
    examples = task.read(source, split)
    assert len(examples) == count
    if name == "classification" and split == "train":
        assert task.find_labels(examples) == ("CONTRADICTION", "ENTAILMENT", "NEUTRAL")
    if name == "ner" and "wnut" in source:
        words = {"train": 62730, "dev": 15733}
        assert sum(len(each.words) for each in examples) == words[split] and len(task.find_labels(examples)) == 13
