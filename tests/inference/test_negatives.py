# SPDX-License-Identifier: Apache-2.0
"""Hard negatives are those that a sort of all scores finds, whatever the limits; as a command too."""

import dataclasses
import json

import numpy as np
import pytest
from builders import message, write
from commands import run_python

from bert_jax import InputError, Limits, load_pretrained, mine_negatives, save_pretrained
from bert_jax.inference import negatives as module
from bert_jax.inference.negatives import judge_of, load_judge
from bert_jax.settings.finetuning import EmbeddingConfig, TaskConfig
from bert_jax.settings.rules import to_dict
from bert_jax.tasks.embeddings.read import read_texts
from bert_jax.tasks.texts import Scored

QUERIES = [f"query {number}" for number in range(7)]
PASSAGES = [f"passage {number}" for number in range(40)]
# a query with three positives, one of them twice; one whose text is a passage too
PAIRS = [(query, PASSAGES[3 * number]) for number, query in enumerate(QUERIES)]
PAIRS += [(QUERIES[2], PASSAGES[1]), (QUERIES[2], PASSAGES[6]), (QUERIES[2], PASSAGES[2])]
CORPUS = [*PASSAGES[5:], QUERIES[4]]


@pytest.fixture
def vectors(monkeypatch):
    """Puts fixed vectors, not of length 1, in place of a model's, and blocks of seven in place of thousands."""
    rng = np.random.default_rng(0)
    known = {text: rng.normal(size=6).astype(np.float32) for text in QUERIES + PASSAGES}

    def embed(bert, texts, kind):
        # a query is not the same as a passage
        return np.stack([known[text] + (kind == "query") for text in texts])

    monkeypatch.setattr(module, "sentence_embeddings", embed)
    monkeypatch.setattr(module, "BLOCK", 7)

    def cosine(query, passage):
        one, other = known[query] + 1, known[passage]
        return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))

    return cosine


def score_by_number(query, passage):
    """Returns another score of a pair than its cosine."""
    if "passage" not in passage:
        return -9.0
    return 1.2 - abs(3 * int(query.split()[1]) - int(passage.split()[1]) - 3.5) ** 0.5 / 4


def expected(score, count, limits, cosine, depth):
    """Returns query, positive, negatives and scores by sorting all passages of each query."""
    passages = list(dict.fromkeys(CORPUS + [positive for _, positive in PAIRS]))
    rows = []
    for query in dict.fromkeys(query for query, _ in PAIRS):
        own = list(dict.fromkeys(positive for each, positive in PAIRS if each == query))
        near = sorted((text for text in passages if text != query), key=lambda text: -cosine(query, text))
        near = near[: depth + 4]  # the query with most pairs has four
        weakest, kept = min(score(query, text) for text in own), []
        for text in sorted(near, key=lambda text: -score(query, text)):
            value = score(query, text)
            wrong = text in own
            wrong |= limits.absolute_margin is not None and value + limits.absolute_margin > weakest
            wrong |= limits.relative_margin is not None and value > weakest - abs(weakest) * limits.relative_margin
            wrong |= limits.max_score is not None and value > limits.max_score
            wrong |= limits.min_score is not None and value < limits.min_score
            kept += [] if wrong else [text]
        kept = kept[limits.range_min : depth][:count]
        rows += [(query, text, kept, [score(query, each) for each in (text, *kept)]) for text in own]
    return rows


@pytest.mark.parametrize(
    ("count", "limits", "depth", "judged"),
    [
        (3, Limits(), 7, False),  # four pairs of a query and three negatives
        (3, Limits(), 34, True),
        (2, Limits(range_min=2), 8, False),
        (3, Limits(range_min=1, range_max=5, max_score=0.4), 5, True),
        (2, Limits(absolute_margin=0.1), 24, False),
        (4, Limits(relative_margin=0.05), 44, False),
        (3, Limits(min_score=0.2), 7, False),
        (3, Limits(relative_margin=-0.5, min_score=-0.3, max_score=0.6), 34, True),
    ],
)
def test_negatives_are_those_of_a_sort(vectors, count, limits, depth, judged):
    judge = (lambda pairs: [score_by_number(*pair) for pair in pairs]) if judged else None
    found = mine_negatives(None, PAIRS, CORPUS, count, limits, judge=judge)
    wanted = expected(score_by_number if judged else vectors, count, limits, vectors, depth)
    assert [each[:3] for each in found] == [each[:3] for each in wanted]
    for one, other in zip(found, wanted):
        np.testing.assert_allclose(one.scores, other[3], atol=1e-6)
    assert any(one.negatives for one in found) and len(found) == 9
    (alone,) = mine_negatives(None, PAIRS[:1], num_negatives=1, judge=judge)
    assert alone.negatives == [] and len(alone.scores) == 1


