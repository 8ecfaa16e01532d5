# SPDX-License-Identifier: Apache-2.0
"""Embeddings from data to a model: prompts, rows, labels of a batch, scores, and a run that learns."""

import dataclasses
import random

import jax
import numpy as np
import pytest
from builders import first_batches, make_learner, message, tokens_at, tokens_of, write, write_topics

import bert_jax
from bert_jax.batches.examples import choose_batching
from bert_jax.batches.shapes import needed_flops
from bert_jax.finetuning import finetune
from bert_jax.model.heads.embedding import EMBEDDINGS
from bert_jax.model.heads.labels import Spot
from bert_jax.settings.finetuning import (
    EmbeddingConfig,
    FinetuneConfig,
    FinetuneDataConfig,
    FinetuneModelConfig,
    FinetuneTrainConfig,
    TaskConfig,
)
from bert_jax.settings.pretraining import MeshConfig, OptimizerConfig, ReportConfig
from bert_jax.settings.rules import to_dict
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.embeddings.read import SAME, TextsExample
from bert_jax.tasks.embeddings.task import Embedded, from_start
from bert_jax.tasks.prepare import completed, open_task
from bert_jax.tokenizing import load_tokenizer
from bert_jax.training.report import read_metrics


def task(**settings):
    return make_task(TaskConfig(name="embeddings", max_seq_length=16, embedding=EmbeddingConfig(**settings)))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return make_learner(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def tokenizer(start):
    return load_tokenizer(start / "tokenizer")


def word(rng, topic):
    return f"{topic}{rng.choice('aeiou')}{rng.choice('nrst')}"


def sentence(rng, topic, most=6):
    return " ".join(word(rng, topic) for _ in range(rng.randint(2, most)))


def write_pairs(path, count, seed=0):
    """Writes pairs of texts about the same of eight topics, and hard negatives about another."""
    rng, lines = random.Random(seed), ["anchor\tpositive\tnegative"]
    for _ in range(count):
        topic, other = rng.sample("bdfgklmp", 2)
        lines.append("\t".join(sentence(rng, each) for each in (topic, topic, other)))
    return write(path, "\n".join(lines))


def write_graded(path, count):
    rng, lines = random.Random(1), ["sentence1\tsentence2\tscore"]
    for _ in range(count):
        first, second = rng.choice("bdf"), rng.choice("bdf")
        lines.append(f"{sentence(rng, first)}\t{sentence(rng, second)}\t{5.0 if first == second else 1.0}")
    return write(path, "\n".join(lines))


# Rows


def test_rows_of_training_are_examples_whose_equal_texts_have_equal_numbers(tokenizer):
    examples = [TextsExample(("ban bas", "dar", "bas")), TextsExample(("bas", "ban bas", "bas"))]
    made = task(query_prompt="the ", passage_prompt=". .").make_rows(examples, tokenizer, True)
    first, second = made.rows
    assert first.lengths == (5, 5, 5) and tokenizer.tokens(first.token_ids)[:5] == "[CLS] the ban bas [SEP]".split()
    assert first.label == (0.0, 0, 1, 2) and second.label == (0.0, 2, 0, 2) and made.counts == {}
    same = task().make_rows([TextsExample(("ban", "bas", "BAS"))], tokenizer, True)
    assert same.counts == {SAME: 1} and same.rows[0].label == (0.0, 0, 1, 1)
    long = task(query_prompt="the " * 14)
    problem = "has 14 tokens, and task.max_seq_length 16 leaves no room for a text after it"
    assert problem in message(long.make_rows, examples, tokenizer, True)


def test_equal_texts_are_known_without_their_prompts(tokenizer):
    """A prompt that ends in a letter may join the first word of a text, and then has no tokens of its own."""
    examples = [TextsExample(("an bas", "das bas")), TextsExample(("an dar", "an bas"))]
    made = task(query_prompt="b", passage_prompt="b").make_rows(examples, tokenizer, True)
    assert [row.label for row in made.rows] == [(0.0, 0, 1), (0.0, 2, 0)]
    long = [TextsExample(("ban " * 20, "ban " * 30))]  # of which only equal tokens are read
    assert task().make_rows(long, tokenizer, True).rows[0].label == (0.0, 0, 0)


OWN = {"pooling": "cls", "normalize": False, "query_prompt": "the ", "other_prompts": '{"sts": "s "}'}


def start_with(start, path, own):
    """Returns the directory of an embedding model with its own settings and 20 tokens."""
    bert = bert_jax.load_pretrained(start)
    params = {"encoder": bert.params["encoder"]}
    if size := own.get("projection_size"):
        params["projection"] = {"kernel": np.ones((32, size), np.float32), "bias": np.ones(size, np.float32)}
    of_it = TaskConfig(name="embeddings", max_seq_length=20, embedding=EmbeddingConfig(**own))
    bert = dataclasses.replace(bert, params=params, task=EMBEDDINGS.name, task_settings=to_dict(of_it))
    bert_jax.save_pretrained(bert, path)
    return path


def run_from(start, tmp_path, length, **settings):
    asked = TaskConfig(name="embeddings", max_seq_length=length, embedding=EmbeddingConfig(**settings))
    data = FinetuneDataConfig(path=write_pairs(tmp_path / "train.tsv", 4), batch_size=4)
    return FinetuneConfig(task=asked, data=data, init_checkpoint=str(start))


@pytest.mark.parametrize(
    ("own", "settings", "length", "expected", "lines"),
    [
        (
            OWN | {"projection_size": 8}, {}, 0, OWN | {"projection_size": 8},
            ['from it: pooling "cls", projection_size 8, normalize false, query_prompt "the ", other_prompts '
             '"{\\"sts\\": \\"s \\"}", max_seq_length 20'],
        ),
        (
            OWN, {"pooling": "mean", "query_prompt": "find "}, 32, OWN | {"pooling": "mean", "query_prompt": "find "},
            ['from it: normalize false, other_prompts "{\\"sts\\": \\"s \\"}"',
             'from the settings: pooling "mean" (not "cls"), query_prompt "find " (not "the "), '
             "max_seq_length 32 (not 20)"],
        ),
        (OWN, {"kind": "sparse"}, 20, {"kind": "sparse", "pooling": "max"}, []),
        (
            {"projection_size": 8}, {"projection_size": 4}, 20, {"pooling": "mean", "projection_size": 4},
            ["from it: max_seq_length 20", "from the settings: projection_size 4 (not 8)",
             "its projection, from 32 to 8 numbers, is not used"],
        ),
    ],
)  # fmt: skip
def test_what_the_settings_leave_open_comes_from_the_start(start, tmp_path, own, settings, length, expected, lines):
    config = run_from(start_with(start, tmp_path / "start", own), tmp_path, length, **settings)
    config.validate()
    inputs = open_task(config)
    assert inputs.config.task.embedding == EmbeddingConfig(**expected)
    assert dataclasses.replace(inputs.task.config.embedding, loss="") == inputs.config.task.embedding
    assert inputs.task.config.max_seq_length == inputs.config.task.max_seq_length == (length or 20)
    assert list(inputs.start.notes) == lines
    for each in (config, inputs.config):  # as a grid asks which runs have finished
        assert completed(each)[0].task == inputs.config.task
    assert ("projection" in inputs.start.params) == (expected.get("projection_size") == 8)


def test_nothing_comes_from_a_start_of_another_task_or_that_is_not_asked(start, tmp_path):
    own = start_with(start, tmp_path / "start", {"pooling": "cls"})
    for config in (run_from(start, tmp_path, 0), run_from(own, tmp_path, 0, from_start=False)):
        assert "max_seq_length 128 is above the 64 positions" in message(open_task, config)
    assert open_task(run_from(start, tmp_path, 16)).config.task.embedding == EmbeddingConfig(pooling="mean")
    asked, of_it = run_from(own, tmp_path, 0, from_start=False).task, bert_jax.load_pretrained(own).embedding
    assert from_start(asked, of_it)[1] == ['from the settings: pooling "" (not "cls"), max_seq_length 128 (not 20)']


@pytest.mark.parametrize(("rates", "expected"), [((0.0, 0.0), 0.1), ((0.0, 0.2), 0.2), ((0.1, 0.1), 0.1)])
def test_texts_alone_have_dropout(start, tmp_path, rates, expected):
    model = FinetuneModelConfig(hidden_dropout_rate=rates[0], attention_dropout_rate=rates[1])
    config = dataclasses.replace(run_from(start, tmp_path, 16), model=model)
    assert open_task(config).model.attention_dropout_rate == rates[1]
    write(tmp_path / "train.tsv", "text\nban\nbas\n")
    inputs = open_task(config)
    assert inputs.model.attention_dropout_rate == expected
    assert any("both its rates are 0.1" in note for note in inputs.start.notes) == (not any(rates))


def test_rows_of_prediction_are_each_text_once(tokenizer):
    made = task(query_prompt="the ")
    examples = [TextsExample(("ban", "bas")), TextsExample(("bas", "bas ban")), TextsExample(("bas", "bas"), 1.0)]
    rows = made.make_rows(examples, tokenizer, False).rows
    assert [tokenizer.decode(row.token_ids[1:-1]) for row in rows] == ["the ban", "bas", "the bas", "bas ban"]
    found = made.decode(examples, rows, list(np.eye(4)))
    assert [each.vectors.argmax(1).tolist() for each in found] == [[0, 1], [2, 3], [2, 2]]


@pytest.mark.parametrize("pack", ["on", "off"])
def test_labels_say_where_each_text_of_a_batch_is(tokenizer, pack):
    rng = random.Random(0)
    examples = [TextsExample(tuple(sentence(rng, "b", 9) for _ in range(2 + n % 2))) for n in range(21)]
    rows = task().make_rows(examples, tokenizer, True).rows
    known = {number: tokens for row in rows for number, tokens in zip(row.label[1:], tokens_of(row))}
    seen = []
    for batch in first_batches(rows, EMBEDDINGS, FinetuneDataConfig(batch_size=8), 3, 4, pack)[1]:
        places, numbers = batch.labels.places, batch.labels.numbers
        assert places.shape == (8, 3) and len(np.unique(places)) == places.size
        assert (places[numbers < 0] >= batch.cls_positions.size).all()
        for place, number in zip(places[numbers >= 0], numbers[numbers >= 0]):
            assert tokens_at(batch, place) == known[number]
        seen += numbers[numbers[:, 0] >= 0, 0].tolist()
    assert sorted(seen) == sorted(row.label[1] for row in rows)


# Scores


def embedded(*vectors):
    return [Embedded(np.array(each, np.float32)) for each in vectors]


def test_pairs_are_scored_by_search_among_all_texts_but_the_query():
    examples = [TextsExample(("a", "b", "c")), TextsExample(("d", "e")), TextsExample(("b", "a"))]
    a, b, c, d, e = [1, 0, 0, 0], [1, 0.1, 0, 0], [1, 0.05, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]
    scores = task().score(examples, embedded([a, b, c], [d, e], [b, a]))
    # a: c, then b; d: a, b, c (cosines 0, in order b, c, e ...); b: c, a
    ranks = np.array([2, 3, 2])
    assert scores["mrr@10"] == pytest.approx(np.mean(1 / ranks))
    assert scores["ndcg@10"] == pytest.approx(np.mean(1 / np.log2(1 + ranks)))
    assert (scores["recall@1"], scores["recall@10"]) == (0.0, 1.0)
    own = [TextsExample(("a", "a")), TextsExample(("b", "c"))]  # an anchor that is its own positive is found
    assert task().score(own, embedded([a, a], [d, d]))["recall@1"] == 1


GRADED, PAIR, SAME_TEXT = TextsExample(("a", "b"), 1.0), TextsExample(("a", "b")), TextsExample(("a", "a"))


@pytest.mark.parametrize(
    ("examples", "settings", "problem"),
    [
        ([GRADED], {"loss": "infonce"}, "infonce is not for graded pairs; use cosent or cosine"),
        ([PAIR], {"loss": "cosent"}, "cosent is not for texts without scores"),
        ([PAIR], {"loss": "triplet"}, "triplet needs hard negatives"),
        ([TextsExample((x, "b"), where="f:2") for x in "acd"], {}, "f:2: all 3 examples have the positive 'b'"),
        ([TextsExample(("a", "b"), 5.0, 0, "f:2")], {"loss": "cosine"}, "f:2: score 5 is above embedding.best_score"),
        ([GRADED], {"kind": "sparse", "query_table": True}, "query_table needs queries with their passages, and these"),
        ([SAME_TEXT], {"kind": "sparse", "query_table": True}, "query_table needs queries with their passages"),
    ],
)
def test_a_loss_that_does_not_fit_the_data_is_named(examples, settings, problem):
    assert problem in message(task(**settings).settle, examples)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"pooling": "cls,min"},
            "pooling 'min' is unknown; use some of mean, cls, last, max, sqrt, weighted",
        ),
        ({"default_prompt": "sts"}, "embedding.default_prompt 'sts'"),
        ({"other_prompts": "sts: "}, 'embedding.other_prompts "sts: " is not an object such as'),
        ({"temperature": 1e-9}, "embedding.temperature 1e-09 is not from 1e-05 to"),
        ({"margin": 1e30}, "embedding.margin 1e+30 is not from 1e-15 to"),
        ({"dimensions": "64,x"}, 'embedding.dimensions "64,x" is not numbers from 1'),
        ({"kind": "sparse", "pooling": "mean"}, "embedding.pooling 'mean' is unknown; use some of max, sum"),
        ({"kind": "sparse", "pooling": "max,sum"}, "embedding.kind sparse has one pooling"),
        ({"kind": "sparse", "loss": "cosine"}, "and no loss cosine or gist; choose another"),
        ({"kind": "sparse", "projection_size": 8}, "projection_size, kept_dimensions and dimensions are of dense"),
        ({"query_table": True}, "query_table, max_terms and log_times are of sparse vectors"),
        ({"kind": "sparse", "log_times": 3}, "embedding.log_times 3 is not from 1 to 2"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings, problem):
    assert problem in message(EmbeddingConfig(**settings).validate)


