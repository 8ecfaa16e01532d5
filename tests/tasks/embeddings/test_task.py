# SPDX-License-Identifier: Apache-2.0
"""Embeddings from data to a model: prompts, rows, labels of a batch, scores, and a run that learns."""

import dataclasses
import random

import jax
import numpy as np
import pytest
from builders import make_learner, write_topics

import bert_jax
from bert_jax.batches.examples import choose_batching, train_batches
from bert_jax.batches.shapes import needed_flops
from bert_jax.devices.sharding import make_mesh
from bert_jax.errors import InputError
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


def write_pairs(path, count, seed, *, negatives=False):
    """Writes pairs of texts about the same of eight topics, and hard negatives about another."""
    rng, lines = random.Random(seed), ["anchor\tpositive" + "\tnegative" * negatives]
    for _ in range(count):
        topic, other = rng.sample("bdfgklmp", 2)
        texts = [" ".join(word(rng, each) for _ in range(rng.randint(2, 6))) for each in (topic, topic, other)]
        lines.append("\t".join(texts[: 2 + negatives]))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def write_graded(path, count, seed):
    rng, lines = random.Random(seed), ["sentence1\tsentence2\tscore"]
    for _ in range(count):
        first, second = rng.choice("bdf"), rng.choice("bdf")
        texts = [" ".join(word(rng, each) for _ in range(3)) for each in (first, second)]
        lines.append("\t".join([*texts, str(5.0 if first == second else 1.0)]))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


# Rows


def test_rows_of_training_are_examples_whose_equal_texts_have_equal_numbers(tokenizer):
    examples = [TextsExample(("ban bas", "dar", "bas")), TextsExample(("bas", "ban bas", "bas"))]
    made = task(query_prompt="the ", passage_prompt=". .").make_rows(examples, tokenizer, True)
    first, second = made.rows
    assert first.lengths == (5, 5, 5) and tokenizer.tokens(first.token_ids)[:5] == [
        "[CLS]",
        "the",
        "ban",
        "bas",
        "[SEP]",
    ]
    assert first.label == (0.0, 0, 1, 2) and second.label == (0.0, 2, 0, 2) and made.counts == {}
    same = task().make_rows([TextsExample(("ban", "bas", "BAS"))], tokenizer, True)
    assert same.counts == {SAME: 1} and same.rows[0].label == (0.0, 0, 1, 1)
    with pytest.raises(
        InputError, match=r"has 14 tokens, and task\.max_seq_length 16 leaves no room for a text after it"
    ):
        task(query_prompt="the " * 14).make_rows(examples, tokenizer, True)


def test_equal_texts_are_known_without_their_prompts(tokenizer):
    """A prompt that ends in a letter may join the first word of a text, and then has no tokens of its own."""
    names = {"query_prompt": "b", "passage_prompt": "b"}
    made = task(**names).make_rows(
        [TextsExample(("an bas", "das bas")), TextsExample(("an dar", "an bas"))], tokenizer, True
    )
    assert [row.label for row in made.rows] == [(0.0, 0, 1), (0.0, 2, 0)]
    long = [TextsExample(("ban " * 20, "ban " * 30))]  # of which only equal tokens are read
    assert task().make_rows(long, tokenizer, True).rows[0].label == (0.0, 0, 0)


OWN = {"pooling": "cls", "normalize": False, "query_prompt": "the ", "other_prompts": '{"sts": "s "}'}