def test_random_ones_are_of_those_within_the_limits(vectors):
    limits = Limits(range_min=2, range_max=12)
    within = {each.query: each.negatives for each in mine_negatives(None, PAIRS, CORPUS, 10, limits)}
    found = [mine_negatives(None, PAIRS, CORPUS, 4, limits, "random", seed) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    for each in found[0]:
        places = [within[each.query].index(text) for text in each.negatives]
        assert places == sorted(places) and len(places) == 4
    assert {text for each in found[0] + found[2] for text in each.negatives} - {
        text for texts in within.values() for text in texts[:4]
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_negatives": 0}, "num_negatives 0 is below 1"),
        ({"limits": Limits(range_min=-1)}, "one is -1"),
        ({"limits": Limits(range_min=4, range_max=6)}, "no room for num_negatives 3"),
        ({"limits": Limits(max_score=float("nan"))}, "max_score nan is no number; leave it out"),
        ({"sampling": "best"}, "sampling 'best' is unknown; use top or random"),
        ({"pairs": []}, "there is no pair"),
        ({"pairs": [("a", "b"), "ab"]}, "pair 2 is 'ab', not a query and a passage; give two texts"),
        ({"pairs": [("a", "b", "c")]}, "pair 1 is ('a', 'b', 'c'), not a query"),
    ],
)
def test_what_leaves_no_negatives_is_named(options, said):
    assert said in message(mine_negatives, None, **({"pairs": PAIRS} | options))


def test_blanks_around_a_text_make_no_other_text(vectors):
    """A corpus is read without them, and a table as it is."""
    corpus = [PASSAGES[0], PASSAGES[1], "query 0"]
    (mined,) = mine_negatives(None, [("query 0", f" {PASSAGES[0]} ")], corpus, 3)
    assert mined.negatives == [PASSAGES[1]]


@pytest.mark.parametrize(
    ("task", "settings", "does"),
    [
        ("sentence_embedding", TaskConfig(name="embeddings"), "embeddings"),
        ("sequence_classification", TaskConfig(name="regression", num_texts=1), "regression"),
        ("encoder", None, "encoder"),
        ("pretraining", None, "pretraining"),
    ],
)
def test_a_judge_that_gives_no_numbers_is_named(bert, task, settings, does):
    of_task = dataclasses.replace(bert, task=task, task_settings=to_dict(settings) if settings else {})
    said = f"DIR does not give a pair of texts a number (its task is {does}); give a reranker"
    assert said in message(load_judge, of_task, "DIR")


def test_a_judge_gives_numbers():
    said = [Scored(0.5), Scored(2.0)]
    assert judge_of(lambda pairs: said)([("a", "b"), ("a", "c")]) == [0.5, 2.0]
    with pytest.raises(InputError, match="does not give a pair a number"):
        judge_of(lambda pairs: ["entailment" for _ in pairs])([("a", "b")])


@pytest.mark.slow
def test_the_command_writes_what_training_reads(pretrained, tmp_path):
    """Of a file of any name, such as a dev set's."""
    texts = ["ban bes kut", "dar lin mot", "bes dar lin", "kut mot ban"]
    pairs, corpus = [(text, f"{text} the") for text in texts], ["the gen", "ban the bes"]
    lines = [json.dumps({"query": query, "positive": positive}) for query, positive in pairs]
    places = [f"--pairs={write(tmp_path / 'dev.jsonl', chr(10).join(lines))}", f"--output={tmp_path}/mined.jsonl"]
    places.append(f"--corpus={write(tmp_path / 'corpus.txt', chr(10).join(corpus))}")
    command = ["-m", "bert_jax", "mine_negatives", f"--checkpoint={pretrained}"]
    done = run_python([*command, *places, "--num_negatives=2", "--max_score=0.999"])
    assert done.returncode == 0 and "4 pairs have 8 negatives, 2.00 each" in done.stderr, done.stderr
    wanted = mine_negatives(load_pretrained(pretrained), pairs, corpus, 2, Limits(max_score=0.999))
    read = read_texts(TaskConfig(name="embeddings"), str(tmp_path / "mined.jsonl"), "train")
    assert [example.texts for example in read] == [(e.query, e.positive, *e.negatives) for e in wanted]
    assert "scores" not in (tmp_path / "mined.jsonl").read_text()
    done = run_python([*command, *places[:1], f"--output={tmp_path}/scored.jsonl", "--scores"])
    assert done.returncode == 0, done.stderr
    scored = [json.loads(line) for line in (tmp_path / "scored.jsonl").read_text().splitlines()]
    assert [len(row["scores"]) for row in scored] == [1 + len(row["negative"]) for row in scored] == [4] * 4
    tokens = to_dict(TaskConfig(name="embeddings", embedding=EmbeddingConfig(kind="multi_vector")))
    of_tokens = dataclasses.replace(load_pretrained(pretrained), task="token_embeddings", task_settings=tokens)
    save_pretrained(of_tokens, tmp_path / "tokens")
    done = run_python([*command, places[0], "--output=-", f"--checkpoint={tmp_path}/tokens"])
    assert done.returncode == 1 and "tokens has vectors of tokens or of words; give a model with one" in done.stderr
    graded = write(tmp_path / "graded.jsonl", '{"sentence1": "ban", "sentence2": "bes", "score": 1}\n')
    done = run_python([*command, f"--pairs={graded}", "--output=-"])
    assert done.returncode == 1 and "has graded pairs" in done.stderr and done.stderr.count("\n") == 1
