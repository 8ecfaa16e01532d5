# SPDX-License-Identifier: Apache-2.0
"""Prepared pairs are the rows of the tables that they were made of; and batches of several sources."""

import dataclasses
import gzip
import itertools
import json
import os
import random
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from builders import first_batches, message, tokens_at, tokens_of, write

from bert_jax.batch import Row
from bert_jax.batches.order import Mix, StreamedPlan, mix_by_weights, plan_epoch
from bert_jax.batches.pack import StoredRows
from bert_jax.batches.shapes import needed_flops
from bert_jax.data import blocks
from bert_jax.errors import StoppedError
from bert_jax.model.heads.embedding import EMBEDDINGS
from bert_jax.model.heads.ranking import RANKING
from bert_jax.settings.finetuning import EmbeddingConfig, FinetuneDataConfig, RankingConfig, TaskConfig
from bert_jax.settings.model import ModelConfig
from bert_jax.storage.files import sha256_file
from bert_jax.storage.places import to_place
from bert_jax.tasks.candidates import CandidateRows
from bert_jax.tasks.catalog import make_task
from bert_jax.tasks.embeddings import prepare as module
from bert_jax.tasks.embeddings.prepare import PairOptions, prepare_pairs
from bert_jax.tasks.prepare import fingerprint

WORDS = ("ban", "bes", "kut", "dar", "lin", "mot", "the", "gen")
TASK = TaskConfig(name="embeddings", max_seq_length=16)


def text(rng, most):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def pairs(count, seed=0):
    """Returns pairs with up to two hard negatives, of which some texts are equal, and some too long."""
    rng = random.Random(seed)
    return [
        {"anchor": text(rng, 3), "positive": text(rng, 20), "negative": [text(rng, 6) for _ in range(number % 3)]}
        for number in range(count)
    ]


PLAIN = [{"anchor": f"ban {word}", "positive": word} for word in WORDS[:4]]


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def prepared(pretrained):
    """Returns the manifest of pairs that it prepares."""

    def prepared(inputs, output, names=(), weights=(), num_workers=1, **options):
        options = PairOptions(**({"max_seq_length": 16} | options))
        tokenizer = str(pretrained / "tokenizer")
        return prepare_pairs(str(inputs), tokenizer, str(output), options, names, weights, num_workers)

    return prepared


@pytest.fixture
def rows_of(bert):
    """Returns the rows of tables, or of prepared pairs."""

    def rows_of(place, task=None):
        task = task or make_task(TASK)
        examples = task.read(str(place), "train")
        task.settle(examples)
        return task.make_rows(examples, bert.tokenizer, True).rows

    return rows_of


def assert_same_rows(one, other):
    assert len(one) == len(other) > 0 and isinstance(other, StoredRows)
    hashes = other._rows.gather(np.arange(len(other)))["texts"].tolist()
    texts = set()  # as each has numbered them
    for number, (mine, stored, own) in enumerate(zip(one, other, hashes)):
        assert stored.example == number and stored.lengths == mine.lengths
        np.testing.assert_array_equal(stored.label[0], np.float32(mine.label[0]))  # as batches have it
        np.testing.assert_array_equal(stored.token_ids, mine.token_ids)
        texts |= {*zip(mine.label[1:], own)}
    assert all(len(set(numbers)) == len(texts) for numbers in zip(*texts))