def test_a_batch_and_a_metric_that_make_no_sense_are_named():
    alone = FinetuneConfig(task=task().config, data=FinetuneDataConfig(source="a", batch_size=1), init_checkpoint="b")
    assert "nothing that an anchor is" in message(alone.validate)
    assert "task.metric 'x' is not one of ndcg@10" in message(make_task, TaskConfig(name="embeddings", metric="x"))


def test_sparse_vectors_are_ranked_by_their_dot_products(tokenizer, tmp_path):
    """Of two pairs, the longer passage is found for both queries; a cosine would find each its own."""
    made = task(kind="sparse", query_table=True)
    examples = [TextsExample(("ban", "dar")), TextsExample(("bas", "das"))]
    rows = made.make_rows(examples, tokenizer, training=False).rows
    assert [row.is_query for row in rows] == [True, False, True, False] and made.head.knows_queries
    vectors = np.array([[[1, 0, 0]], [[0.5, 0, 0]], [[0, 1, 0]], [[2, 3, 1]]], np.float32)
    outputs = [made.head.outputs(vector, Spot(slice(0, 3), slice(0, 1))) for vector in vectors]
    predictions = made.decode(examples, rows, outputs)
    assert made.score(examples, predictions)["mrr@10"] == (1 / 2 + 1) / 2
    assert made.show(predictions[1]) == {"ids": [1], "weights": [1.0]}
    made.write(tmp_path, "dev", examples, predictions)
    assert (tmp_path / "dev.tsv").read_text() == "index\tprediction\n0\t0.5\n0\t3.0\n"
    graded = [TextsExample(("ban", "dar"), 1.0), TextsExample(("bas", "das"), 2.0)]
    assert task(kind="sparse").score(graded, predictions)["spearman"] == pytest.approx(1.0)


