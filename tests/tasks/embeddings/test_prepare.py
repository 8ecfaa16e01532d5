# SPDX-License-Identifier: Apache-2.0
"""Prepared pairs are the rows of the tables that they were made of; and batches of several sources."""

import dataclasses
import gzip
import itertools
import json
import os
import random
from pathlib import Path

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from builders import message

from bert_jax import load_pretrained
from bert_jax.batch import Row
from bert_jax.batches.examples import choose_batching, train_batches
from bert_jax.batches.order import Mix, StreamedPlan, mix_by_weights, plan_epoch
from bert_jax.batches.pack import StoredRows
from bert_jax.batches.shapes import needed_flops
from bert_jax.data import blocks
from bert_jax.devices.sharding import make_mesh
from bert_jax.errors import StoppedError
from bert_jax.model.heads.embedding import EMBEDDINGS
from bert_jax.settings.finetuning import EmbeddingConfig, FinetuneDataConfig, RankingConfig, TaskConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.settings.pretraining import MeshConfig
from bert_jax.storage.files import sha256_file
from bert_jax.storage.places import to_place
from bert_jax.tasks.candidates import CandidateRows
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.embeddings import prepare as module
from bert_jax.tasks.embeddings.prepare import PairOptions, prepare_pairs
from bert_jax.tasks.embeddings.prepared import PreparedPairs
from bert_jax.tasks.prepare import fingerprint
from bert_jax.tasks.reranking import RankingExample

WORDS = ("ban", "bes", "kut", "dar", "lin", "mot", "the", "gen")


@pytest.fixture(scope="module")
def model(pretrained):
    return pretrained


def text(rng, most):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def pairs(count, seed=0, negatives=3):
    """Returns pairs with up to so many hard negatives, of which some texts are equal, and some too long."""
    rng = random.Random(seed)
    rows = [
        {"anchor": text(rng, 3), "positive": text(rng, 20), "negative": [text(rng, 6) for _ in range(number % 3)]}
        for number in range(count)
    ]
    return rows if negatives else [{name: row[name] for name in ("anchor", "positive")} for row in rows]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(inputs, model, output, **options):
    run = {name: options.pop(name) for name in ("names", "weights", "num_workers") if name in options}
    options = PairOptions(**({"max_seq_length": 16} | options))
    return prepare_pairs(str(inputs), str(model / "tokenizer"), str(output), options, **({"num_workers": 1} | run))


def both(table, output, model, **embedding):
    """Returns the task, and its rows of a table and of prepared pairs."""
    task = make_task(TaskConfig(name="embeddings", max_seq_length=16, embedding=EmbeddingConfig(**embedding)))
    tokenizer = load_pretrained(model).tokenizer
    read = [task.read(str(place), "train") for place in (table, output)]
    assert isinstance(read[1], PreparedPairs) and task.settle(read[0]) == task.settle(read[1])
    return task, [task.make_rows(examples, tokenizer, True).rows for examples in read]


def assert_same_rows(one, other):
    assert len(one) == len(other) > 0 and isinstance(other, StoredRows)
    known: dict[int, int] = {}  # which texts are equal, among all
    hashes = other._rows.gather(np.arange(len(other)))["texts"]
    for number, (mine, stored, texts) in enumerate(zip(one, other, hashes)):
        assert stored.example == number and stored.lengths == mine.lengths
        np.testing.assert_array_equal(stored.label[0], np.float32(mine.label[0]))  # as batches have it
        np.testing.assert_array_equal(stored.token_ids, mine.token_ids)
        for ours, theirs in zip(mine.label[1:], texts.tolist()):
            assert known.setdefault(theirs, ours) == ours
    assert len(set(known.values())) == len(known)