def table_of(folder, kind):
    """Returns the place of 40 pairs in a form; of NLI three times as many, of which a third are entailed."""
    rows, place = pairs(120 if kind == "nli.jsonl" else 40), folder / f"train.{kind}"
    two = [(str(number), row["anchor"], row["positive"]) for number, row in enumerate(rows)]
    if kind == "parquet":
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        pyarrow.parquet.write_table(pyarrow.table(columns), place)
    elif kind == "jsonl.gz":
        write(place, gzip.compress(jsonl(rows).encode()))
    elif kind == "graded.tsv":
        lines = [f"{anchor}\t{positive}\t{len(anchor) / 7}\n" for _, anchor, positive in two]
        write(place, "sentence1\tsentence2\tscore\n" + "".join(lines))
    elif kind == "nli.jsonl":
        labels = itertools.cycle(("entailment", "neutral", "contradiction"))
        write(place, jsonl({"premise": a, "hypothesis": p, "label": next(labels)} for _, a, p in two))
    elif kind == "txt":
        write(place, "".join(f"{positive}\n" for _, _, positive in two))
    else:
        write(place / "corpus.jsonl", jsonl({"_id": f"d{name}", "title": "the", "text": p} for name, _, p in two))
        write(place / "queries.jsonl", jsonl({"_id": name, "text": a} for name, a, _ in two))
        judged = "".join(f"{name}\td{name}\t1\n{name}\td7\t1\n" for name, _, _ in two)
        write(place / "qrels" / "train.tsv", f"query-id\tcorpus-id\tscore\n{judged}")
    return place


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet", "graded.tsv", "nli.jsonl", "txt", "beir"])
def test_rows_are_those_of_the_table(prepared, rows_of, tmp_path, monkeypatch, kind):
    """Read in parts of seven examples, and written in shards of a few rows that begin within files."""
    monkeypatch.setattr(module, "_EXAMPLES_AT_ONCE", 7)
    monkeypatch.setattr(module, "_ROWS_AT_ONCE", 3)
    monkeypatch.setattr(module, "SHARD_BYTES", 700)
    table = table_of(tmp_path, kind)
    prompts = {"query_prompt": "the ", "passage_prompt": "gen: "}
    manifest = prepared(table, tmp_path / "pairs", **prompts)
    assert len(manifest["splits"]["train"]["shards"]) > 2 and not (tmp_path / "pairs" / "unfinished").exists()
    assert manifest["graded"] == (kind == "graded.tsv") and manifest["alone"] == (kind == "txt")
    task = make_task(dataclasses.replace(TASK, embedding=EmbeddingConfig(**prompts)))
    one, other = rows_of(table, task), rows_of(tmp_path / "pairs", task)
    assert_same_rows(one, other)
    assert needed_flops(ModelConfig(), one) == needed_flops(ModelConfig(), other)
    assert other[-1].lengths == one[-1].lengths and [row.example for row in other[3:5]] == [3, 4]


@pytest.fixture
def taught(tmp_path):
    rng = np.random.default_rng(0)
    rows = [row | {"scores": rng.normal(size=1 + len(row["negative"])).tolist()} for row in pairs(20)]
    rows[4] |= {"anchor": "ban " * 12, "positive": "kut " * 20}  # both are cut
    return rows


def test_scores_of_a_teacher(prepared, rows_of, tmp_path, taught):
    table = write(tmp_path / "train.jsonl", jsonl(taught))
    manifest = prepared(table, tmp_path / "pairs")
    assert manifest["taught"] and manifest["smallest_score"] < 0 < manifest["largest_score"]
    task = make_task(dataclasses.replace(TASK, embedding=EmbeddingConfig(loss="margin_mse")))
    one = rows_of(table, task)
    assert_same_rows(one, rows_of(tmp_path / "pairs", task))
    assert len(one[2].label[0]) == 3


def reranking(loss):
    return make_task(TaskConfig(name="reranking", max_seq_length=16, ranking=RankingConfig(loss=loss)))