@pytest.mark.parametrize(("relevant", "own", "vector"), [("own", (), [0, 0, 1]), ("1", ("own",), [0.1, 0, 1])])
def test_only_what_is_the_query_itself_is_left_out_of_its_results(relevant, own, vector):
    """Passages and queries share ids, and each vector of a query is that of its passage: a perfect score."""
    examples = [TextsExample(("q",), id=name, relevant={name: 1.0}) for name in "12"]
    examples.append(TextsExample(("q",), id="own", relevant={relevant: 1.0}, own=own))
    examples += [TextsExample(("p",), id=name, is_passage=True) for name in ("1", "2", "own")]
    one, two, three = np.eye(3)
    found = embedded([one], [two], [vector], [one], [two], [three])
    assert set(task().score(examples, found).values()) == {1.0}


def test_a_passage_that_is_not_in_the_corpus_counts_as_not_found():
    """As trec_eval counts it: of two relevant passages one is found, at the first rank."""
    query = TextsExample(("q",), id="q", relevant={"p": 1.0, "gone": 1.0})
    scores = task().score([query, TextsExample(("p",), id="p", is_passage=True)], [Embedded(np.ones((1, 2)))] * 2)
    assert scores["recall@10"] == 0.5 and scores["ndcg@10"] == pytest.approx(1 / (1 + 1 / np.log2(3)))


