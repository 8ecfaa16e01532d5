# SPDX-License-Identifier: Apache-2.0
"""The SQuAD tasks as a whole: from a file to predictions, scores and the official files."""

import dataclasses
import json

import numpy as np
import pytest

from bert_jax import InputError
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


def outputs_for(task, examples, peaks):
    """Returns rows, and logits that are high at a word of the context, or at [CLS]."""
    rows = task.make_rows(examples, TOKENIZER, False).rows
    outputs = []
    for row, (word, height) in zip(rows, peaks):
        tokens = TOKENIZER.tokens(row.token_ids)
        outputs.append(np.zeros((len(tokens), 2), np.float32))
        outputs[-1][tokens.index(word)] = height
    return rows, outputs


def test_squad1(tmp_path):
    task = SquadTask(TaskConfig(name="squad1", max_seq_length=100))
    assert (task.head, task.labels, task.num_outputs, task.metric) == (SPANS, (), 2, "f1")
    rows, outputs = outputs_for(task, EXAMPLES[:2], [("rome", 5), ("capital", 5)])
    predictions = task.decode(EXAMPLES[:2], rows, outputs)
    assert task.score(EXAMPLES[:2], predictions) == {"exact_match": 50, "f1": 50}
    assert task.tune(EXAMPLES[:2], predictions) == task.config
    shown = task.show(predictions[0])
    assert (shown["answer"], shown["start"], shown["end"]) == ("Rome", 0, 4)
    assert shown["probability"] == shown["n_best"][0]["probability"] > 0.9
    json.dumps(shown)
    task.write(tmp_path, "dev", EXAMPLES[:2], predictions)
    task.write(tmp_path, "test", EXAMPLES[:2], predictions)
    assert json.loads((tmp_path / "predictions.json").read_text()) == {"1": "Rome", "2": "capital"}
    best = json.loads((tmp_path / "nbest_predictions.json").read_text())
    assert best["1"][0] == {
        "text": "Rome",
        "probability": predictions[0].probability,
        "start_logit": 5,
        "end_logit": 5,
    }
    names = ["nbest_predictions.json", "predictions.json", "test_nbest_predictions.json", "test_predictions.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_squad2_finds_its_threshold(tmp_path):
    task = SquadTask(TaskConfig(name="squad2", max_seq_length=100))
    assert task.metric == "best_f1"
    # Nothing says "no answer" loud enough at first: odds are -10, -4 and -2 by the heights of the peaks.
    rows, outputs = outputs_for(task, EXAMPLES, [("rome", 5), ("italy", 2), ("is", 1)])
    predictions = task.decode(EXAMPLES, rows, outputs)
    assert [each.null_odds for each in predictions] == [-10, -4, -2]
    scores = task.score(EXAMPLES, predictions)
    assert (scores["exact_match"], scores["HasAns_f1"], scores["NoAns_f1"]) == (pytest.approx(200 / 3), 100, 0)
    assert (scores["best_f1"], scores["best_f1_thresh"]) == (100, -4)
    assert (scores["best_exact"], scores["best_exact_thresh"]) == (100, -4)
    tuned = SquadTask(task.tune(EXAMPLES, predictions))
    assert tuned.config == dataclasses.replace(task.config, null_threshold=-4)
    predictions = tuned.decode(EXAMPLES, rows, outputs)
    assert tuned.score(EXAMPLES, predictions)["exact_match"] == 100
    shown = tuned.show(predictions[2])
    assert (shown["answer"], shown["start"], shown["end"], shown["null_odds"]) == ("", None, None, -2)
    tuned.write(tmp_path, "dev", EXAMPLES, predictions)
    assert json.loads((tmp_path / "predictions.json").read_text()) == {"1": "Rome", "2": "Italy", "3": ""}
    assert json.loads((tmp_path / "null_odds.json").read_text()) == {"1": -10, "2": -4, "3": -2}


def test_questions_without_rows_are_told():
    task = SquadTask(TaskConfig(name="squad1"))
    empty = [SquadExample("1", "Where?", " ", (Answer("x", 0),))]
    predictions = task.decode(empty, *[[], []])
    assert task.score(empty, predictions) == {"exact_match": 0, "f1": 0, "num_without_span": 1}


def test_all_is_read_as_the_version_says(tmp_path):
    task = SquadTask(TaskConfig(name="squad2"))
    qas = [{"id": "1", "question": "Where?", "answers": [], "is_impossible": True}]
    data = {"data": [{"paragraphs": [{"context": CONTEXT, "qas": qas}]}]}
    (tmp_path / "dev-v2.0.json").write_text(json.dumps(data))
    (tmp_path / "dev-v1.1.json").write_text("{}")
    assert task.read(str(tmp_path), "dev") == [SquadExample("1", "Where?", CONTEXT, (), True)]


def test_settings_that_cannot_work():
    with pytest.raises(InputError, match=r"task.max_seq_length 67 leaves no room .* 64 tokens, and 3 are special"):
        SquadTask(TaskConfig(name="squad1", max_seq_length=67))
    with pytest.raises(InputError, match=r"task.metric 'accuracy' is not one of f1, exact_match, those of squad1"):
        SquadTask(TaskConfig(name="squad1", metric="accuracy"))
    assert SquadTask(TaskConfig(name="squad2", metric="f1")).metric == "f1"