@pytest.mark.parametrize("loss", ["mse", "softmax"])
def test_candidates_of_a_reranker(prepared, bert, tmp_path, taught, loss):
    """Those of the table: queries without negatives are left out of both."""
    rows = taught if loss == "mse" else pairs(20)
    prepared(write(tmp_path / "train.jsonl", jsonl(rows)), tmp_path / "pairs")
    task, tokenizer = reranking(loss), bert.tokenizer.cutting_as_hub()
    found = task.read(str(tmp_path / "pairs"), "train")
    assert task.settle(found) == task.config
    stored = task.make_rows(found, tokenizer, True).rows
    read = task.read(str(tmp_path / "train.jsonl"), "train")
    wanted = task.make_rows(read, tokenizer, True).rows
    assert isinstance(stored, CandidateRows) and len(stored) == len(wanted) == 13
    assert read.counts["skipped: all candidates alike"] == stored.num_left_out == 7
    for mine, theirs, lengths in zip(wanted, stored, stored.lengths.tolist()):
        assert mine.example == theirs.example
        assert mine.lengths == theirs.lengths == tuple(filter(None, lengths))
        np.testing.assert_array_equal(mine.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(mine.type_ids, theirs.type_ids)
        np.testing.assert_array_equal(theirs.label, np.float32(mine.label))


GRADED = [{"sentence1": f"ban {word}", "sentence2": word, "score": len(word)} for word in WORDS[:4]]


@pytest.mark.parametrize(
    ("kinds", "loss", "said"),
    [
        (["taught"], "bce", "is not from 0 to 1"),
        (["plain"], "softmax", "has no hard"),
        (["taught", "mined"], "mse", "has a teacher's scores of some queries, and none of others"),
        (
            ["graded"],
            "listnet",
            "has graded pairs, a candidate for each query, and ranking.loss listnet compares several",
        ),
        (["mined", "plain"], "softmax", "no query of plain has a hard negative"),
    ],
)
def test_what_a_reranker_cannot_learn_is_named(prepared, bert, tmp_path, taught, kinds, loss, said):
    rows = {"taught": taught, "plain": PLAIN, "mined": pairs(9), "graded": GRADED}
    places = [write(tmp_path / f"{kind}.jsonl", jsonl(rows[kind])) for kind in kinds]
    prepared(",".join(places), tmp_path / "pairs")
    task = reranking(loss)

    def run():
        found = task.read(str(tmp_path / "pairs"), "train")
        task.settle(found)
        task.make_rows(found, bert.tokenizer.cutting_as_hub(), True)

    assert said in message(run)


def test_graded_pairs_are_learnt_one_by_one(prepared, bert, tmp_path):
    prepared(write(tmp_path / "graded.jsonl", jsonl(GRADED)), tmp_path / "pairs")
    task, tokenizer = reranking("mse"), bert.tokenizer.cutting_as_hub()
    found = task.read(str(tmp_path / "pairs"), "train")
    assert task.settle(found) == task.config
    rows = task.make_rows(found, tokenizer, True).rows
    assert [row.label for row in rows] == [(0.0, 3.0)] * 4


def test_a_reranker_has_no_prompts(prepared, tmp_path):
    prepared(write(tmp_path / "a.jsonl", jsonl(pairs(5))), tmp_path / "pairs", query_prompt="ban ")
    for prompt in ("", "ban "):
        task = make_task(dataclasses.replace(reranking("mse").config, embedding=EmbeddingConfig(query_prompt=prompt)))
        said = (
            "with query_prompt 'ban ', and the run has ''; prepare it again with --query_prompt='', as a reranker has"
        )
        assert said in message(task.read, str(tmp_path / "pairs"), "train")


@pytest.mark.parametrize(("pack", "bucket"), [("on", True), ("off", True), ("off", False)])
def test_batches_are_those_of_the_table(prepared, rows_of, tmp_path, pack, bucket):
    rows = pairs(90)
    files = [write(tmp_path / name, jsonl(part)) for name, part in (("a.jsonl", rows[:31]), ("b.jsonl", rows[31:]))]
    table = write(tmp_path / "all.jsonl", jsonl(rows))
    prepared(",".join(files), tmp_path / "pairs")
    data = FinetuneDataConfig(batch_size=8, bucket=bucket, seed=3)
    same = {"mix": None, "lengths": ()} if pack == "on" else {"mix": None}
    (one, found), (other, again) = (
        first_batches(rows_of(place), EMBEDDINGS, data, 4, pack=pack, first=10) for place in (table, tmp_path / "pairs")
    )
    assert dataclasses.replace(one, **same) == dataclasses.replace(other, **same)
    for mine, stored in zip(found, again):
        numbers = [np.ravel(batch.labels.numbers) for batch in (mine, stored)]  # of equal texts, and below 0 of none
        np.testing.assert_array_equal(*(each[:, None] == each for each in numbers))
        np.testing.assert_array_equal(*(each < 0 for each in numbers))
        stored = stored._replace(labels=stored.labels._replace(numbers=mine.labels.numbers))
        jax.tree.map(np.testing.assert_array_equal, mine, stored)


def contents(folder):
    return {path.name: sha256_file(path) for path in folder.iterdir() if path.is_file()}


def test_a_stopped_run_goes_on_and_ends_with_the_same_bytes(prepared, tmp_path, monkeypatch):
    names = [write(tmp_path / f"{n}.jsonl", jsonl(pairs(20, n))) for n in range(3)]
    inputs = ",".join(names)
    whole = prepared(inputs, tmp_path / "whole")
    reads, real = [], module.read_parts

    def read(config, place, most):
        reads.append(place)
        if len(reads) == 2:
            raise StoppedError("killed")
        return real(config, place, most)

    monkeypatch.setattr(module, "read_parts", read)
    with pytest.raises(StoppedError):
        prepared(inputs, tmp_path / "again")
    assert (tmp_path / "again" / "unfinished" / "piece-00000.json").exists()
    assert "was begun with" in message(prepared, inputs, tmp_path / "again", query_prompt="x")
    assert prepared(inputs, tmp_path / "again") == whole
    assert reads == [names[n] for n in (0, 1, 1, 2)]
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")
    assert prepared(inputs, tmp_path / "again") == whole and len(reads) == 4  # it is complete


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_bytes(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(module.__file__).parents[3]))
    inputs = ",".join(write(tmp_path / f"{n}.jsonl", jsonl(pairs(30, n))) for n in range(4))
    for workers in (1, 3):
        prepared(inputs, tmp_path / str(workers), num_workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_pairs_in_a_bucket(prepared, rows_of, tmp_path, bucket):
    """Tables are read from there, and pairs are written there, the manifest last, and read again."""
    table = write(tmp_path / "a.jsonl", jsonl(pairs(12)))
    to_place(f"{bucket}/a.jsonl").write_bytes(Path(table).read_bytes())
    manifest = prepared(f"{bucket}/a.jsonl", f"{bucket}/pairs")
    assert prepared(f"{bucket}/a.jsonl", f"{bucket}/pairs")["identity"] == manifest["identity"]
    assert_same_rows(rows_of(table), rows_of(f"{bucket}/pairs"))


@pytest.mark.parametrize(
    ("inputs", "options", "said"),
    [
        ("a.jsonl,a2/a.jsonl", {}, "are not a name of its own for each of 2 inputs; give --names"),
        ("a.jsonl", {"weights": [0.0]}, "not a number above 0 for each of 1 inputs"),
        ("a.jsonl", {"weights": [1.0, 2.0]}, "not a number above 0 for each of 1 inputs"),
        ("a.jsonl,graded.tsv", {}, "graded.tsv has graded pairs; prepare them apart"),
        ("nothing.jsonl", {}, "nothing.jsonl' is neither a file nor a directory"),
        ("changes.jsonl", {}, "changes.jsonl:3: from here on the columns are 'anchor', 'positive', 'negative'"),
        ("same.jsonl", {}, "have the same positive"),
        ("a.jsonl", {"query_prompt": "ban " * 20}, "leaves no room for a text after it"),
        ("empty.jsonl", {}, "empty.jsonl has no example; leave it out"),
        (",", {}, "input ',' names no pairs"),
        ("a.jsonl,empty.tsv", {}, "empty.tsv has no example; leave it out"),
        ("a.jsonl,b.jsonl", {"weights": [1.0, 0.01]}, "weight 0.01 of b is less than an example of 8 in an epoch"),
        ("large.jsonl", {}, "large.jsonl:1 has 4502 texts of 72032 tokens, and a row holds 65535"),
    ],
)
def test_what_cannot_be_prepared_is_named(prepared, tmp_path, monkeypatch, inputs, options, said):
    monkeypatch.setattr(module, "_EXAMPLES_AT_ONCE", 2)
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.jsonl", "a2/a.jsonl"):
        write(tmp_path / name, jsonl(PLAIN))
    write(tmp_path / "graded.tsv", "sentence1\tsentence2\tscore\na\tb\t1\n")
    write(tmp_path / "changes.jsonl", jsonl([*PLAIN[:2], pairs(3)[2]]))
    write(tmp_path / "same.jsonl", jsonl(row | {"positive": "gen"} for row in PLAIN))
    write(tmp_path / "empty.jsonl", "\n")
    write(tmp_path / "empty.tsv", "query\tpositive\na\t\n\tb\n")
    write(
        tmp_path / "large.jsonl",
        jsonl([{"anchor": "ban " * 20, "positive": "bes " * 20, "negative": ["kut " * 20] * 4500}]),
    )
    assert said in message(prepared, inputs, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_directories_of_any_name_and_files_of_squad(prepared, tmp_path, capsys):
    """Rows without a text are told; and a file of one pair is no mistake in the columns."""
    folder = tmp_path / "my [1], data"
    place = write(folder / "train.jsonl", jsonl([*PLAIN[:1], {"anchor": "ban", "positive": " "}]))
    for source in (folder, place):
        assert prepared(source, tmp_path / f"of {Path(source).name}", names=["one"])["figures"]["examples"] == 1
        assert "skipped: a text is empty: 1" in capsys.readouterr().err
    parts = tmp_path / "parts [2]"
    for number in range(2):
        write(parts / "a", "")
        table = pyarrow.table({name: [row[name] for row in PLAIN] for name in PLAIN[0]})
        pyarrow.parquet.write_table(table, parts / f"train-{number:05d}-of-00002.parquet")
    assert prepared(parts, tmp_path / "of_parts", names=["parts"])["figures"]["examples"] == 8
    paragraphs = [{"context": word, "qas": [{"id": word, "question": "ban"}]} for word in WORDS[:3]]
    write(tmp_path / "squad/train-v1.1.json", json.dumps({"data": [{"paragraphs": paragraphs}]}))
    assert prepared(tmp_path / "squad", tmp_path / "of_squad")["sources"][0] == {
        "name": "squad",
        "rows": 3,
        "weight": 0.0,
    }


@pytest.mark.parametrize("kind", ["nli.jsonl", "txt", "jsonl.gz"])
def test_a_file_is_prepared_whatever_its_name(prepared, tmp_path, kind):
    whole = prepared(table_of(tmp_path, kind), tmp_path / "train", names=["one"])
    (tmp_path / f"train.{kind}").rename(tmp_path / f"dev.{kind}")
    assert prepared(tmp_path / f"dev.{kind}", tmp_path / "dev", names=["one"])["splits"] == whole["splits"]


def test_pairs_may_be_made_in_the_directory_of_their_corpus(prepared, tmp_path, capsys):
    table_of(tmp_path, "beir")
    for _ in range(2):
        prepared(tmp_path / "train.beir", tmp_path / "train.beir" / "pairs")
    assert "is already complete" in capsys.readouterr().err


@pytest.fixture
def out(prepared, tmp_path):
    """A directory of prepared pairs."""
    prepared(write(tmp_path / "a.jsonl", jsonl(pairs(5))), tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_seq_length": 32}, "was prepared with max_seq_length 16, and the run has 32"),
        ({"embedding": EmbeddingConfig(query_prompt="the ")}, "with query_prompt '', and the run has 'the '"),
    ],
)
def test_a_run_has_the_settings_of_its_pairs(out, settings, said):
    task = make_task(dataclasses.replace(TASK, **settings))
    assert said in message(task.read, str(out), "train")


def test_prepared_pairs_are_to_train_on_with_their_tokenizer(out, tmp_path, bert):
    task, dev = make_task(TASK), write(tmp_path / "dev.jsonl", jsonl(PLAIN))
    assert task.read(f"{out}", "dev") == [] and len(task.read(f"{out},{dev}", "dev")) == 4
    assert "is prepared to train on; give a table as dev" in message(task.read, f"{dev},{out}", "dev")
    found = task.read(str(out), "train")
    found.tokenizer = "0" * 64
    assert "prepare the pairs with the model's" in message(task.make_rows, found, bert.tokenizer, True)
    with open(out / "lengths.npy", "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x07")
    assert "lengths.npy" in message(task.read, str(out), "train")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("sources", [{"name": "a", "rows": 6, "weight": 0.0}], "has 6 rows, and its files others"),
        ("sources", [], "sources"),
        ("graded", "no", "graded"),
        ("format", "bert_jax rows", "does not describe 'bert_jax pairs'; it is for pre-training"),
        ("format", "of somebody else", "has no file such as"),  # a directory as any
    ],
)
def test_what_is_no_pairs_is_named(out, name, value, said):
    manifest = json.loads((out / "manifest.json").read_text())
    write(out / "manifest.json", json.dumps(manifest | {name: value}))
    assert said in message(lambda: make_task(TASK).read(str(out), "train").rows)