def write_table(folder, kind):
    rows = pairs(40)
    if kind == "jsonl.gz":
        (folder / "train.jsonl.gz").write_bytes(gzip.compress(write_jsonl(folder / "x", rows).read_bytes()))
        return folder / "train.jsonl.gz"
    if kind == "parquet":
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "train.parquet")
        return folder / "train.parquet"
    if kind == "graded.tsv":
        lines = [
            "sentence1\tsentence2\tscore",
            *(f"{r['anchor']}\t{r['positive']}\t{len(r['anchor']) / 7}" for r in rows),
        ]
        (folder / "train.tsv").write_text("\n".join(lines) + "\n")
        return folder / "train.tsv"
    if kind == "csv":
        lines = ["query,positive,negative", *(f'"{r["anchor"]}",{r["positive"]},"{r["anchor"]} the"' for r in rows)]
        (folder / "train.csv").write_text("\n".join(lines) + "\n")
        return folder / "train.csv"
    if kind == "nli.jsonl":
        labels = ("entailment", "neutral", "contradiction")
        named = [(row["anchor"], row["positive"], labels[number % 3]) for number, row in enumerate(pairs(90))]
        return write_jsonl(folder / "nli.jsonl", [dict(zip(("premise", "hypothesis", "label"), row)) for row in named])
    if kind == "txt":
        (folder / "train.txt").write_text("".join(f"{row['positive']}\n" for row in rows))
        return folder / "train.txt"
    if kind == "squad":
        qas = [{"id": str(n), "question": r["anchor"], "answers": []} for n, r in enumerate(rows)]
        paragraphs = [{"context": r["positive"], "qas": [qa]} for r, qa in zip(rows, qas)]
        data = {"version": "v2.0", "data": [{"title": "", "paragraphs": paragraphs}]}
        (folder / "train.json").write_text(json.dumps(data))
        return folder / "train.json"
    assert kind == "beir"
    place = folder / "beir"
    (place / "qrels").mkdir(parents=True)
    write_jsonl(
        place / "corpus.jsonl", [{"_id": f"d{n}", "title": "the", "text": r["positive"]} for n, r in enumerate(rows)]
    )
    write_jsonl(place / "queries.jsonl", [{"_id": f"q{n}", "text": r["anchor"]} for n, r in enumerate(rows)])
    judged = "".join(f"q{n}\td{(n + k) % 40}\t1\n" for n in range(40) for k in range(1 + n % 2))
    (place / "qrels" / "train.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    return place


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "graded.tsv", "csv", "nli.jsonl", "txt", "squad", "beir"])
def test_rows_are_those_of_the_table(model, tmp_path, monkeypatch, kind):
    """Read in parts of seven examples, and written in shards of a few rows that begin within files."""
    monkeypatch.setattr(module, "_EXAMPLES_AT_ONCE", 7)
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 3)
    monkeypatch.setattr(module, "SHARD_BYTES", 700)
    table = write_table(tmp_path, kind)
    prompts = {"query_prompt": "the ", "passage_prompt": "gen: "}
    manifest = prepared(table, model, tmp_path / "pairs", **prompts)
    assert len(manifest["splits"]["train"]["shards"]) > 2 and not (tmp_path / "pairs" / "unfinished").exists()
    assert manifest["graded"] == (kind == "graded.tsv") and manifest["alone"] == (kind == "txt")
    task, (one, other) = both(table, tmp_path / "pairs", model, **prompts)
    assert_same_rows(one, other)
    assert needed_flops(ModelConfig(), one) == needed_flops(ModelConfig(), other)
    assert other[-1].lengths == one[-1].lengths and [row.example for row in other[3:5]] == [3, 4]


def test_scores_of_a_teacher_and_candidates_of_a_reranker(model, tmp_path):
    rng = np.random.default_rng(0)
    rows = [row | {"scores": rng.normal(size=1 + len(row["negative"])).tolist()} for row in pairs(20)]
    rows[3] |= {"anchor": "ban " * 12, "positive": "kut " * 20}  # both are cut
    table = write_jsonl(tmp_path / "train.jsonl", rows)
    manifest = prepared(table, model, tmp_path / "pairs")
    assert manifest["taught"] and manifest["smallest_score"] < 0 < manifest["largest_score"]
    _, (one, other) = both(table, tmp_path / "pairs", model, loss="margin_mse")
    assert_same_rows(one, other)
    assert len(one[2].label[0]) == 3
    plain = write_jsonl(tmp_path / "plain.jsonl", pairs(20))
    prepared(plain, model, tmp_path / "plain")
    for source, output, loss in ((table, "pairs", "mse"), (plain, "plain", "softmax")):
        ranking = RankingConfig(loss=loss)
        task = make_task(TaskConfig(name="reranking", max_seq_length=16, ranking=ranking))
        tokenizer = load_pretrained(model).tokenizer.cutting_as_hub()
        found = task.read(str(tmp_path / output), "train")
        assert task.settle(found) == task.config
        stored = task.make_rows(found, tokenizer, True).rows
        # those of the table that are not alike, and here also those
        every = [example_of(json.loads(line)) for line in source.read_text().splitlines()]
        wanted = task.make_rows(every, tokenizer, True).rows
        assert isinstance(stored, CandidateRows) and len(stored) == len(wanted) == 20
        for mine, theirs, lengths in zip(wanted, stored, stored.lengths.tolist()):
            assert mine.lengths == theirs.lengths == tuple(filter(None, lengths))
            np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
            np.testing.assert_array_equal(mine.type_ids, theirs.type_ids)
            np.testing.assert_array_equal(theirs.label, np.float32(mine.label))
    task = make_task(TaskConfig(name="reranking", max_seq_length=16, ranking=RankingConfig(loss="bce")))
    assert "is not from 0 to 1" in message(task.settle, task.read(str(tmp_path / "pairs"), "train"))
    prepared(write_jsonl(tmp_path / "few.jsonl", pairs(9, negatives=0)), model, tmp_path / "few")
    assert "has no hard negatives" in message(task.settle, task.read(str(tmp_path / "few"), "train"))


