# SPDX-License-Identifier: Apache-2.0
"""Rerankers: losses against NumPy, candidates of a query in one batch on any mesh, and the model that comes out."""

import dataclasses
import json
import random
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from builders import computed, first_batches, message, tokens_at, tokens_of, write
from commands import run_python

import bert_jax
from bert_jax.finetuning import finetune
from bert_jax.model.heads.ranking import LOSSES, RANKING, Candidates
from bert_jax.settings.finetuning import (
    FinetuneConfig,
    FinetuneDataConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
    RankingConfig,
    TaskConfig,
)
from bert_jax.settings.pretraining import MeshConfig, OptimizerConfig, ReportConfig
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.embeddings.beir import read_run
from bert_jax.tasks.reranking import Ranked, RankingExample
from bert_jax.training.report import read_metrics

SCORES = np.array([[1.0, -0.5, 2.0, 9.0], [0.3, 0.1, -2.0, 0.4], [9.0, 9.0, 9.0, 9.0]], np.float32)
GRADES = np.array([[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
THERE = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], np.float32)  # three candidates, four, an empty place
QUERIES = [(SCORES[0, :3].astype(float), GRADES[0, :3]), (SCORES[1].astype(float), GRADES[1])]


def softmax(values):
    return np.exp(values) / np.exp(values).sum()


def log_sigmoid(values):
    return -np.log1p(np.exp(-values))


def expected(name):
    """Returns the loss of two queries, of s scores and g grades."""
    if name == "softmax":
        return np.mean([-(g / g.sum() * np.log(softmax(s))).sum() for s, g in QUERIES])
    if name == "listnet":
        return np.mean([-(softmax(g) * np.log(softmax(s))).sum() for s, g in QUERIES])
    if name == "ranknet":
        pairs = [(s[:, None] - s)[g[:, None] > g] for s, g in QUERIES]
        return -log_sigmoid(np.concatenate(pairs)).mean() / np.log(2)
    if name == "margin_mse":
        return np.concatenate([((s[0] - s[1:]) - (g[0] - g[1:])) ** 2 for s, g in QUERIES]).mean()
    s, g = map(np.concatenate, zip(*QUERIES))
    if name == "mse":
        return np.mean((s - g) ** 2)
    return np.mean(-g * log_sigmoid(s) - (1 - g) * log_sigmoid(-s))


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    """What is not there changes neither the loss nor any gradient."""
    value, gradient = computed(jax.value_and_grad(LOSSES[name]), SCORES, GRADES, THERE)
    assert value == pytest.approx(expected(name), rel=1e-5)
    assert np.isfinite(gradient).all() and not gradient[THERE == 0].any() and gradient[THERE == 1].any()
    assert computed(LOSSES[name], SCORES, GRADES, np.zeros_like(THERE)) == 0


def test_a_tie_with_a_worse_candidate_is_wrong():
    scores, grades = np.zeros((3, 3)), np.array([[1, 0, 0]] * 3)
    scores[0, 0], scores[2, 1] = 1, 1  # right, a tie, wrong
    labels = Candidates(np.arange(9).reshape(3, 3), grades, np.ones((3, 3)))
    batch = SimpleNamespace(labels=labels)
    found = computed(lambda scores: RANKING.losses(scores, batch, np.ones(3)), scores.reshape(9, 1, 1))
    assert found["accuracy"] == (1, 3)


CONFIG = TaskConfig(name="reranking", max_seq_length=24)


def jsonl(path, *rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


ALIKE = {"skipped: all candidates alike": 1}


@pytest.mark.parametrize(
    ("name", "content", "expected", "counts"),
    [
        (
            "train.jsonl",
            '{"query": "q", "documents": ["a", "b", "c"], "labels": [0, 2, 1], "id": "x"}\n',
            [("q", ("a", "b", "c"), (0.0, 2.0, 1.0), "x")],
            {},
        ),
        (
            "train.jsonl",
            '{"query": "q", "positive": "a", "negative": ["b", "c"]}\n{"query": "r", "positive": "d"}\n',
            [("q", ("a", "b", "c"), (1.0, 0.0, 0.0), 0)],
            ALIKE,
        ),
        (
            "train.jsonl",
            '{"query": "q", "positive": "a", "negative": ["b"], "scores": [3.5, -1.0]}\n',
            [("q", ("a", "b"), (3.5, -1.0), 0)],
            {},
        ),
        (
            "train.jsonl",
            '{"query": "q", "positive": ["a", "d"], "negative": ["b", "d"], "neg_2": "c", "scores": [4, 3, 1, 3, 2]}\n',
            [("q", ("a", "d", "b", "c"), (4.0, 3.0, 1.0, 2.0), 0)],
            {"negatives equal to the positive": 1},
        ),
        (
            "train.jsonl",
            '{"query": null, "pos": "a", "neg": "b"}\n{"query": " ", "pos": "a", "neg": "b"}\n'
            '{"query": "q", "pos": "a", "neg": "b"}\n',
            [("q", ("a", "b"), (1.0, 0.0), 2)],
            {"skipped: a text is empty": 2},
        ),
        (
            "rows.tsv",
            "query\tpassage\tlabel\nq\ta\t1\nr\tb\t0\nq\tc\t0\nr\td\t1\n",
            [("q", ("a", "c"), (1.0, 0.0), 0), ("r", ("b", "d"), (0.0, 1.0), 1)],
            {},
        ),
    ],
)
def test_tables(tmp_path, name, content, expected, counts):
    found = make_task(CONFIG).read(write(tmp_path / name, content), "train")
    assert [each[:4] for each in found] == expected and found.counts == counts


def test_scores_of_a_teacher_are_no_grades_of_a_dev_set(tmp_path):
    place = write(tmp_path / "dev.jsonl", '{"query": "q", "positive": "a", "negative": ["b"], "scores": [0.8, 0.7]}\n')
    (found,) = make_task(CONFIG).read(f"train={place},dev={place}", "dev")
    assert found.grades == (1.0, 0.0)
    (taught,) = make_task(CONFIG).read(f"train={place},dev={place}", "train")
    assert taught.grades == (0.8, 0.7)


def test_pairs_of_a_user():
    task = make_task(CONFIG)
    assert task.parse(["q", "a"], "input 1") == RankingExample("q", ("a",), where="input 1")
    assert task.parse({"query": "q", "documents": ["a", "b"]}, "1")[:3] == ("q", ("a", "b"), ())


def beir(folder, **settings):
    """Writes a BEIR directory of three passages and a run, and returns the task that reads it."""
    write(folder / "corpus.jsonl", "".join(map('{{"_id": "{0}", "text": "text {0}"}}\n'.format, "abc")))
    write(folder / "queries.jsonl", "".join(map('{{"_id": "{0}", "text": "q{0}"}}\n'.format, "123")))
    write(folder / "qrels/dev.tsv", "query-id\tcorpus-id\tscore\n1\tb\t2\n1\tc\t1\n2\ta\t1\n3\tc\t1\n")
    lines = "1 Q0 a 0 0.5 x\n1 Q0 b 1 3.5 x\n1 Q0 c 2 0.4 x\n1 Q0 gone 3 9 x\n2 Q0 b 0 1 x\n"
    ranking = RankingConfig(**{"run": write(folder / "first.trec", lines), "candidates": 2} | settings)
    return make_task(dataclasses.replace(CONFIG, ranking=ranking))


def test_a_dev_set_is_what_another_search_has_found(tmp_path):
    task = beir(tmp_path)
    found = task.read(str(tmp_path), "dev")
    assert [(each.query, each.candidates, each.grades, each.missed) for each in found] == [
        ("q1", ("text b", "text a"), (2.0, 0.0), (1.0,)),  # by score, as far as candidates go
        ("q2", ("text b",), (0.0,), (1.0,)),
        ("q3", (), (), (1.0,)),
    ]
    assert found.counts == {"relevant passages that the run misses": 3, "queries without a candidate": 1}
    scores = task.score(found, [Ranked((0.1, 0.2)), Ranked((1.0,)), Ranked(())])
    gain = (2 / np.log2(3)) / (2 + 1 / np.log2(3))  # what was missed is in the ideal order
    assert [scores[name] for name in ("ndcg@10", "mrr@10", "recall@100")] == pytest.approx([gain / 3, 0.5 / 3, 0.5 / 3])
    # the run of MS MARCO has ranks, which grow
    assert read_run(write(tmp_path / "ranks.tsv", "1\tc\t2\n1\ta\t1\n1\tc\t3\n")) == {"1": ["a", "c"]}


def test_a_run_is_for_queries_without_candidates(tmp_path):
    task = beir(tmp_path / "beir")
    row = '{"query": "q", "positive": "a", "negative": ["b"]}'
    train, dev = (write(tmp_path / name, row) for name in ("train.jsonl", "dev.jsonl"))
    assert "dev.jsonl has its own; leave it out" in message(task.read, dev, "dev")
    assert len(task.read(train, "train")) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "has no candidates for its queries; give what a search has found as task.ranking.run"),
        ("1 a\n", "run:1 has 2 columns, not TREC's 6"),
        ("1 Q0 a 1 best x\n", "run:1"),
        ("x Q0 a 1 0.5 x\n", "has no passage for a query of"),
    ],
)
def test_a_run_that_is_none(tmp_path, text, said):
    run = write(tmp_path / "run", text or "")
    task = beir(tmp_path / "beir", run=run if text else "")
    assert said in message(task.read, str(tmp_path / "beir"), "dev")