# Several sources


def test_weights_divide_an_epoch_over_the_sources():
    mix = mix_by_weights((10, 5, 25), (1.0, 1.0, 2.0))
    assert mix == Mix((10, 5, 25), (10, 10, 20)) and mix.num_steps(16) == 3 and not mix.is_plain
    epochs = [plan_epoch(np.ones(40), 16, 7, epoch, False, mix) for epoch in range(5)]
    assert [len(batch) for batch in epochs[0]] == [16, 16, 8]
    taken = np.array([np.concatenate(batches) for batches in epochs])
    assert [np.histogram(rows, (0, 10, 15, 40))[0].tolist() for rows in taken] == [[10, 10, 20]] * 5
    # each source goes through all of its rows before any comes again
    assert np.bincount(taken.ravel()).tolist() == [5] * 10 + [10] * 5 + [4] * 25
    again, other = (np.concatenate(plan_epoch(np.ones(40), 16, seed, 3, False, mix)) for seed in (7, 8))
    assert (again == taken[3]).all() and (again != other).any()


def are_apart(batches):
    """Returns whether each batch has rows of one source, of which the second begins at 30, in no order."""
    of = [set((batch >= 30).tolist()) for batch in batches]
    return all(len(each) == 1 for each in of) and of != sorted(of, key=max)