def example_of(row):
    negatives = [text for text in row["negative"] if text != row["positive"]]
    grades = row.get("scores") or [1.0] + [0.0] * len(negatives)
    return RankingExample(row["anchor"], (row["positive"], *negatives), tuple(grades))


@pytest.mark.parametrize(("pack", "bucket"), [("on", True), ("off", True), ("off", False)])
def test_batches_are_those_of_the_table(model, tmp_path, pack, bucket):
    rows = pairs(90)
    files = [write_jsonl(tmp_path / name, part) for name, part in (("a.jsonl", rows[:31]), ("b.jsonl", rows[31:]))]
    table = write_jsonl(tmp_path / "all.jsonl", rows)
    prepared(f"{files[0]},{files[1]}", model, tmp_path / "pairs")
    _, (one, other) = both(table, tmp_path / "pairs", model)
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    found = []
    for source in (one, other):
        data = FinetuneDataConfig(path="x", batch_size=8, pack=pack, bucket=bucket, seed=3)
        batching = choose_batching(source, data, ModelConfig(), 2, pack, 100, True)
        found.append((batching, list(itertools.islice(train_batches(source, EMBEDDINGS, 10, batching, mesh), 4))))
    (ours, batches), (theirs, others) = found
    same = {"mix": None, "lengths": ()} if pack == "on" else {"mix": None}
    assert dataclasses.replace(ours, **same) == dataclasses.replace(theirs, **same)
    for batch, other_batch in zip(batches, others):
        arrays = (jax.tree.leaves(each._replace(labels=None)) for each in (batch, other_batch))
        for mine, stored in zip(*arrays):
            np.testing.assert_array_equal(mine, stored)
        mine, stored = batch.labels, other_batch.labels
        np.testing.assert_array_equal(mine.places, stored.places)
        np.testing.assert_array_equal(mine.scores, stored.scores)
        equal = [np.ravel(a)[:, None] == np.ravel(a) for a in (mine.numbers, stored.numbers)]
        np.testing.assert_array_equal(*equal)
        np.testing.assert_array_equal(np.asarray(mine.numbers) < 0, np.asarray(stored.numbers) < 0)


