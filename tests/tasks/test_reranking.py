# SPDX-License-Identifier: Apache-2.0
"""Rerankers: losses against NumPy, candidates of a query in one batch on any mesh, and the model that comes out."""

import dataclasses
import itertools
import json
import random

import jax
import numpy as np
import pytest
from builders import computed, message
from commands import run_python

import bert_jax
from bert_jax.batches.examples import choose_batching, train_batches
from bert_jax.devices.sharding import make_mesh
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
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import MeshConfig, OptimizerConfig, ReportConfig
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.embeddings.beir import read_run
from bert_jax.tasks.reranking import Ranked, RankingExample
from bert_jax.training.report import read_metrics

SCORES = np.array([[1.0, -0.5, 2.0, 9.0], [0.3, 0.1, -2.0, 0.4], [9.0, 9.0, 9.0, 9.0]], np.float32)
GRADES = np.array([[1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
THERE = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], np.float32)  # three candidates, four, an empty place
QUERIES = [(SCORES[0, :3].astype(float), GRADES[0, :3]), (SCORES[1].astype(float), GRADES[1])]


def log_softmax(values):
    return values - np.log(np.exp(values).sum())


def log_sigmoid(value):
    return -np.log1p(np.exp(-value))


def expected(name):
    """Returns the loss of two queries, candidate by candidate."""
    if name in ("softmax", "listnet"):
        shares = (g / g.sum() if name == "softmax" else np.exp(log_softmax(g.astype(float))) for _, g in QUERIES)
        return np.mean([-(share * log_softmax(s)).sum() for (s, _), share in zip(QUERIES, shares)])
    if name == "ranknet":
        pairs = ((s[i] - s[j]) for s, g in QUERIES for i in range(len(s)) for j in range(len(s)) if g[i] > g[j])
        return np.mean([-log_sigmoid(above) for above in pairs]) / np.log(2)
    if name == "margin_mse":
        return np.mean([((s[0] - s[j]) - (g[0] - g[j])) ** 2 for s, g in QUERIES for j in range(1, len(s))])
    values = [(float(a), float(b)) for s, g in QUERIES for a, b in zip(s, g)]
    if name == "mse":
        return np.mean([(a - b) ** 2 for a, b in values])
    return np.mean([-b * log_sigmoid(a) - (1 - b) * log_sigmoid(-a) for a, b in values])


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name):
    """What is not there changes neither the loss nor any gradient."""
    loss = jax.jit(jax.value_and_grad(LOSSES[name]))
    value, gradient = loss(SCORES, GRADES, THERE)
    assert float(value) == pytest.approx(expected(name), rel=1e-5)
    assert np.isfinite(gradient).all() and not (np.asarray(gradient) * (1 - THERE)).any()
    assert (np.asarray(gradient) * THERE).any()
    assert float(loss(SCORES, GRADES, np.zeros_like(THERE))[0]) == 0


def test_a_tie_with_a_worse_candidate_is_wrong():
    scores, grades = np.zeros((3, 3), np.float32), np.array([[1, 0, 0]] * 3, np.float32)
    scores[0, 0], scores[2, 1] = 1, 1  # right, a tie, wrong
    places = np.arange(9).reshape(3, 3)
    batch = type("B", (), {"labels": Candidates(places, grades, np.ones((3, 3), np.float32))})()
    found = computed(lambda scores: RANKING.losses(scores, batch, np.ones(3, np.float32)), scores.reshape(9, 1, 1))
    assert [float(part) for part in found["accuracy"]] == [1, 3]