@pytest.mark.parametrize(
    ("own", "settings", "length", "expected", "lines"),
    [
        (None, {}, 0, {"pooling": "mean"}, []),
        (
            OWN | {"projection_size": 8},
            *({}, 0, OWN | {"projection_size": 8}),
            ['from it: pooling "cls", projection_size 8, normalize false, query_prompt "the ", other_prompts '
             '"{\\"sts\\": \\"s \\"}", max_seq_length 20'],
        ),
        (
            OWN,
            *({"pooling": "mean", "query_prompt": "find "}, 32, OWN | {"pooling": "mean", "query_prompt": "find "}),
            ['from it: normalize false, other_prompts "{\\"sts\\": \\"s \\"}"',
             'from the settings: pooling "mean" (not "cls"), query_prompt "find " (not "the "), '
             "max_seq_length 32 (not 20)"],
        ),
        (
            *({"pooling": "cls"}, {"from_start": False}, 0, {"pooling": "mean", "from_start": False}),
            ['from the settings: pooling "" (not "cls"), max_seq_length 128 (not 20)'],
        ),
        (
            OWN,
            *({"kind": "sparse"}, 20, {"kind": "sparse", "pooling": "max"}),
            [],
        ),
        ({"projection_size": 8}, {"projection_size": 4}, 20, {"pooling": "mean", "projection_size": 4},
         ["from it: max_seq_length 20", "from the settings: projection_size 4 (not 8)",
          "its projection, from 32 to 8 numbers, is not used"]),
    ],
)  # fmt: skip
def test_what_the_settings_leave_open_comes_from_the_start(start, tmp_path, own, settings, length, expected, lines):
    bert = bert_jax.load_pretrained(start)
    if own is not None:
        params = {"encoder": bert.params["encoder"]}
        if size := own.get("projection_size"):
            params["projection"] = {"kernel": np.ones((32, size), np.float32), "bias": np.ones(size, np.float32)}
        of_it = TaskConfig(name="embeddings", max_seq_length=20, embedding=EmbeddingConfig(**own))
        bert = dataclasses.replace(bert, params=params, task=EMBEDDINGS.name, task_settings=to_dict(of_it))
    bert_jax.save_pretrained(bert, tmp_path / "start")
    asked = TaskConfig(name="embeddings", max_seq_length=length, embedding=EmbeddingConfig(**settings))
    data = FinetuneDataConfig(path=write_pairs(tmp_path / "train.tsv", 4, 0), batch_size=4)
    config = FinetuneConfig(task=asked, data=data, init_checkpoint=str(tmp_path / "start"))
    config.validate()
    if own is None:  # with 64 positions
        with pytest.raises(InputError, match="max_seq_length 128 is above the 64 positions"):
            open_task(config)
        config = dataclasses.replace(config, task=dataclasses.replace(asked, max_seq_length=16))
    elif not settings.get("from_start", True):
        with pytest.raises(InputError, match="max_seq_length 128 is above the 64 positions"):
            open_task(config)
        assert from_start(asked, bert.embedding)[1] == lines
        return
    inputs = open_task(config)
    assert inputs.config.task.embedding == EmbeddingConfig(**expected)
    assert dataclasses.replace(inputs.task.config.embedding, loss="") == inputs.config.task.embedding
    assert inputs.task.config.max_seq_length == inputs.config.task.max_seq_length == (length or (20 if own else 16))
    assert list(inputs.start.notes) == lines
    for each in (config, inputs.config):  # as a grid asks which runs have finished
        assert completed(each)[0].task == inputs.config.task
    assert ("projection" in inputs.start.params) == (expected.get("projection_size") == 8)


@pytest.mark.parametrize(("rates", "expected"), [((0.0, 0.0), 0.1), ((0.0, 0.2), 0.2), ((0.1, 0.1), 0.1)])
def test_texts_alone_have_dropout(start, tmp_path, rates, expected):
    (tmp_path / "train.tsv").write_text("text\nban\nbas\n")
    config = FinetuneConfig(
        task=TaskConfig(name="embeddings", max_seq_length=16),
        model=FinetuneModelConfig(hidden_dropout_rate=rates[0], attention_dropout_rate=rates[1]),
        data=FinetuneDataConfig(path=str(tmp_path / "train.tsv"), batch_size=2),
        init_checkpoint=str(start),
    )
    inputs = open_task(config)
    assert inputs.model.attention_dropout_rate == expected
    assert any("both its rates are 0.1" in note for note in inputs.start.notes) == (not any(rates))
    write_pairs(tmp_path / "train.tsv", 4, 0)
    assert open_task(config).model.attention_dropout_rate == rates[1]


def test_rows_of_prediction_are_each_text_once(tokenizer):
    made = task(query_prompt="the ")
    examples = [TextsExample(("ban", "bas")), TextsExample(("bas", "bas ban")), TextsExample(("bas", "bas"), 1.0)]
    rows = made.make_rows(examples, tokenizer, False).rows
    assert [tokenizer.tokens(row.token_ids[1:-1]) for row in rows] == [
        ["the", "ban"], ["bas"], ["the", "bas"], ["bas", "ban"]
    ]  # fmt: skip
    vectors = np.eye(4, dtype=np.float32)
    found = made.decode(examples, rows, list(vectors))
    assert [each.vectors.argmax(1).tolist() for each in found] == [[0, 1], [2, 3], [2, 2]]