def contents(folder):
    return {path.name: sha256_file(path) for path in Path(folder).iterdir() if path.is_file()}


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(model, tmp_path, monkeypatch):
    names = [write_jsonl(tmp_path / f"{n}.jsonl", pairs(20, n)) for n in range(3)]
    inputs = ",".join(map(str, names))
    whole = prepared(inputs, model, tmp_path / "whole")
    reads, real = [], module.read_parts

    def read(config, place, most):
        reads.append(place)
        if len(reads) == 2:
            raise StoppedError("killed")
        return real(config, place, most)

    monkeypatch.setattr(module, "read_parts", read)
    with pytest.raises(StoppedError):
        prepared(inputs, model, tmp_path / "again")
    assert (tmp_path / "again" / "unfinished" / "piece-00000.json").exists()
    assert "was begun with" in message(prepared, inputs, model, tmp_path / "again", query_prompt="x")
    assert prepared(inputs, model, tmp_path / "again") == whole
    assert reads == [str(names[n]) for n in (0, 1, 1, 2)]
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")
    assert prepared(inputs, model, tmp_path / "again") == whole and len(reads) == 4  # it is complete


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_bytes(model, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(module.__file__).parents[3]))
    inputs = ",".join(str(write_jsonl(tmp_path / f"{n}.jsonl", pairs(30, n))) for n in range(4))
    for workers in (1, 3):
        prepared(inputs, model, tmp_path / str(workers), num_workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_pairs_in_a_bucket(model, tmp_path, bucket):
    """Tables are read from there, and pairs are written there, the manifest last, and read again."""
    source = write_jsonl(tmp_path / "a.jsonl", pairs(12))
    to_place(f"{bucket}/a.jsonl").write_bytes(source.read_bytes())
    manifest = prepared(f"{bucket}/a.jsonl", model, f"{bucket}/pairs")
    assert prepared(f"{bucket}/a.jsonl", model, f"{bucket}/pairs")["identity"] == manifest["identity"]
    _, (one, other) = both(source, f"{bucket}/pairs", model)
    assert_same_rows(one, other)


def refused(inputs, **options):
    def make(model, folder):
        places = ",".join(str(folder / each) for each in inputs.split(","))
        return message(prepared, places, model, folder / "out", **options)

    return make


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (refused("a.jsonl,a2/a.jsonl"), "are not a name of its own for each of 2 inputs; give --names"),
        (refused("a.jsonl", weights=[0.0]), "not a number above 0 for each of 1 inputs"),
        (refused("a.jsonl", weights=[1.0, 2.0]), "not a number above 0 for each of 1 inputs"),
        (refused("a.jsonl,graded.tsv"), "graded.tsv has graded pairs; prepare them apart"),
        (refused("nothing.jsonl"), "nothing.jsonl' is neither a file nor a directory"),
        (refused("changes.jsonl"), "changes.jsonl:3: from here on the columns are 'anchor', 'positive', 'negative'"),
        (refused("same.jsonl"), "have the same positive"),
        (refused("a.jsonl", query_prompt="ban " * 20), "leaves no room for a text after it"),
        (refused("empty.jsonl"), "empty.jsonl has no example; leave it out"),
    ],
)
def test_what_cannot_be_prepared_is_named(model, tmp_path, monkeypatch, ask, said):
    monkeypatch.setattr(module, "_EXAMPLES_AT_ONCE", 2)
    plain = pairs(4, negatives=0)
    write_jsonl(tmp_path / "a.jsonl", plain)
    (tmp_path / "a2").mkdir()
    write_jsonl(tmp_path / "a2" / "a.jsonl", plain)
    (tmp_path / "graded.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t1\n")
    write_jsonl(tmp_path / "changes.jsonl", [*plain[:2], pairs(3)[2]])
    write_jsonl(tmp_path / "same.jsonl", [row | {"positive": "gen"} for row in plain])
    (tmp_path / "empty.jsonl").write_text("\n")
    found = ask(model, tmp_path)
    assert said in found and "\n" not in found
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "prompt", "said"),
    [
        ({"max_seq_length": 32}, "", "was prepared with max_seq_length 16, and the run has 32"),
        ({}, "the ", "was prepared with query_prompt '', and the run has 'the '"),
    ],
)
def test_a_run_has_the_settings_of_its_pairs(model, tmp_path, settings, prompt, said):
    prepared(write_jsonl(tmp_path / "a.jsonl", pairs(5)), model, tmp_path / "out")
    embedding = EmbeddingConfig(query_prompt=prompt)
    task = make_task(TaskConfig(**({"name": "embeddings", "max_seq_length": 16} | settings), embedding=embedding))
    assert said in message(task.read, str(tmp_path / "out"), "train")


