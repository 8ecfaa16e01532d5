# SPDX-License-Identifier: Apache-2.0
"""The SQuAD tasks as a whole: from a file to predictions, scores and the official files."""

import dataclasses
import json

import numpy as np
import pytest
from builders import message, write

from bert_jax.model.heads.spans import SPANS
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.squad.read import Answer, SquadExample
from bert_jax.tasks.squad.task import SquadTask
from bert_jax.text.tokenizer import wordpiece_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CONTEXT = "Rome is the capital of Italy ."
TOKENIZER = wordpiece_tokenizer([*SPECIAL, "where", "?", *CONTEXT.lower().split()], lowercase=True)
EXAMPLES = [
    SquadExample("1", "Where?", CONTEXT, (Answer("Rome", 0), Answer("Rome is", 0))),
    SquadExample("2", "Where?", CONTEXT, (Answer("Italy", 23),)),
    SquadExample("3", "Where?", CONTEXT, (), True),
]


def decoded(task, examples, peaks):
    """Returns predictions of logits that are high at a word of each context."""
    rows = task.make_rows(examples, TOKENIZER, False).rows
    outputs = [np.zeros((len(row.token_ids), 2)) for row in rows]
    for row, output, (word, height) in zip(rows, outputs, peaks):
        output[TOKENIZER.tokens(row.token_ids).index(word)] = height
    return task.decode(examples, rows, outputs)


def written(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def test_squad1(tmp_path):
    task = SquadTask(TaskConfig(name="squad1", max_seq_length=100))
    assert (task.head, task.labels, task.num_outputs, task.metric) == (SPANS, (), 2, "f1")
    predictions = decoded(task, EXAMPLES[:2], [("rome", 5), ("capital", 5)])
    assert task.score(EXAMPLES[:2], predictions) == {"exact_match": 50, "f1": 50}
    assert task.tune(EXAMPLES[:2], predictions) == task.config
    shown = json.loads(json.dumps(task.show(predictions[0])))
    assert (shown["answer"], shown["start"], shown["end"]) == ("Rome", 0, 4)
    assert shown["probability"] == shown["n_best"][0]["probability"] > 0.9
    for split in ("dev", "test"):
        task.write(tmp_path, split, EXAMPLES[:2], predictions)
    assert written(tmp_path, "predictions") == written(tmp_path, "test_predictions") == {"1": "Rome", "2": "capital"}
    best = written(tmp_path, "nbest_predictions")["1"][0]
    assert best == {"text": "Rome", "probability": shown["probability"], "start_logit": 5, "end_logit": 5}
    assert len(list(tmp_path.iterdir())) == 4


def test_squad2_finds_its_threshold(tmp_path):
    task = SquadTask(TaskConfig(name="squad2", max_seq_length=100))
    assert task.metric == "best_f1"
    # Nothing says "no answer" loud enough at first: odds are -10, -4 and -2 by the heights of the peaks.
    peaks = [("rome", 5), ("italy", 2), ("is", 1)]
    predictions = decoded(task, EXAMPLES, peaks)
    scores = task.score(EXAMPLES, predictions)
    assert (scores["exact_match"], scores["HasAns_f1"], scores["NoAns_f1"]) == (pytest.approx(200 / 3), 100, 0)
    assert (scores["best_f1"], scores["best_f1_thresh"]) == (100, -4)
    assert (scores["best_exact"], scores["best_exact_thresh"]) == (100, -4)
    tuned = SquadTask(task.tune(EXAMPLES, predictions))
    assert tuned.config == dataclasses.replace(task.config, null_threshold=-4)
    predictions = decoded(tuned, EXAMPLES, peaks)
    assert tuned.score(EXAMPLES, predictions)["exact_match"] == 100
    shown = tuned.show(predictions[2])
    assert (shown["answer"], shown["start"], shown["end"], shown["null_odds"]) == ("", None, None, -2)
    tuned.write(tmp_path, "dev", EXAMPLES, predictions)
    assert written(tmp_path, "predictions") == {"1": "Rome", "2": "Italy", "3": ""}
    assert written(tmp_path, "null_odds") == {"1": -10, "2": -4, "3": -2}


def test_questions_without_rows_are_told():
    task, empty = SquadTask(TaskConfig(name="squad1")), [SquadExample("1", "Where?", " ", (Answer("x", 0),))]
    scores = task.score(empty, task.decode(empty, [], []))
    assert scores == {"exact_match": 0, "f1": 0, "num_without_span": 1}


def test_all_is_read_as_the_version_says(tmp_path):
    qas = '[{"id": "1", "question": "Where?", "answers": [], "is_impossible": true}]'
    write(tmp_path / "dev-v2.0.json", f'{{"data": [{{"paragraphs": [{{"context": "{CONTEXT}", "qas": {qas}}}]}}]}}')
    write(tmp_path / "dev-v1.1.json", "{}")
    task = SquadTask(TaskConfig(name="squad2"))
    assert task.read(str(tmp_path), "dev") == [SquadExample("1", "Where?", CONTEXT, (), True)]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"max_seq_length": 67}, "task.max_seq_length 67 leaves no room for the context"),
        ({"metric": "accuracy"}, "task.metric 'accuracy' is not one of f1, exact_match, those of squad1"),
    ],
)
def test_settings_that_cannot_work(settings, problem):
    assert problem in message(SquadTask, TaskConfig(name="squad1", **settings))