def test_labels_say_where_each_text_of_a_batch_is(tokenizer):
    rng = random.Random(0)
    examples = [
        TextsExample(tuple(" ".join(word(rng, "b") for _ in range(rng.randint(1, 9))) for _ in range(2 + n % 2)))
        for n in range(21)
    ]
    rows = task().make_rows(examples, tokenizer, True).rows
    known = {kind: text for each in rows for kind, text in zip(each.label[1:], parts(each))}
    for pack in ("on", "off"):
        data = FinetuneDataConfig(source="x", batch_size=8)
        batching = choose_batching(rows, data, bert_jax.ModelConfig(max_positions=64), 4, pack, 10, apart=True)
        mesh = make_mesh(MeshConfig(data=4), jax.devices()[:4])
        seen = []
        for _, batch in zip(range(3), train_batches(rows, EMBEDDINGS, 0, batching, mesh)):
            batch = jax.device_get(batch)
            places, numbers = batch.labels.places, batch.labels.numbers
            assert places.shape == (8, 3) and len(np.unique(places)) == places.size
            for line, of_example in zip(places, numbers):
                for place, number in zip(line, of_example):
                    row, index = divmod(int(place), batch.cls_positions.shape[1])
                    if number < 0:
                        assert row >= len(batch.token_ids)
                        continue
                    ids = batch.token_ids[row][batch.sequence_ids[row] == index + 1]
                    np.testing.assert_array_equal(ids, known[number])
            seen += numbers[:, 0][numbers[:, 0] >= 0].tolist()
        assert sorted(seen) == sorted(row.label[1] for row in rows)


def parts(row):
    return np.split(row.token_ids, np.cumsum(row.lengths)[:-1])


# Scores


