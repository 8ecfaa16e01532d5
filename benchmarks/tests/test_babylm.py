# SPDX-License-Identifier: Apache-2.0
"""The tasks of BabyLM: what is a question, what counts as right, and the files that the challenge collates."""

import json
import math

import numpy as np
import pytest
from builders import make_pretrained, message

import bert_jax
from benchmarks import babylm
from bert_jax.inference.sentence_scores import token_scores

FILES = {
    "blimp_filtered/island.jsonl": {
        "sentence_good": "ban bin .",
        "sentence_bad": "ban ban .",
        "field": "syntax",
        "UID": "x",
    },
    "supplement_filtered/turn.jsonl": {"sentence_good": "ban", "sentence_bad": "bin"},
    "ewok_filtered/a.jsonl": {
        "Context1": "din .",
        "Context2": "ban .",
        "Target1": "bin .",
        "Target2": "dan .",
        "Domain": "d",
    },
    "entity_tracking/regular.jsonl": {
        "numops": 2,
        "input_prefix": "ban bin din",
        "options": [" bin .", " dan .", " fan ."],
    },
    "comps/comps_wugs_dist-before.jsonl": {
        "prefix_acceptable": "ban",
        "prefix_unacceptable": "din",
        "property_phrase": "fan .",
    },
    "comps/comps_wugs_dist-in-between.jsonl": {
        "prefix_acceptable": "din",
        "prefix_unacceptable": "ban",
        "property_phrase": "fan .",
    },
    "wug_past_tense/wug_past_tense.jsonl": {"sentences": "ban bin\tban dan", "ratio": "0.25"},
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return bert_jax.load_pretrained(make_pretrained(tmp_path_factory.mktemp("model")))


def test_a_completion_is_the_end_of_its_sentence(bert):
    """Also where a token is partly in it: it belongs to it, as the blank before it does not."""
    sentence = "ban bin din"
    (scores,) = token_scores(bert, [sentence])
    _, spans = bert.tokenizer.encode_with_offsets(sentence)
    for completion in ("din", " din", "n din", sentence):
        inside = spans[:, 1] > len(sentence) - len(completion)
        (found,) = babylm.completion_scores(bert, [sentence], [completion])
        assert found == pytest.approx(float(scores[inside].sum()), abs=1e-4)


def test_questions_predictions_and_figures(bert, tmp_path):
    for name, record in FILES.items():
        path = tmp_path / "full_eval" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record) + "\n")
    figures = babylm.score_sets(bert, tmp_path / "full_eval", babylm.FULL, tmp_path / "out")
    assert figures.keys() == babylm.FULL.keys() - {"wug_adj_nominalization"}

    def predictions(task, name):
        content = json.loads((tmp_path / "out" / task / name / "predictions.json").read_text())
        return {subtask: of["predictions"] for subtask, of in content.items()}

    (blimp,) = predictions("blimp", "blimp_filtered")["x"]
    good, bad = bert_jax.score_sentences(bert, ["ban bin .", "ban ban ."])
    assert blimp == {"id": "x_0", "pred": "ban bin ." if good >= bad else "ban ban ."}
    assert figures["blimp_filtered"] == 100 * (good >= bad)
    assert list(predictions("blimp", "supplement_filtered")) == ["turn"]
    (ewok,) = predictions("ewok", "ewok_filtered")["d"]
    assert ewok["pred"] in (" bin .", " dan .")
    assert list(predictions("entity_tracking", "entity_tracking")) == ["regular_2_ops"]
    comps = predictions("comps", "comps")
    assert next(each[0]["pred"] for each in comps.values()) in ("ban fan .", "din fan .")
    assert comps.keys() == {"wugs_dist_before", "wugs_dist_in_between"}
    assert figures["comps"] == 50  # the same question, with the other answer
    (wug,) = predictions("wug_past", "wug_past_tense")["wug_past"]
    first, second = bert_jax.score_sentences(bert, ["ban bin", "ban dan"])
    assert wug["prob"] == pytest.approx(math.exp(first) / (math.exp(first) + math.exp(second)))


def test_ties_are_right_and_groups_count_equally():
    def items(*subtasks):
        return [babylm.Item(name, ["a", "b"], ["a", "b"], ["a", "b"]) for name in subtasks]

    right, wrong = np.array([0.0, -1.0]), np.array([-1.0, 0.0])
    assert babylm.summary("blimp", items("x"), [np.zeros(2)]) == 100
    assert babylm.summary("blimp", items("x", "x", "x", "y"), [right, wrong, wrong, right]) == pytest.approx(200 / 3)
    tracked = items("regular_0_ops", "regular_1_ops", "ambiref_0_ops")
    assert babylm.summary("entity_tracking", tracked, [right, right, wrong]) == 50


def test_surprisals_are_of_the_word_in_its_context(bert, tmp_path):
    path = tmp_path / "cdi.json"
    path.write_text(json.dumps({"din": [{"context": "ban bin "}, {"context": "ban"}], "a": [{"context": "x"}]}))
    first, second = babylm.surprisals(bert, "chck_20M", babylm.read_contexts(path))
    (scores,) = token_scores(bert, ["ban bin din"])
    assert first["surprisal"] == pytest.approx(-float(scores[-1]), abs=1e-5)
    assert (first["word_count"], second["context_id"], second["context"]) == (20_000_000, 1, "ban")
    assert "does not say its words" in message(babylm.words_of, "main")
