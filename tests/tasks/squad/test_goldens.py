# SPDX-License-Identifier: Apache-2.0
"""Windows, labels and answers of made-up questions are those of Google's run_squad.py."""

import json

import numpy as np
import pytest

from bert_jax import load_tokenizer
from bert_jax.settings.finetuning import TaskConfig
from bert_jax.tasks.squad.decode import decode_spans
from bert_jax.tasks.squad.read import read_squad_file
from bert_jax.tasks.squad.score import normalize_answer
from bert_jax.tasks.squad.windows import make_squad_rows
from tests.reference import make_squad_golden as golden_maker


@pytest.fixture(scope="module", params=["squad1", "squad2"])
def compared(request, repository, tmp_path_factory):
    """Returns the golden, the questions, their rows for training and for evaluation, and the config."""
    golden = json.loads((repository / "tests/golden/squad.json").read_text("utf-8"))[request.param]
    data = golden_maker.made_up_data(request.param == "squad2")
    path = tmp_path_factory.mktemp("squad") / "data.json"
    path.write_text(json.dumps(data))
    examples = read_squad_file(str(path))
    config = TaskConfig(
        name=request.param,
        num_best=golden_maker.NUM_BEST,
        max_answer_length=golden_maker.MAX_ANSWER_LENGTH,
        **golden_maker.SETTINGS,
    )
    tokenizer = load_tokenizer(repository / "tests/fixtures/tokenizer")
    training, evaluated = (make_squad_rows(examples, tokenizer, training, config) for training in (True, False))
    return golden, examples, training.rows, evaluated.rows, config


def test_windows(compared):
    golden, _, _, rows, _ = compared
    windows = [
        [
            row.example,
            golden_maker.fingerprint(row.token_ids.tolist()),
            "".join(str(int(value)) for value in row.detail.is_max_context),
        ]
        for row in rows
    ]
    assert windows == [window[:3] for window in golden["windows"]]


def test_labels(compared):
    """Ours is within Google's, which takes whole words where the answer does not end between tokens."""
    golden, _, rows, _, _ = compared
    labels = np.array([row.label for row in rows])
    theirs = np.array([window[3:] for window in golden["windows"]])
    assert np.all(labels[:, 0] >= theirs[:, 0]) and np.all(labels[:, 1] <= theirs[:, 1])
    assert np.mean(np.all(labels == theirs, axis=1)) >= 0.99


@pytest.fixture(scope="module")
def predictions(compared):
    golden, examples, _, rows, config = compared
    logits = [
        golden_maker.make_logits(number, len(row.token_ids), window[3:])
        for number, (row, window) in enumerate(zip(rows, golden["windows"]))
    ]
    return decode_spans(examples, rows, logits, config)


def test_answers(compared, predictions):
    golden = compared[0]
    aligned = 0
    for each in predictions:
        theirs = golden["predictions"][each.id]
        if theirs in golden["not_aligned"]:
            assert normalize_answer(each.text) in normalize_answer(theirs)
        else:
            aligned += 1
            assert each.text == theirs
    assert aligned > 0.7 * len(predictions)


def test_n_best_and_probabilities(compared, predictions):
    golden = compared[0]
    same = 0
    for each in predictions:
        theirs = golden["n_best"][each.id]
        if any(text in golden["not_aligned"] for text, _, _ in theirs):
            continue
        ours = [(span.text, span.score) for span in each.n_best[: len(theirs)]]
        assert ours == [(text, score) for text, score, _ in theirs]
        same += 1
        # Where the reference gives up on a worse span, two may become one, which changes the sum but not the ratios.
        for span, (_, _, probability) in zip(each.n_best, theirs):
            ratio = span.probability / each.n_best[0].probability
            assert ratio == pytest.approx(probability / theirs[0][2], rel=1e-9)
    assert same > 5


def test_null_odds(compared, predictions):
    golden = compared[0]
    odds = {each.id: each.null_odds for each in predictions if each.null_odds is not None}
    assert odds == pytest.approx(golden["odds"], abs=1e-6)