@pytest.mark.parametrize("bucket", [False, True])
@pytest.mark.parametrize(("weights", "counts"), [((), [30, 50]), ((1.0, 3.0), [20, 60])])
def test_batches_of_one_source(bucket, weights, counts):
    mix = mix_by_weights((30, 50), weights, apart=True)
    batches = plan_epoch(np.random.default_rng(0).integers(3, 9, 80), 8, 0, 1, bucket, mix)
    assert len(batches) == mix.num_steps(8) == 11 and are_apart(batches)
    assert np.histogram(np.concatenate(batches), (0, 30, 80))[0].tolist() == counts


def test_sources_are_kept_apart_in_training(prepared, rows_of, tmp_path):
    files = [write(tmp_path / f"{n}.jsonl", jsonl(pairs(20 + n, n))) for n in range(2)]
    prepared(",".join(files), tmp_path / "pairs", weights=[1.0, 3.0], names=["one", "two"])
    more = FinetuneDataConfig(batch_size=4, source_batches=True), 11, 1, "off"
    batching, batches = first_batches(rows_of(tmp_path / "pairs"), EMBEDDINGS, *more)
    assert batching.mix == Mix((20, 21), (10, 31), True) and batching.num_steps(41) == 3 + 8
    assert sorted((batch.labels.numbers[:, 0] >= 0).sum() for batch in batches) == [2, 3] + [4] * 9
    assert "these data have one; leave it out" in message(first_batches, rows_of(files[0]), EMBEDDINGS, *more)