@pytest.mark.parametrize(
    ("row", "loss", "said"),
    [
        ('{"query": "q", "documents": ["a", "b"], "labels": [1]}', "", "train.jsonl:1 has 1 labels for 2 candidates"),
        ('{"query": "q", "documents": ["a", 3], "labels": [1, 0]}', "", "not a text or a list of texts"),
        (
            '{"query": "q", "documents": ["a", "b"], "labels": [1, 1]}',
            "",
            "no query has candidates of different",
        ),
        ('{"query": "q", "documents": ["a", "b"], "labels": 1}', "", ":1 has 1 labels for 2 candidates"),
        ('{"query": "q", "documents": ["a", "b"], "labels": [1, null]}', "", ":1 has 1 labels for 2 candidates"),
        (
            '{"query": "q", "passage": "a", "label": 1}\n{"query": "q", "passage": "b", "label": null}',
            "",
            "train.jsonl:2 has no 'label', and other candidates of its query have one",
        ),
        ('{"documents": ["a"], "labels": [1]}', "", "has no column query"),
        ('{"query": "q", "passage": "a"}', "", "has no column label"),
        ('{"query": "q", "positive": "a", "negative": "b", "scores": [2, 0]}', "bce", "grade 2 is not from 0"),
        ('{"query": "q", "positive": "a", "negative": "b", "scores": [2, -1]}', "", "grade -1 is not 0 or more"),
    ],
)
def test_what_cannot_be_ranked_is_named(tmp_path, row, loss, said):
    ranking = RankingConfig(loss=loss) if loss else RankingConfig()
    task = make_task(dataclasses.replace(CONFIG, ranking=ranking))
    place = write(tmp_path / "train.jsonl", row)
    assert said in message(lambda: task.settle(task.read(place, "train")))