def test_what_is_no_pairs_or_damaged_is_named(model, tmp_path):
    task = make_task(TaskConfig(name="embeddings", max_seq_length=16))
    out = tmp_path / "out"
    prepared(write_jsonl(tmp_path / "a.jsonl", pairs(5)), model, out)
    dev = write_jsonl(tmp_path / "dev.jsonl", pairs(3, negatives=0))
    assert task.read(f"{out}", "dev") == [] and len(task.read(f"{out},{dev}", "dev")) == 3
    assert "is prepared to train on; give a table as dev" in message(task.read, f"{dev},{out}", "dev")
    tokenizer = load_pretrained(model).tokenizer
    found = task.read(str(out), "train")
    manifest = json.loads((out / "manifest.json").read_text())
    for name, value, said in (
        ("sources", [{"name": "a", "rows": 6, "weight": 0.0}], "has 6 rows, and its files others"),
        ("sources", [], "sources"),
        ("graded", "no", "graded"),
        ("format", "bert_jax rows", "does not describe 'bert_jax pairs'; it is for pre-training"),
    ):
        (out / "manifest.json").write_text(json.dumps(manifest | {name: value}))
        assert said in message(lambda: task.read(str(out), "train").rows)
    (out / "manifest.json").write_text(json.dumps(manifest | {"format": "of somebody else"}))
    assert "has no file such as" in message(task.read, str(out), "train")  # a directory as any
    (out / "manifest.json").write_text(json.dumps(manifest))
    found.tokenizer = "0" * 64
    assert "prepare the pairs with the model's" in message(task.make_rows, found, tokenizer, True)
    with open(out / "lengths.npy", "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x07")
    assert "lengths.npy" in message(task.read, str(out), "train")


# Several sources


def test_weights_divide_an_epoch_over_the_sources():
    mix = mix_by_weights((10, 5, 25), (1.0, 1.0, 2.0))
    assert mix == Mix((10, 5, 25), (10, 10, 20)) and mix.num_steps(16) == 3 and not mix.is_plain
    batches = [plan_epoch(np.ones(40), 16, 7, epoch, False, mix) for epoch in range(5)]
    assert [len(batch) for batch in batches[0]] == [16, 16, 8]
    taken = [np.concatenate(epoch) for epoch in batches]
    for rows in taken:
        assert np.histogram(rows, (0, 10, 15, 40))[0].tolist() == [10, 10, 20]
    # each source goes through all of its rows before any comes again
    counts = np.bincount(np.concatenate(taken), minlength=40)
    assert set(counts[:10]) == {5} and set(counts[10:15]) == {10} and set(counts[15:]) == {4}
    again = [plan_epoch(np.ones(40), 16, 7, 3, False, mix), plan_epoch(np.ones(40), 16, 8, 3, False, mix)]
    assert all((one == other).all() for one, other in zip(again[0], batches[3]))
    assert not all((one == other).all() for one, other in zip(*again))


@pytest.mark.parametrize("bucket", [False, True])
@pytest.mark.parametrize("weights", [(), (1.0, 3.0)])
def test_batches_of_one_source(bucket, weights):
    mix = mix_by_weights((30, 50), weights, apart=True)
    batches = plan_epoch(np.random.default_rng(0).integers(3, 9, 80), 8, 0, 1, bucket, mix)
    assert len(batches) == mix.num_steps(8) == 11
    of = [set((batch >= 30).tolist()) for batch in batches]
    assert all(len(each) == 1 for each in of)
    rows = np.concatenate(batches)
    assert [(rows < 30).sum(), (rows >= 30).sum()] == ([20, 60] if weights else [30, 50])
    order = [each == {True} for each in of]
    assert order != sorted(order)  # they are mixed