@pytest.mark.parametrize(
    ("apart", "bucket", "weights"),
    [
        (False, False, ()),
        (False, True, (1.0, 3.0)),
        (True, False, (1.0, 3.0)),
        (True, True, ()),
        (True, True, (1.0, 3.0)),
    ],
)
def test_streamed_sources_are_mixed_in_their_own_orders(apart, bucket, weights):
    """An epoch has the rows of its mix, each source goes on where the epoch before ended, and any step can be first."""
    mix, lengths = mix_by_weights((30, 50), weights, apart), np.random.default_rng(0).integers(3, 60, 80)
    take = [lambda begin, end: np.arange(begin, end) % 30, lambda begin, end: np.arange(begin, end) % 50]
    plan, again = (StreamedPlan(mix, lengths, 8, 1, bucket, take) for _ in range(2))
    steps = mix.num_steps(8)
    batches = [plan.at(step) for step in range(2 * steps)]
    for step in (2 * steps - 1, 3, steps):
        np.testing.assert_array_equal(again.at(step), batches[step])
    one, other = (2 * drawn for drawn in mix.drawn)
    whole = np.concatenate([np.arange(one) % 30, 30 + np.arange(other) % 50])  # in two epochs
    assert np.bincount(np.concatenate(batches)).tolist() == np.bincount(whole).tolist()
    for epoch in (batches[:steps], batches[steps:]):
        assert np.histogram(np.concatenate(epoch), (0, 30, 80))[0].tolist() == list(mix.drawn)
        assert sorted(map(len, epoch))[2:] == [8] * (steps - 2)
        assert not apart or are_apart(epoch)
    for second in (False, True) if apart else (None,):  # two batches that follow one another are made together
        for first in range(0, steps, 2):
            own = [lengths[batch] for batch in batches[:steps][first : first + 2] if second in (None, batch[0] >= 30)]
            own.sort(key=lambda each: (each.max(), each.min()))
            assert not bucket or all(one.max() <= other.min() for one, other in itertools.pairwise(own))