WORDS = ("ban", "bes", "kut", "dar", "lin", "mot", "gen", "the")


def queries(count, seed):
    """Returns queries of a word, and candidates of which the one with "the" is right: a small model learns that."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        word, *others = rng.sample(WORDS[:-1], 4)
        wrong = [" ".join(rng.choices(others, k=2)) for _ in range(rng.randint(1, 3))]
        rows.append({"query": word, "positive": f"the {rng.choice(others)}", "negative": wrong})
    return rows


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("queries")
    jsonl(folder / "train.jsonl", *queries(70, 5))
    jsonl(folder / "dev.jsonl", *queries(24, 3))
    return folder


@pytest.mark.parametrize("pack", ["on", "off"])
def test_candidates_of_a_query_are_in_one_batch(source, bert, pack):
    """On two devices, in rows of several pairs or of one; labels say where each score is."""
    task = make_task(CONFIG)
    examples = task.read(str(source), "train")
    rows = task.make_rows(examples, bert.tokenizer, True).rows
    seen = []
    for batch in first_batches(rows, RANKING, FinetuneDataConfig(batch_size=8, seed=1), 9, pack=pack)[1]:
        assert ((batch.type_ids == 1).sum(axis=1) > 0)[batch.sequence_ids.any(axis=1)].all()  # of the second texts
        for places, grades, there in zip(*batch.labels):
            assert (places[there == 0] >= batch.cls_positions.size).all() and not grades[there == 0].any()
            if there.any():
                texts = [tokens_at(batch, place) for place in places[there == 1]]
                seen.append(sorted(zip(texts, grades[there == 1].tolist())))
    assert sorted(seen) == sorted(sorted(zip(tokens_of(row), each.grades)) for row, each in zip(rows, examples))


def run_of(source, model, num_epochs=3.0, accumulate=1, mesh=MeshConfig(), **ranking):  # noqa: B008
    return FinetuneConfig(
        task=dataclasses.replace(CONFIG, ranking=RankingConfig(**ranking)),
        model=FinetuneModelConfig(hidden_dropout_rate=0.0, attention_dropout_rate=0.0),
        data=FinetuneDataConfig(path=str(source), batch_size=16),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0, warmup_rate=0.1),
        train=FinetuneTrainConfig(num_epochs=num_epochs, accumulate=accumulate),
        mesh=mesh,
        report=ReportConfig(tensorboard=False, every_steps=1),
        init_checkpoint=str(model),
    )


def losses_in(workdir):
    return [each["loss"] for each in read_metrics(workdir / "metrics.jsonl") if each["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["softmax", "bce"])
def test_a_reranker_learns_and_predicts_pairs(source, pretrained, tmp_path, loss):
    """What is saved is a regression of pairs, whose numbers order the candidates as the run did."""
    result = finetune(run_of(source, pretrained, 20.0, loss=loss), tmp_path / "run", jax.devices()[:1])
    assert result.metrics["mrr@10"] > 0.9 > result.constant["mrr@10"] + 0.2
    bert = bert_jax.load_pretrained(tmp_path / "run")
    assert bert.task == "sequence_classification" and bert.task_settings["name"] == "regression"
    predictor = bert_jax.load_predictor(tmp_path / "run")
    hits = []
    for row in queries(24, 3):
        pairs = [(row["query"], text) for text in (row["positive"], *row["negative"])]
        said = [each.value for each in predictor(pairs)]
        hits.append(said[0] > max(said[1:]))
        assert loss == "softmax" or 0 < min(said) <= max(said) < 1  # with the sigmoid
    assert np.mean(hits) > 0.8
    # goes on from the trained classifier
    finetune(run_of(source, tmp_path / "run", 0.2), tmp_path / "again", jax.devices()[:1])
    assert losses_in(tmp_path / "again")[0] < losses_in(tmp_path / "run")[0] / 2


@pytest.mark.slow
def test_from_a_search_to_a_reranker_and_back(source, pretrained, tmp_path):
    """What `search` writes is the dev set of a reranker, which `search` then orders as the run has scored it."""
    folder, rows = tmp_path / "beir", queries(24, 3)
    texts = list(dict.fromkeys(text for row in rows for text in (row["positive"], *row["negative"])))
    right = {row["query"]: f"d{texts.index(row['positive'])}" for row in rows}
    jsonl(folder / "corpus.jsonl", *({"_id": f"d{number}", "text": text} for number, text in enumerate(texts)))
    jsonl(folder / "queries.jsonl", *({"_id": query, "text": query} for query in right))
    write(folder / "qrels/dev.tsv", "".join(f"{query}\t{passage}\t1\n" for query, passage in right.items()))

    def search(name, *options):
        places = [f"--corpus={folder}/corpus.jsonl", f"--queries={folder}/queries.jsonl", f"--output={tmp_path}/{name}"]
        command = ["-m", "bert_jax", "search", f"--checkpoint={pretrained}", "--k=20", *places, *options]
        done = run_python(command)
        assert done.returncode == 0, done.stderr
        return read_run(f"{tmp_path}/{name}")

    assert [len(found) for found in search("first.trec").values()] == [20] * len(right)
    config = run_of(f"{source}/train.jsonl,{folder}", pretrained, 4.0, run=f"{tmp_path}/first.trec")
    result = finetune(config, tmp_path / "run", jax.devices()[:1])
    ranked = search("second.trec", "--rerank=pairs", f"--rerank_model={tmp_path}/run", "--candidates=20")
    ranks = [1 + ranked[query].index(passage) if passage in ranked[query] else 99 for query, passage in right.items()]
    found = np.mean([1 / rank if rank <= 10 else 0 for rank in ranks])
    assert result.metrics["mrr@10"] == pytest.approx(found, abs=0.02) and 0.05 < found < 1


@pytest.mark.slow
def test_the_loss_is_the_same_on_any_mesh_and_in_microbatches(source, pretrained, tmp_path):
    finetune(run_of(source, pretrained), tmp_path / "one", jax.devices()[:1])
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    finetune(run_of(source, pretrained, accumulate=2, mesh=mesh), tmp_path / "eight")
    np.testing.assert_allclose(losses_in(tmp_path / "eight"), losses_in(tmp_path / "one"), rtol=2e-3)
