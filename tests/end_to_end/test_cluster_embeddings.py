# SPDX-License-Identifier: Apache-2.0
"""Embeddings on several real processes: the loss is over the batch of all of them, after a kill too."""

import dataclasses
import random
import signal
from pathlib import Path

import numpy as np
import pytest
from builders import make_learner
from commands import run_python
from processes import finish, start, wait_for_lines

import bert_jax
from bert_jax.storage.places import to_place
from bert_jax.training.report import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return make_learner(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Pairs of which some texts are equal, and hard negatives; the last batch of an epoch is not full."""
    directory, rng = tmp_path_factory.mktemp("pairs"), random.Random(0)
    for name, count in (("train", 52), ("dev", 20)):
        lines = ["anchor\tpositive\tnegative"]
        for _ in range(count):
            topic, other = rng.sample("bdf", 2)
            counts = [(each, rng.randint(1, 4)) for each in (topic, topic, other)]
            texts = (" ".join(f"{each}{rng.choice('aeiou')}n" for _ in range(count)) for each, count in counts)
            lines.append("\t".join(texts))
        (directory / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return directory


def arguments(source, pretrained, workdir, *more, task="embeddings"):
    return [
        "finetune.py",
        f"--config=configs/finetune.py:{task}",
        f"--config.data.source={source}",
        f"--config.init_checkpoint={pretrained}",
        f"--workdir={workdir}",
        "--config.task.max_seq_length=16",
        "--config.data.batch_size=16",
        "--config.optimizer.learning_rate=2e-3",
        "--config.report.every_steps=1",
        "--config.report.tensorboard=False",
        "--config.report.progress=False",
        "--config.checkpoint.every_steps=2",
        *more,
    ]


def records(workdir, kind, name):
    found = {each["step"]: each[name] for each in read_metrics(workdir / "metrics.jsonl") if each["kind"] == kind}
    return [found[step] for step in sorted(found)]


@pytest.fixture(scope="module")
def alone(repository, source, pretrained, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone") / "run"
    finish(start(repository, arguments(source, pretrained, workdir), 1))
    return workdir


def assert_same_run(ours, theirs):
    assert len(records(theirs, "train", "loss")) == 12
    for name, tolerance in (("loss", 2e-3), ("accuracy", 0.07)):
        np.testing.assert_allclose(records(ours, "train", name), records(theirs, "train", name), atol=tolerance)
    np.testing.assert_allclose(records(ours, "eval", "mrr@10"), records(theirs, "eval", "mrr@10"), atol=0.05)


def test_a_guide_sees_the_batch_of_all_processes(repository, source, pretrained, tmp_path):
    """As few steps as two epochs have; the teacher is the model from which training starts."""
    more = (f"--config.teacher.checkpoint={pretrained}-vectors", "--config.task.embedding.loss=gist")
    bert = bert_jax.load_pretrained(pretrained)
    settings = {"task": "sentence_embedding", "task_settings": {"name": "embeddings", "max_seq_length": 16}}
    bert_jax.save_pretrained(dataclasses.replace(bert, **settings), f"{pretrained}-vectors")
    for count in (1, 2):
        workdir = tmp_path / str(count)
        finish(start(repository, arguments(source, pretrained, workdir, *more), count))
    losses = [records(tmp_path / name, "train", "loss") for name in ("1", "2")]
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(*losses, atol=2e-3)


def run_killed_and_again(repository, workdir, command):
    running = start(repository, command, 2)
    wait_for_lines(workdir / "metrics.jsonl", 6, running)
    for process in running:
        process.send_signal(signal.SIGKILL)
    finish(running, -signal.SIGKILL)
    finish(start(repository, command, 2))


@pytest.fixture(scope="module")
def prepared(source, pretrained):
    """The pairs of the table, prepared in two parts by the command."""
    lines = (source / "train.tsv").read_text().splitlines(keepends=True)
    parts = [source / f"part{number}.tsv" for number in range(2)]
    for part, own in zip(parts, (lines[1:20], lines[20:])):
        part.write_text("".join(lines[:1] + own))
    inputs, pairs = ",".join(map(str, parts)), source.parent / "prepared"
    command = ["-m", "bert_jax", "prepare_pairs", f"--input={inputs}", f"--tokenizer={pretrained}/tokenizer"]
    done = run_python([*command, f"--output={pairs}", "--max_seq_length=16", "--workers=1"])
    assert done.returncode == 0 and "  part1: 33" in done.stderr, done.stderr
    return f"{pairs},{source}/dev.tsv"


def test_prepared_pairs_train_as_their_table(repository, prepared, pretrained, alone, tmp_path):
    """One process has the same bits; two, also if they are killed, what two have of a table."""
    finish(start(repository, arguments(prepared, pretrained, tmp_path / "one"), 1))
    for name in ("loss", "accuracy", "grad_norm"):
        assert records(tmp_path / "one", "train", name) == records(alone, "train", name)
    command = arguments(prepared, pretrained, tmp_path / "two", "--config.train.accumulate=2")
    run_killed_and_again(repository, tmp_path / "two", command)
    assert_same_run(tmp_path / "two", alone)
    berts = [bert_jax.load_pretrained(workdir) for workdir in (tmp_path / "two", alone)]
    np.testing.assert_allclose(
        *(bert_jax.sentence_embeddings(bert, ["ban bin", "din dan"]) for bert in berts), atol=0.05
    )


def test_pairs_are_streamed_by_two_processes_that_were_killed(repository, prepared, pretrained, bucket, tmp_path):
    """From a bucket, in the order in which one process streams them from its disk."""
    pairs, dev = prepared.split(",")
    more = "--config.data.stream=on", "--config.data.window_mb=0.01"
    finish(start(repository, arguments(prepared, pretrained, tmp_path / "one", *more), 1))
    for path in filter(Path.is_file, Path(pairs).rglob("*")):
        to_place(f"{bucket}/pairs/{path.relative_to(pairs).as_posix()}").write_bytes(path.read_bytes())
    run_killed_and_again(
        repository, tmp_path / "two", arguments(f"{bucket}/pairs,{dev}", pretrained, tmp_path / "two", *more)
    )
    for name, tolerance in (("loss", 2e-3), ("accuracy", 0.07)):
        one, two = (records(tmp_path / each, "train", name) for each in ("one", "two"))
        np.testing.assert_allclose(two, one, atol=tolerance)
    assert len(one) == 12


def test_sources_apart_are_the_same_in_four_processes(repository, prepared, pretrained, tmp_path):
    more = "--config.data.source_batches=True", "--config.data.batch_size=8"
    for count in (1, 4):
        finish(start(repository, arguments(prepared, pretrained, tmp_path / str(count), *more), count))
    losses = [records(tmp_path / name, "train", "loss") for name in ("1", "4")]
    assert len(losses[0]) == 3 * (3 + 5)  # 19 and 33 pairs
    np.testing.assert_allclose(*losses, atol=2e-3)


def test_a_reranker_sees_all_candidates_in_two_processes_that_were_killed(
    repository, source, prepared, pretrained, tmp_path
):
    """The table's negatives are candidates; of the last batch one process has none. Two read prepared pairs."""
    places = {"one": source, "two": prepared}
    commands = [arguments(place, pretrained, tmp_path / name, task="reranking") for name, place in places.items()]
    finish(start(repository, commands[0], 1))
    run_killed_and_again(repository, tmp_path / "two", commands[1])
    for name, tolerance in (("loss", 2e-3), ("accuracy", 0.07)):
        one, two = (records(tmp_path / each, "train", name) for each in ("one", "two"))
        np.testing.assert_allclose(two, one, atol=tolerance)
    assert len(one) == 12


def test_a_teacher_in_two_processes_that_were_killed(repository, source, pretrained, alone, tmp_path):
    more = f"--config.teacher.checkpoint={alone}", "--config.teacher.temperature=2"
    one, _ = one_and_two(repository, source, pretrained, tmp_path, *more)
    assert records(one, "train", "loss")[0] != records(alone, "train", "loss")[0]


OF_TOKENS = [
    f"--config.task.embedding.{each}" for each in ("kind=multi_vector", "projection_size=16", "query_length=9")
]


def one_and_two(repository, source, pretrained, folder, *more):
    """Returns the work directories of one process, and of two in microbatches that were killed."""
    finish(start(repository, arguments(source, pretrained, folder / "one", *more), 1))
    command = arguments(source, pretrained, folder / "two", *more, "--config.train.accumulate=2")
    run_killed_and_again(repository, folder / "two", command)
    assert_same_run(folder / "two", folder / "one")
    return folder / "one", folder / "two"


def test_vectors_of_tokens_are_learnt_in_two_processes_that_were_killed(repository, source, pretrained, tmp_path):
    vectors = [
        bert_jax.multi_vectors(bert_jax.load_pretrained(workdir), ["ban bin", "din dan"], kind="query")
        for workdir in one_and_two(repository, source, pretrained, tmp_path, *OF_TOKENS)
    ]
    np.testing.assert_allclose(*vectors, atol=0.05)


SPARSE = [f"--config.task.embedding.{option}" for option in ("kind=sparse", "passage_flops=0.1", "query_table=True")]


def test_sparse_vectors_in_two_processes_that_were_killed(repository, source, pretrained, tmp_path):
    """FLOPS goes on to rise where it was."""
    workdirs = one_and_two(repository, source, pretrained, tmp_path, *SPARSE)
    for name in ("passage_flops", "query_terms"):
        both = [records(workdir, "train", name) for workdir in workdirs]
        np.testing.assert_allclose(*both, rtol=1e-2)