def test_pairs_are_streamed_from_a_bucket(prepared, bert, tmp_path, bucket, monkeypatch):
    """The batches are those of the same order on this disk, and no shard is copied."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 400)
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    inputs = ",".join(write(tmp_path / f"{n}.jsonl", jsonl(pairs(40 + 9 * n, n))) for n in range(2))
    task, found, labels = make_task(TASK), [], []
    for place in (f"{bucket}/pairs", str(tmp_path / "pairs")):
        prepared(inputs, place, weights=[2.0, 1.0])
        examples = task.read(place, "train")
        data = FinetuneDataConfig(path=place, batch_size=8, seed=3, stream="on", window_mb=0.002, cache_gb=1.6e-5)
        examples.as_set(data)
        rows = task.make_rows(examples, bert.tokenizer, True).rows
        assert len(rows.streams) == 2 and len(rows) == 89
        found.append(first_batches(rows, EMBEDDINGS, data, 20, first=3)[1])
        labels.append(rows[7].label[0])
        rows.close()
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert not list((tmp_path / "cache").rglob("train-*")) and labels[0] == labels[1]


def test_queries_without_negatives_are_left_out_of_a_stream(prepared, bert, tmp_path, bucket, monkeypatch):
    """An epoch has each other query once, at a URL as on this disk, and windows have blocks with and without any."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 400)
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    rows = [pairs(40), [row for row in pairs(90, 1) if not row["negative"]] + pairs(9, 2)]
    inputs = ",".join(write(tmp_path / f"{n}.jsonl", jsonl(part)) for n, part in enumerate(rows))
    task, tokenizer, found = reranking("softmax"), bert.tokenizer.cutting_as_hub(), []
    for place in (f"{bucket}/pairs", str(tmp_path / "pairs")):
        prepared(inputs, place)
        examples = task.read(place, "train")
        data = FinetuneDataConfig(path=place, batch_size=8, seed=3, stream="on", window_mb=0.004, cache_gb=3e-5)
        examples.as_set(data)
        stored = task.make_rows(examples, tokenizer, True).rows
        assert stored.stretches == (26, 6) and len(stored) == 32 and stored.num_left_out == 47
        batches = first_batches(stored, RANKING, data, 8)[1]  # two epochs
        found.append(batches)
        stored.close()
    jax.tree.map(np.testing.assert_array_equal, *found)
    wanted = Counter(str(tokens_of(row)) for row in stored.take(np.arange(32)))
    for epoch in (found[1][:4], found[1][4:]):
        seen = Counter()
        for batch in epoch:
            for places, _, there in zip(*batch.labels):
                if there.any():
                    seen[str([tokens_at(batch, place) for place in places[there == 1]])] += 1
        assert seen == wanted


def test_a_run_goes_on_with_the_weights_it_began_with(prepared, rows_of, tmp_path):
    inputs = ",".join(write(tmp_path / f"{n}.jsonl", jsonl(pairs(5, n))) for n in range(2))
    found = []
    for number, weights in enumerate(([], [1.0, 1.0], [1.0, 2.0])):
        prepared(inputs, tmp_path / f"out{number}", weights=weights)
        found.append(fingerprint(rows_of(tmp_path / f"out{number}")))
    assert len(set(found)) == 3


def test_rows_with_scores_of_a_teacher_have_a_fingerprint():
    row = Row(0, np.arange(6, dtype=np.int32), np.zeros(6, np.uint8), (2, 2, 2), ((1.0, -2.0), 0, 1, 2))
    other = row._replace(label=((1.0, -2.5), 0, 1, 2))
    assert fingerprint([row]) == fingerprint([row]) != fingerprint([other])