def test_pairs_are_scored_by_search_among_all_texts_but_the_query():
    examples = [TextsExample(("a", "b", "c")), TextsExample(("d", "e")), TextsExample(("b", "a"))]
    made = task()
    e = np.eye(5)
    vectors = {"a": e[0], "b": e[0] + 0.1 * e[1], "c": e[0] + 0.05 * e[1], "d": e[3], "e": e[4]}
    found = [np.stack([vectors[text] for text in example.texts]).astype(np.float32) for example in examples]
    scores = made.score(examples, [type("P", (), {"vectors": each})() for each in found])
    # a: c, then b; d: a, b, c (cosines 0, in order b, c, e ...); b: c, a
    ranks = [2, 3, 2]
    assert scores["mrr@10"] == pytest.approx(np.mean([1 / rank for rank in ranks]))
    assert scores["ndcg@10"] == pytest.approx(np.mean([1 / np.log2(1 + rank) for rank in ranks]))
    assert (scores["recall@1"], scores["recall@10"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("examples", "settings", "problem"),
    [
        ([TextsExample(("a", "b"), 1.0)], {"loss": "infonce"}, "infonce is not for graded pairs; use cosent or cosine"),
        ([TextsExample(("a", "b"))], {"loss": "cosent"}, "cosent is not for texts without scores"),
        ([TextsExample(("a", "b"))], {"loss": "triplet"}, "triplet needs hard negatives"),
        ([TextsExample((x, "b"), where="f:2") for x in "acd"], {}, "f:2: all 3 examples have the positive 'b'"),
        ([TextsExample(("a", "b"), 5.0, 0, "f:2")], {"loss": "cosine"}, r"f:2: score 5 is above embedding.best_score"),
    ],
)  # fmt: skip
def test_a_loss_that_does_not_fit_the_data_is_named(examples, settings, problem):
    made = task(**settings)
    with pytest.raises(InputError, match=problem):
        made.settle(examples)


def test_settings_that_make_no_sense_are_named():
    alone = FinetuneConfig(task=task().config, data=FinetuneDataConfig(source="a", batch_size=1), init_checkpoint="b")
    with pytest.raises(InputError, match="nothing that an anchor is"):
        alone.validate()
    for settings, problem in (
        (
            {"pooling": "cls,min"},
            "embedding.pooling 'min' is unknown; use some of mean, cls, last, max, sqrt, weighted",
        ),
        ({"default_prompt": "sts"}, r"embedding\.default_prompt 'sts'"),
        ({"other_prompts": "sts: "}, 'embedding.other_prompts "sts: " is not an object such as'),
        ({"temperature": 0.0}, r"embedding\.temperature 0.0 is not from 1e-05"),
        ({"margin": 1e30}, r"embedding\.margin 1e\+30 is not from 1e-15 to"),
        ({"temperature": 1e-9}, r"embedding\.temperature 1e-09 is not from 1e-05 to"),
        ({"dimensions": "64,x"}, 'embedding.dimensions "64,x" is not numbers from 1'),
        ({"kind": "sparse", "pooling": "mean"}, "embedding.pooling 'mean' is unknown; use some of max, sum"),
        ({"kind": "sparse", "pooling": "max,sum"}, "embedding.kind sparse has one pooling"),
        ({"kind": "sparse", "loss": "cosine"}, "and the loss infonce, triplet or cosent; choose one"),
        ({"kind": "sparse", "projection_size": 8}, "projection_size, kept_dimensions and dimensions are of dense"),
        ({"query_table": True}, "query_table, max_terms and log_times are of sparse vectors"),
        ({"kind": "sparse", "log_times": 3}, "embedding.log_times 3 is not from 1 to 2"),
    ):
        with pytest.raises(InputError, match=problem):
            EmbeddingConfig(**settings).validate()
    with pytest.raises(InputError, match=r"task\.metric 'x' is not one of ndcg@10"):
        make_task(TaskConfig(name="embeddings", metric="x"))


@pytest.mark.parametrize("examples", [[TextsExample(("a", "b"), 0.5)], [TextsExample(("a", "a"))]])
def test_a_table_of_queries_needs_queries(examples):
    with pytest.raises(InputError, match="query_table needs queries with their passages, and these texts are alike"):
        task(kind="sparse", query_table=True).settle(examples)


def test_sparse_vectors_are_ranked_by_their_dot_products(tokenizer, tmp_path):
    """Of two pairs, the longer passage is found for both queries; a cosine would find each its own."""
    made = task(kind="sparse", query_table=True)
    examples = [TextsExample(("ban", "dar")), TextsExample(("bas", "das"))]
    rows = made.make_rows(examples, tokenizer, training=False).rows
    assert [row.is_query for row in rows] == [True, False, True, False] and made.head.knows_queries
    vectors = np.array([[1, 0, 0], [0.5, 0, 0], [0, 1, 0], [2, 3, 1]], np.float32)
    outputs = [made.head.outputs(vector[None], Spot(slice(0, 3), slice(0, 1))) for vector in vectors]
    predictions = made.decode(examples, rows, outputs)
    assert made.score(examples, predictions)["mrr@10"] == pytest.approx((1 / 2 + 1) / 2)
    assert made.show(predictions[1]) == {"ids": [1], "weights": [1.0]}
    made.write(tmp_path, "dev", examples, predictions)
    assert (tmp_path / "dev.tsv").read_text().splitlines()[1].split("\t")[-1] == "0.5"
    graded = [example._replace(score=score) for example, score in zip(examples, (1.0, 2.0))]
    assert task(kind="sparse").score(graded, predictions)["spearman"] == pytest.approx(1.0)


@pytest.mark.parametrize("own_is_relevant", [False, True])
def test_only_what_is_the_query_itself_is_left_out_of_its_results(own_is_relevant):
    """Passages and queries share ids, and each vector of a query is that of its passage: a perfect score."""
    relevant = {"1": {"1": 1.0}, "2": {"2": 1.0}, "own": {"own": 1.0} if own_is_relevant else {"1": 1.0}}
    own = () if own_is_relevant else ("own",)
    queries = [
        TextsExample((f"query {id_}",), id=id_, relevant=grades, own=own if id_ == "own" else ())
        for id_, grades in relevant.items()
    ]
    passages = [TextsExample((f"passage {id_}",), id=id_, is_passage=True) for id_ in relevant]
    e = np.eye(3, dtype=np.float32)
    vectors = [e[0], e[1], e[2] if own_is_relevant else e[2] + 0.1 * e[0], *e]
    scores = task().score([*queries, *passages], [Embedded(vector[None]) for vector in vectors])
    assert set(scores.values()) == {1.0}


def test_a_passage_that_is_not_in_the_corpus_counts_as_not_found():
    """As trec_eval counts it: of two relevant passages one is found, at the first rank."""
    query = TextsExample(("q",), id="q", relevant={"p": 1.0, "gone": 1.0})
    scores = task().score([query, TextsExample(("p",), id="p", is_passage=True)], [Embedded(np.ones((1, 2)))] * 2)
    assert scores["recall@10"] == 0.5 and scores["ndcg@10"] == pytest.approx(1 / (1 + 1 / np.log2(3)))


def test_an_anchor_that_is_its_own_positive_is_found():
    examples = [TextsExample(("a", "a")), TextsExample(("b", "c"))]
    found = [Embedded(np.eye(3, dtype=np.float32)[rows]) for rows in ([0, 0], [1, 1])]
    assert task().score(examples, found)["recall@1"] == 1


# Runs


def config(start, source, workdir=None, **sections):
    settings = FinetuneConfig(
        task=TaskConfig(name="embeddings", max_seq_length=16),
        data=FinetuneDataConfig(source=source, batch_size=16),
        optimizer=OptimizerConfig(learning_rate=5e-3, warmup_steps=0),
        train=FinetuneTrainConfig(num_epochs=4.0),
        mesh=MeshConfig(data=1),
        report=ReportConfig(every_steps=1, tensorboard=False, progress=False),
        init_checkpoint=str(start),
    )
    return dataclasses.replace(settings, **sections)


def losses(workdir):
    return np.array([record["loss"] for record in read_metrics(workdir / "metrics.jsonl") if record["kind"] == "train"])


@pytest.mark.slow
def test_a_run_learns_what_belongs_together_and_its_model_is_used_as_it_was_trained(start, tmp_path, capsys):
    source = f"{write_pairs(tmp_path / 'a.tsv', 160, 0, negatives=True)},{write_pairs(tmp_path / 'b.tsv', 40, 1)}"
    settings = EmbeddingConfig(query_prompt="the ", projection_size=8, dimensions="4,8", both_directions=True)
    task = TaskConfig(name="embeddings", max_seq_length=16, embedding=settings)
    run = config(start, source, task=task, train=FinetuneTrainConfig(num_epochs=8.0))
    result = finetune(run, tmp_path / "run", jax.devices()[:1])
    found = losses(tmp_path / "run")
    assert found[-5:].mean() < 0.7 * found[:5].mean()
    assert result.metric == "ndcg@10" and result.metrics["ndcg@10"] > result.constant["ndcg@10"] + 0.1
    predict = bert_jax.load_predictor(tmp_path / "run")
    query, passage = (each.vectors[0] for each in predict(["ban bas", {"passage": "ban bas"}]))
    assert (
        query.shape == (8,) and np.linalg.norm(query) == pytest.approx(1, abs=1e-6) and not np.allclose(query, passage)
    )
    again = config(tmp_path / "run", source, train=FinetuneTrainConfig(num_epochs=0.1))
    capsys.readouterr()
    finetune(again, tmp_path / "again", jax.devices()[:1])
    log = capsys.readouterr().err
    assert 'from it: pooling "mean", projection_size 8, query_prompt "the ", max_seq_length 16' in log
    assert bert_jax.load_pretrained(tmp_path / "again").embedding.embedding.projection_size == 8


@pytest.mark.slow
def test_graded_pairs_and_texts_alone(start, tmp_path):
    graded = write_graded(tmp_path / "graded.tsv", 60, 1)
    for loss in ("cosent", "cosine"):
        of_loss = TaskConfig(name="embeddings", max_seq_length=16, embedding=EmbeddingConfig(loss=loss, best_score=5.0))
        result = finetune(config(start, f"{graded},{graded}", task=of_loss), tmp_path / loss, jax.devices()[:1])
        assert result.metric == "spearman" and result.metrics["spearman"] > 0.6 and result.constant["spearman"] == 0
    write_topics(tmp_path / "texts.tsv", 64, 0, labels=False)
    result = finetune(config(start, f"{tmp_path / 'texts.tsv'},{graded}"), tmp_path / "alone", jax.devices()[:1])
    assert result.metric == "spearman"
    found = losses(tmp_path / "alone")
    assert found[-4:].mean() < found[:4].mean()


def test_padding_is_counted_of_the_texts_of_a_batch(tokenizer):
    """Questions of five tokens and paragraphs of sixteen: packed takes fewer FLOPs, and the log says how many."""
    examples = [TextsExample(("ban bas bes", " ".join(["dar"] * 20))) for _ in range(64)]
    rows = task().make_rows(examples, tokenizer, True).rows
    model = bert_jax.ModelConfig(max_positions=64)
    data = FinetuneDataConfig(source="x", batch_size=16)
    shares = []
    for pack in ("on", "off"):
        batching = choose_batching(rows, data, model, 1, pack, 10, apart=True)
        assert (batching.num_parts, batching.texts) == (32, 2)
        shares.append(batching.flops(rows, model) / needed_flops(model, rows))
    assert 1 < shares[0] < shares[1] < 1.7
    assert choose_batching(rows, data, model, 1, "auto", 10, apart=True).shape is not None