def test_sources_are_kept_apart_in_training(model, tmp_path):
    files = [write_jsonl(tmp_path / f"{n}.jsonl", pairs(20 + n, n)) for n in range(2)]
    prepared(f"{files[0]},{files[1]}", model, tmp_path / "pairs", weights=[1.0, 3.0], names=["one", "two"])
    task = make_task(TaskConfig(name="embeddings", max_seq_length=16))
    rows = task.make_rows(task.read(str(tmp_path / "pairs"), "train"), load_pretrained(model).tokenizer, True).rows
    data = FinetuneDataConfig(path="x", batch_size=4, source_batches=True)
    batching = choose_batching(rows, data, ModelConfig(), 1, "off", 10, True)
    assert batching.mix == Mix((20, 21), (10, 31), True) and batching.num_steps(41) == 3 + 8
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    alone = list(itertools.islice(train_batches(rows, EMBEDDINGS, 0, batching, mesh), 11))
    assert sorted(int((batch.labels.numbers[:, 0] >= 0).sum()) for batch in alone) == [2, 3] + [4] * 9
    table = task.make_rows(task.read(str(files[0]), "train"), load_pretrained(model).tokenizer, True).rows
    assert "these data have one; leave it out" in message(
        choose_batching, table, data, ModelConfig(), 1, "off", 10, True
    )


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("bucket", [False, True])
@pytest.mark.parametrize("weights", [(), (1.0, 3.0)])
def test_streamed_sources_are_mixed_in_their_own_orders(apart, bucket, weights):
    """An epoch has the rows of its mix, each source goes on where the epoch before ended, and any step can be first."""
    counts = (30, 50)
    mix, lengths = mix_by_weights(counts, weights, apart), np.random.default_rng(0).integers(3, 60, 80)
    asked = []

    def take(source):
        def rows(begin, end):
            asked.append((source, begin, end))
            return np.arange(begin, end) % counts[source]

        return rows

    def plan():
        return StreamedPlan(mix, lengths, 8, 1, bucket, [take(0), take(1)])

    steps, whole = mix.num_steps(8), plan()
    epochs = [[whole.at(epoch * steps + step) for step in range(steps)] for epoch in range(2)]
    for source in (0, 1):  # each place once, in order
        own = [each[1:] for each in asked if each[0] == source]
        assert own[0][0] == 0 and all(one[1] == other[0] for one, other in itertools.pairwise(own))
        assert own[-1][1] == 2 * mix.drawn[source]
    for batches in epochs:
        rows = np.concatenate(batches)
        assert [(rows < 30).sum(), (rows >= 30).sum()] == list(mix.drawn)
        assert sorted(map(len, batches))[2:] == [8] * (steps - 2)
        if apart:
            assert all(len(set((batch >= 30).tolist())) == 1 for batch in batches)
            of = [bool(batch[0] >= 30) for batch in batches]
            assert of != sorted(of)
    again = plan()
    for step in (2 * steps - 1, 3, steps):
        np.testing.assert_array_equal(again.at(step), epochs[step // steps][step % steps])
    for source in (False, True) if apart else (None,):  # two batches that follow one another are made together
        for first in range(0, steps, 2):
            own = [lengths[batch] for batch in epochs[0][first : first + 2] if source in (None, batch[0] >= 30)]
            own.sort(key=lambda each: (each.max(), each.min()))
            assert not bucket or all(one.max() <= other.min() for one, other in itertools.pairwise(own))


def test_pairs_are_streamed_from_a_bucket(model, tmp_path, bucket, monkeypatch):
    """The batches are those of the same order on this disk, and no shard is copied."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 400)
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    files = [write_jsonl(tmp_path / f"{n}.jsonl", pairs(40 + 9 * n, n)) for n in range(2)]
    local = tmp_path / "pairs"
    prepared(f"{files[0]},{files[1]}", model, local, weights=[2.0, 1.0])
    prepared(f"{files[0]},{files[1]}", model, f"{bucket}/pairs", weights=[2.0, 1.0])
    task = make_task(TaskConfig(name="embeddings", max_seq_length=16))
    tokenizer, mesh = load_pretrained(model).tokenizer, make_mesh(MeshConfig(), jax.devices()[:2])
    found, kept = [], []
    for place in (f"{bucket}/pairs", str(local)):
        examples = task.read(place, "train")
        data = FinetuneDataConfig(path=place, batch_size=8, seed=3, stream="on", window_mb=0.002, cache_gb=1.6e-5)
        examples.as_set(data)
        rows = task.make_rows(examples, tokenizer, True).rows
        assert len(rows.streams) == 2 and len(rows) == 89
        batching = choose_batching(rows, data, ModelConfig(), 2, "on", 100, True)
        batches = train_batches(rows, EMBEDDINGS, 3, batching, mesh)
        found.append([jax.device_get(next(batches)) for _ in range(20)])
        kept.append(rows)
    for one, other in zip(*found):
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert not list((tmp_path / "cache").rglob("train-*"))
    assert kept[0][7].label[0] == kept[1][7].label[0]
    for rows in kept:
        rows.close()


def test_rows_with_scores_of_a_teacher_have_a_fingerprint():
    row = Row(0, np.arange(6, dtype=np.int32), np.zeros(6, np.uint8), (2, 2, 2), ((1.0, -2.0), 0, 1, 2))
    other = row._replace(label=((1.0, -2.5), 0, 1, 2))
    assert fingerprint([row]) == fingerprint([row]) != fingerprint([other])