CONFIG = TaskConfig(name="reranking", max_seq_length=24)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_tables(tmp_path):
    task = make_task(CONFIG)
    lists = [{"query": "q", "documents": ["a", "b", "c"], "labels": [0, 2, 1], "id": "x"}]
    mined = [{"query": "q", "positive": "a", "negative": ["b", "c"]}, {"query": "r", "positive": "d", "negative": []}]
    scored = [{"query": "q", "positive": "a", "negative": ["b"], "scores": [3.5, -1.0]}]
    (tmp_path / "rows.tsv").write_text("query\tpassage\tlabel\nq\ta\t1\nr\tb\t0\nq\tc\t0\nr\td\t1\n")
    found = task.read(write(tmp_path / "train.jsonl", lists), "train")
    assert [each[:4] for each in found] == [("q", ("a", "b", "c"), (0.0, 2.0, 1.0), "x")]
    found = task.read(write(tmp_path / "train.jsonl", mined), "train")
    assert [each[1:3] for each in found] == [(("a", "b", "c"), (1.0, 0.0, 0.0))]
    assert found.counts == {"skipped: all candidates alike": 1}
    found = task.read(write(tmp_path / "train.jsonl", scored), "train")
    assert [each[1:3] for each in found] == [(("a", "b"), (3.5, -1.0))]
    found = task.read(str(tmp_path / "rows.tsv"), "train")
    assert [each[:3] for each in found] == [("q", ("a", "c"), (1.0, 0.0)), ("r", ("b", "d"), (0.0, 1.0))]
    assert task.parse(["q", "a"], "input 1") == RankingExample("q", ("a",), where="input 1")
    assert task.parse({"query": "q", "documents": ["a", "b"]}, "1")[:3] == ("q", ("a", "b"), ())


def beir(folder, **settings):
    """Writes a BEIR directory of three passages and a run, and returns the task that reads it."""
    (folder / "qrels").mkdir(parents=True)
    write(folder / "corpus.jsonl", [{"_id": name, "title": "", "text": f"text {name}"} for name in "abc"])
    write(folder / "queries.jsonl", [{"_id": str(number), "text": f"q{number}"} for number in (1, 2, 3)])
    (folder / "qrels/dev.tsv").write_text("query-id\tcorpus-id\tscore\n1\tb\t2\n1\tc\t1\n2\ta\t1\n3\tc\t1\n")
    run = folder / "first.trec"
    run.write_text("1 Q0 a 0 0.5 x\n1 Q0 b 1 3.5 x\n1 Q0 c 2 0.4 x\n1 Q0 gone 3 9 x\n2 Q0 b 0 1 x\n")
    ranking = RankingConfig(**{"run": str(run), "candidates": 2} | settings)
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
    assert scores["ndcg@10"] == pytest.approx(gain / 3) and scores["mrr@10"] == pytest.approx(0.5 / 3)
    assert scores["recall@100"] == pytest.approx(0.5 / 3)
    # the run of MS MARCO has ranks, which grow
    (tmp_path / "ranks.tsv").write_text("1\tc\t2\n1\ta\t1\n1\tc\t3\n")
    assert read_run(str(tmp_path / "ranks.tsv")) == {"1": ["a", "c"]}


def test_a_run_is_for_queries_without_candidates(tmp_path):
    task = beir(tmp_path / "beir")
    row = {"query": "q", "positive": "a", "negative": ["b"]}
    train, dev = (write(tmp_path / name, [row]) for name in ("train.jsonl", "dev.jsonl"))
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
    task = beir(tmp_path / "beir", run=str(tmp_path / "run") if text else "")
    (tmp_path / "run").write_text(text or "")
    with pytest.raises(bert_jax.InputError, match=said):
        task.read(str(tmp_path / "beir"), "dev")


@pytest.mark.parametrize(
    ("rows", "settings", "said"),
    [
        ([{"query": "q", "documents": ["a", "b"], "labels": [1]}], {}, "train.jsonl:1 has 1 labels for 2 candidates"),
        ([{"query": "q", "documents": ["a", 3], "labels": [1, 0]}], {}, "not a text or a list of texts"),
        (
            [{"query": "q", "documents": ["a", "b"], "labels": [1, 1]}],
            {},
            "no query has candidates of different grades",
        ),
        ([{"documents": ["a"], "labels": [1]}], {}, "has no column query"),
        ([{"query": "q", "passage": "a"}], {}, "has no column label"),
        (
            [{"query": "q", "positive": "a", "negative": "b", "scores": [2, 0]}],
            {"loss": "bce"},
            "grade 2 is not from 0",
        ),
        ([{"query": "q", "positive": "a", "negative": "b", "scores": [2, -1]}], {}, "grade -1 is not 0 or more"),
    ],
)
def test_what_cannot_be_ranked_is_named(tmp_path, rows, settings, said):
    task = make_task(dataclasses.replace(CONFIG, ranking=RankingConfig(**settings)))
    place = write(tmp_path / "train.jsonl", rows)
    assert said in message(lambda: task.settle(task.read(place, "train")))


