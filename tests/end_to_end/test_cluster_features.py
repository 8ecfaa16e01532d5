# SPDX-License-Identifier: Apache-2.0
"""A teacher, several labels and an early end in two processes: as in one, and after a kill."""

import json
import signal

import numpy as np
import pytest
from builders import make_dataset, make_learner
from processes import TRAIN, finish, start, wait_for_lines

import bert_jax
from bert_jax.training.report import read_metrics

pytestmark = pytest.mark.slow


def losses(workdir):
    return [record["loss"] for record in read_metrics(workdir / "metrics.jsonl") if record["kind"] == "train"]


def run_in_one_and_in_two(repository, tmp_path, command, kill=True):
    """Runs a command in one process and in two, of which the second is killed and all are started again."""
    finish(start(repository, [*command, f"--workdir={tmp_path / 'one'}"], 1, devices=2))
    two = [*command, f"--workdir={tmp_path / 'two'}"]
    if kill:
        running = start(repository, two, 2)
        wait_for_lines(tmp_path / "two" / "metrics.jsonl", 10, running)
        running[1].send_signal(signal.SIGKILL)
        for process in running:
            process.communicate(timeout=300)
    finish(start(repository, two, 2))
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=2e-3, atol=1e-5)


def test_a_teacher_in_pretraining(repository, tmp_path):
    data = make_dataset(tmp_path)
    command = [*TRAIN, f"--config.data.path={data}"]
    finish(start(repository, [*command, f"--workdir={tmp_path / 'teacher'}"], 1))
    taught = [f"--config.teacher.checkpoint={tmp_path / 'teacher'}", "--config.train.seed=1"]
    run_in_one_and_in_two(repository, tmp_path, [*command, *taught])


def write_texts(path, count, seed):
    """Writes texts of the toy language, each with the labels that its words have."""
    rng, words = np.random.default_rng(seed), {"a": "ban bas", "b": "dar dat", "c": "lin lis"}
    lines = []
    for _ in range(count):
        labels = sorted(rng.choice(list(words), rng.integers(0, 3), replace=False).tolist())
        text = " ".join(["the", *(words[label] for label in labels)])
        lines.append(json.dumps({"text": text, "labels": labels}) + "\n")
    path.write_text("".join(lines))
    return path


def test_several_labels_that_a_model_teaches_and_an_early_end(repository, tmp_path):
    sources = f"{write_texts(tmp_path / 'train.jsonl', 67, 0)},{write_texts(tmp_path / 'dev.jsonl', 21, 1)}"
    command = ["finetune.py", "--config=configs/finetune.py:multilabel", f"--config.data.source={sources}"]
    command += [f"--config.init_checkpoint={make_learner(tmp_path)}", "--config.optimizer.learning_rate=2e-3"]
    command += ["--config.task.max_seq_length=16", "--config.data.batch_size=8", "--config.report.every_steps=1"]
    command += ["--config.report.tensorboard=False", "--config.report.progress=False", "--config.train.num_epochs=3.0"]
    finish(start(repository, [*command, f"--workdir={tmp_path / 'teacher'}"], 1))
    command += [f"--config.teacher.checkpoint={tmp_path / 'teacher'}", "--config.train.patience=2"]
    run_in_one_and_in_two(repository, tmp_path, command)
    both = [bert_jax.load_predictor(tmp_path / name)(["the ban bas dar dat"])[0] for name in ("one", "two")]
    assert both[0].labels == both[1].labels