# Runs


def config(start, source, epochs=4.0, **settings):
    return FinetuneConfig(
        task=TaskConfig(name="embeddings", max_seq_length=16, embedding=EmbeddingConfig(**settings)),
        data=FinetuneDataConfig(source=source, batch_size=16),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=0),
        train=FinetuneTrainConfig(num_epochs=epochs),
        mesh=MeshConfig(data=1),
        report=ReportConfig(every_steps=1, tensorboard=False, progress=False),
        init_checkpoint=str(start),
    )


def losses(workdir):
    return np.array([record["loss"] for record in read_metrics(workdir / "metrics.jsonl") if record["kind"] == "train"])


@pytest.mark.slow
def test_a_run_learns_what_belongs_together_and_its_model_is_used_as_it_was_trained(start, tmp_path, capsys):
    source = f"{write_pairs(tmp_path / 'a.tsv', 160)},{write_pairs(tmp_path / 'b.tsv', 40, 1)}"
    settings = {"query_prompt": "the ", "projection_size": 8, "dimensions": "4,8", "both_directions": True}
    result = finetune(config(start, source, 8.0, **settings), tmp_path / "run", jax.devices()[:1])
    found = losses(tmp_path / "run")
    assert found[-5:].mean() < 0.7 * found[:5].mean()
    assert result.metric == "ndcg@10" and result.metrics["ndcg@10"] > result.constant["ndcg@10"] + 0.1
    predict = bert_jax.load_predictor(tmp_path / "run")
    query, passage = (each.vectors[0] for each in predict(["ban bas", {"passage": "ban bas"}]))
    assert query.shape == (8,) and np.linalg.norm(query) == pytest.approx(1, abs=1e-6)
    assert not np.allclose(query, passage)
    capsys.readouterr()
    finetune(config(tmp_path / "run", source, 0.1), tmp_path / "again", jax.devices()[:1])
    said = 'from it: pooling "mean", projection_size 8, query_prompt "the ", max_seq_length 16'
    assert said in capsys.readouterr().err
    assert bert_jax.load_pretrained(tmp_path / "again").embedding.embedding.projection_size == 8