def test_scores_are_metrics_of_rankings():
    """Of equal scores the worse candidate comes first."""
    task = make_task(CONFIG)
    examples = [RankingExample("q", ("a", "b", "c"), (1.0, 0.0, 0.0)), RankingExample("r", ("a", "b"), (0.0, 1.0))]
    metrics = task.score(examples, [Ranked((0.5, 0.5, 0.1)), Ranked((0.2, 0.9))])
    assert metrics["mrr@10"] == pytest.approx((1 / 2 + 1) / 2)
    assert metrics["ndcg@10"] == pytest.approx((1 / np.log2(3) + 1) / 2)


WORDS = ("ban", "bes", "kut", "dar", "lin", "mot", "gen", "the")


def queries(count, seed):
    """Returns queries of a word, and candidates of which the one with "the" is right: a small model learns that."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        word, *others = rng.sample(WORDS[:-1], 4)
        right = f"the {rng.choice(others)}"
        wrong = [f"{rng.choice(others)} {rng.choice(others)}" for _ in range(rng.randint(1, 3))]
        rows.append({"query": word, "positive": right, "negative": wrong})
    return rows


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("queries")
    for name, count in (("train", 70), ("dev", 24)):
        write(folder / f"{name}.jsonl", queries(count, len(name)))
    return folder


@pytest.fixture(scope="module")
def model(pretrained):
    return pretrained


@pytest.mark.parametrize("pack", ["on", "off"])
def test_candidates_of_a_query_are_in_one_batch(source, model, pack):
    """On two devices, in rows of several pairs or of one; labels say where each score is."""
    task, tokenizer = make_task(CONFIG), bert_jax.load_pretrained(model).tokenizer
    examples = task.read(str(source), "train")
    rows = task.make_rows(examples, tokenizer, True).rows
    data = FinetuneDataConfig(path="x", batch_size=8, pack=pack, seed=1)
    batching = choose_batching(rows, data, ModelConfig(), 2, pack, 20, True)
    seen = []
    for batch in itertools.islice(
        train_batches(rows, RANKING, 0, batching, make_mesh(MeshConfig(), jax.devices()[:2])), 9
    ):
        batch = jax.device_get(batch)
        places, grades, there = batch.labels
        num_places = batch.cls_positions.shape[1]
        for own, own_grades, own_there in zip(places, grades, there):
            texts = []
            for place, grade, is_there in zip(own, own_grades, own_there):
                if not is_there:
                    assert place >= batch.cls_positions.size and not grade
                    continue
                line, slot = divmod(int(place), num_places)
                inside = batch.sequence_ids[line] == slot + 1
                texts.append((tuple(batch.token_ids[line][inside].tolist()), float(grade)))
                assert batch.type_ids[line][inside].any()  # the second text has its own type
            if texts:
                seen.append(tuple(sorted(texts)))
    wanted = []
    for row, example in zip(rows, examples):
        parts = np.split(row.token_ids, np.cumsum(row.lengths)[:-1])
        wanted.append(tuple(sorted((tuple(part.tolist()), grade) for part, grade in zip(parts, example.grades))))
    assert sorted(seen) == sorted(wanted)


def run_of(source, model, **sections):
    settings = {"accumulate": sections.pop("accumulate", 1)}
    config = FinetuneConfig(
        task=dataclasses.replace(CONFIG, ranking=RankingConfig(**sections.pop("ranking", {}))),
        model=FinetuneModelConfig(hidden_dropout_rate=0.0, attention_dropout_rate=0.0),
        data=FinetuneDataConfig(path=str(source), batch_size=16),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0, warmup_rate=0.1),
        train=FinetuneTrainConfig(num_epochs=sections.pop("num_epochs", 3.0), **settings),
        report=ReportConfig(tensorboard=False, every_steps=1),
        init_checkpoint=str(model),
    )
    return dataclasses.replace(config, **sections)


def losses_in(workdir):
    return [each["loss"] for each in read_metrics(workdir / "metrics.jsonl") if each["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["softmax", "bce"])
def test_a_reranker_learns_and_predicts_pairs(source, model, tmp_path, loss):
    """What is saved is a regression of pairs, whose numbers order the candidates as the run did."""
    config = run_of(source, model, ranking={"loss": loss}, num_epochs=20.0)
    result = finetune(config, tmp_path / "run", jax.devices()[:1])
    assert result.metrics["mrr@10"] > 0.9 > result.constant["mrr@10"] + 0.2
    bert = bert_jax.load_pretrained(tmp_path / "run")
    assert bert.task == "sequence_classification" and bert.task_settings["name"] == "regression"
    predictor = bert_jax.load_predictor(tmp_path / "run")
    hits = []
    for row in queries(24, len("dev")):
        said = [
            each.value for each in predictor([(row["query"], text) for text in (row["positive"], *row["negative"])])
        ]
        hits.append(said[0] > max(said[1:]))
        assert loss == "softmax" or 0 < min(said) <= max(said) < 1  # with the sigmoid
    assert np.mean(hits) > 0.8
    again = run_of(source, tmp_path / "run", num_epochs=0.2)  # goes on from the trained classifier
    finetune(again, tmp_path / "again", jax.devices()[:1])
    assert losses_in(tmp_path / "again")[0] < losses_in(tmp_path / "run")[0] / 2


@pytest.mark.slow
def test_from_a_search_to_a_reranker_and_back(source, model, tmp_path):
    """What `search` writes is the dev set of a reranker, which `search` then orders as the run has scored it."""
    folder, rows = tmp_path / "beir", queries(24, len("dev"))
    (folder / "qrels").mkdir(parents=True)
    texts = list(dict.fromkeys(text for row in rows for text in (row["positive"], *row["negative"])))
    asked = {row["query"]: row["positive"] for row in rows}
    write(folder / "corpus.jsonl", [{"_id": f"d{number}", "text": text} for number, text in enumerate(texts)])
    write(folder / "queries.jsonl", [{"_id": f"q{number}", "text": text} for number, text in enumerate(asked)])
    judged = [f"q{number}\td{texts.index(right)}\t1\n" for number, right in enumerate(asked.values())]
    (folder / "qrels/dev.tsv").write_text("".join(judged))
    command = ["-m", "bert_jax", "search", f"--checkpoint={model}"]
    command += [f"--{name}={folder}/{name}.jsonl" for name in ("corpus", "queries")]
    done = run_python([*command, f"--output={tmp_path}/first.trec", "--k=20"])
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "first.trec").read_text().splitlines()
    assert len(first) == 20 * len(asked) and first[0].split()[1::2] == ["Q0", "1", "bert_jax"]
    places = {"path": f"{source}/train.jsonl,{folder}"}
    config = run_of(source, model, ranking={"run": f"{tmp_path}/first.trec"}, num_epochs=4.0)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **places))
    result = finetune(config, tmp_path / "run", jax.devices()[:1])
    options = ["--rerank=pairs", f"--rerank_model={tmp_path}/run", f"--output={tmp_path}/second.trec"]
    done = run_python([*command, *options, "--k=20", "--candidates=20"])
    assert done.returncode == 0, done.stderr
    ranked = read_run(str(tmp_path / "second.trec"))
    places = [ranked[f"q{number}"].index(f"d{texts.index(right)}") if f"d{texts.index(right)}" in ranked[f"q{number}"]
              else 99 for number, right in enumerate(asked.values())]  # fmt: skip
    found = np.mean([1 / (1 + place) if place < 10 else 0 for place in places])
    assert result.metrics["mrr@10"] == pytest.approx(found, abs=0.02) and 0.05 < found < 1


@pytest.mark.slow
def test_the_loss_is_the_same_on_any_mesh_and_in_microbatches(source, model, tmp_path):
    finetune(run_of(source, model), tmp_path / "one", jax.devices()[:1])
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    finetune(run_of(source, model, accumulate=2, mesh=mesh), tmp_path / "eight")
    np.testing.assert_allclose(losses_in(tmp_path / "eight"), losses_in(tmp_path / "one"), rtol=2e-3)