@pytest.mark.slow
def test_graded_pairs_and_texts_alone(start, tmp_path):
    graded = write_graded(tmp_path / "graded.tsv", 60)
    for loss in ("cosent", "cosine"):
        run = config(start, f"{graded},{graded}", loss=loss, best_score=5.0)
        result = finetune(run, tmp_path / loss, jax.devices()[:1])
        assert result.metric == "spearman" and result.metrics["spearman"] > 0.6 and result.constant["spearman"] == 0
    write_topics(tmp_path / "texts.tsv", 64, 0, labels=False)
    result = finetune(config(start, f"{tmp_path / 'texts.tsv'},{graded}"), tmp_path / "alone", jax.devices()[:1])
    found = losses(tmp_path / "alone")
    assert result.metric == "spearman" and found[-4:].mean() < found[:4].mean()


def test_padding_is_counted_of_the_texts_of_a_batch(tokenizer):
    """Questions of five tokens and paragraphs of sixteen: packed takes fewer FLOPs, and the log says how many."""
    rows = task().make_rows([TextsExample(("ban bas bes", "dar " * 20))] * 64, tokenizer, True).rows
    model, data = bert_jax.ModelConfig(max_positions=64), FinetuneDataConfig(source="x", batch_size=16)
    packed, padded = (choose_batching(rows, data, model, 1, pack, 10, apart=True) for pack in ("on", "off"))
    assert (packed.num_parts, packed.texts) == (padded.num_parts, padded.texts) == (32, 2)
    one, other = (batching.flops(rows, model) / needed_flops(model, rows) for batching in (packed, padded))
    assert 1 < one < other < 1.7
    assert choose_batching(rows, data, model, 1, "auto", 10, apart=True).shape is not None
