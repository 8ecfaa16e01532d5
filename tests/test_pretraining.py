# SPDX-License-Identifier: Apache-2.0
"""Whole runs on a toy language: they learn, stop, resume, start warm, and refuse what does not fit."""

import dataclasses
import errno
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import pytest
from builders import growing_bert, make_dataset, make_topics, tiny_model, tiny_run, topics_run
from object_server import serving
from whole_runs import ONE_DEVICE, assert_same_state, losses, stop_at, train

import bert_jax
from bert_jax.checkpoints.pretrained import save_pretrained
from bert_jax.checkpoints.states import SEAL
from bert_jax.errors import InputError
from bert_jax.finetuning import finetune
from bert_jax.inference.pretrained import load_pretrained
from bert_jax.settings.finetuning import FinetuneConfig, SweepConfig
from bert_jax.settings.pretraining import (
    DataConfig,
    MaskingConfig,
    MeshConfig,
    OptimizerConfig,
    Phase2Config,
    TrainConfig,
)
from bert_jax.settings.rules import to_dict
from bert_jax.storage.locks import LOCK
from bert_jax.sweep import sweep
from bert_jax.training.loop import evaluate
from bert_jax.training.report import read_metrics
from bert_jax.training.workdir import locked


def run(data, workdir, **changes):
    """Returns the result of a run on one device."""
    return train(tiny_run(data, mesh=ONE_DEVICE, **changes), workdir)


def test_a_run_leaves_a_model_curves_and_metrics(finished):
    workdir, result = finished
    assert result.step == 12 and result.signal == 0
    assert sorted(losses(workdir)) == list(range(1, 13))
    evaluations = [r for r in read_metrics(workdir / "metrics.jsonl") if r["kind"] == "eval"]
    assert [r["step"] for r in evaluations] == [0, 6, 12]
    for record in evaluations:
        assert record["mlm_perplexity"] == pytest.approx(math.exp(record["mlm_loss"]))
        assert 0.5 <= record["nsp_base_rate"] <= 1 and 0 < record["unigram_loss"] < math.log(200)
    assert evaluations[0]["mlm_loss"] == pytest.approx(math.log(167), rel=0.02)  # guessing among the vocabulary
    assert evaluations[-1]["mlm_loss"] < evaluations[0]["mlm_loss"]
    assert (workdir / "curves.png").stat().st_size > 5000
    assert json.loads((workdir / "config.json").read_text())["run"]["optimizer"]["learning_rate"] == 1e-3


def test_the_trained_model_loads_in_three_forms_with_the_same_bits(finished, tmp_path):
    workdir, result = finished
    shutil.copytree(workdir, tmp_path / "run", ignore=shutil.ignore_patterns("pretrained"))
    for place in (workdir / "pretrained", workdir, tmp_path / "run"):
        bert = bert_jax.load_pretrained(place)
        assert_same_state(bert.params, result.state.params)
    texts = ["the ban bas .", "the dar ."]
    encodings, alone = bert.encode(texts), bert.encode(texts[1:])
    assert encodings.hidden.shape == (2, 6, 32) and encodings.mask.sum(1).tolist() == [6, 5]
    np.testing.assert_allclose(alone.hidden[0], encodings.hidden[1, :5], atol=1e-5)
    with pytest.raises(InputError, match=r"text 2 has 82 tokens .* room for 64"):
        bert.encode(["the .", "the " * 80], "refuse")
    with pytest.raises(InputError, match="no text"):
        bert.encode([])


def test_stop_and_resume_is_the_uninterrupted_run_bit_for_bit(finished, toy_data, tmp_path, monkeypatch):
    whole, uninterrupted = finished
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        stopped = run(toy_data, tmp_path / "run")
    assert stopped.signal == signal.SIGTERM and 5 <= stopped.step < 12
    assert not (tmp_path / "run" / "pretrained").exists()
    resumed = run(toy_data, tmp_path / "run")
    assert_same_state(resumed.state, uninterrupted.state)
    assert losses(tmp_path / "run") == losses(whole)
    assert losses(tmp_path / "run", "eval") == losses(whole, "eval")


def test_an_evaluation_is_broken_off_between_batches():
    taken = []

    def eval_step(_, batch):
        taken.append(batch)
        return {"loss": (float(batch), 1.0)}

    assert evaluate(eval_step, {}, iter(range(4))) == {"loss": 1.5}
    taken.clear()
    assert evaluate(eval_step, {}, iter(range(4)), lambda: signal.SIGTERM if len(taken) == 2 else 0) is None
    assert taken == [0, 1]


@pytest.mark.slow
def test_another_device_count_resumes_the_same_run(finished, toy_data, tmp_path, monkeypatch):
    """Identical state, batches, masks and dropout bits: losses differ by float32 rounding only."""
    mesh, zero1 = MeshConfig(data=2, fsdp=2, tensor=2), TrainConfig(num_steps=12, zero1=True)
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        stopped = train(tiny_run(toy_data, mesh=mesh, train=zero1), tmp_path / "run")
    assert 3 <= stopped.step < 12
    run(toy_data, tmp_path / "run")
    ours, theirs = losses(tmp_path / "run"), losses(finished[0])
    assert sorted(ours) == sorted(theirs)
    for step in theirs:
        np.testing.assert_allclose(ours[step], theirs[step], rtol=2e-4, err_msg=f"step {step}")


def test_a_limit_of_predictions_that_no_sequence_reaches_may_change(finished, toy_data):
    """Version 0.2 wrote 20 for every length of rows; 5 of 32 tokens are what the rate asks for."""
    workdir, _ = finished
    for limit in (20, 0, 5):
        assert run(toy_data, workdir, masking=MaskingConfig(max_predictions=limit)).step
    with pytest.raises(
        InputError, match=r"another masking.max_predictions; .* resume with --config.masking.max_predictions=5 "
    ):
        run(toy_data, workdir, masking=MaskingConfig(max_predictions=3))


class StoppedHere(Exception):
    """In place of training."""


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (0, "task: 15% of the tokens, masked"),
        (2, "task: 6.2% of the tokens of a full row (masking.max_predictions 2 is below masking.rate 0.15 x 32 = 5; 0"),
    ],
)
def test_the_share_that_is_predicted_is_told(toy_data, tmp_path, capsys, monkeypatch, limit, told):
    """And a warm-up that is longer than the run, before its first step."""
    monkeypatch.setattr("bert_jax.training.train.train_loop", mock.Mock(side_effect=StoppedHere))
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=100)
    masking = MaskingConfig(max_predictions=limit)
    with pytest.raises(StoppedHere):
        run(toy_data, tmp_path / "run", masking=masking, optimizer=optimizer)
    lines = capsys.readouterr().err
    assert told in lines
    assert "warning: warm-up takes 100 steps and the schedule ends after" in lines


def contents(workdir):
    return {path: path.stat().st_mtime_ns for path in workdir.rglob("*") if path.name != LOCK}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"masking": MaskingConfig(max_predictions=5, rate=0.3)}, "belongs to a run with another .*masking.rate"),
        ({"model": tiny_model(vocab_size=0, num_layers=1)}, "belongs to a run with another .*model.num_layers"),
        ({"train": TrainConfig(num_steps=10)}, "run has taken 12 steps, and the settings ask for 10; ask for as many"),
    ],
)
def test_a_work_directory_of_another_run_is_refused_and_untouched(finished, toy_data, change, named):
    workdir, _ = finished
    before = contents(workdir)
    with pytest.raises(InputError, match=named):
        run(toy_data, workdir, **change)
    assert contents(workdir) == before


def test_a_second_run_in_a_work_directory_is_refused_and_writes_nothing(finished, toy_data):
    workdir, result = finished
    records = read_metrics(workdir / "metrics.jsonl")
    with locked(workdir):
        before = contents(workdir)
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(InputError, match=rf"is in use by another run \({holder}\); wait for it, or give") as caught:
            run(toy_data, workdir)
        assert "\n" not in str(caught.value) and contents(workdir) == before
    again = run(toy_data, workdir)  # which is finished, and is not trained again
    assert_same_state(again.state, result.state)
    assert again.step == 12 and read_metrics(workdir / "metrics.jsonl") == records


HOLD_A_LOCK = """
import fcntl, sys
stream = open(sys.argv[1])
fcntl.flock(stream, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


def test_a_lock_ends_with_its_process_and_with_its_block(tmp_path):
    (tmp_path / LOCK).touch()
    command = [sys.executable, "-c", HOLD_A_LOCK, str(tmp_path / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(InputError, match="which has just begun"), locked(tmp_path):
            pass
        other.kill()
    for _ in range(2):
        with locked(tmp_path):
            pass


def test_a_file_system_without_locks_stops_no_run(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("bert_jax.storage.locks.fcntl.flock", no_locks)
    with locked(tmp_path / "run"), locked(tmp_path / "run"):
        assert (tmp_path / "run").is_dir()


@pytest.mark.parametrize("content", ["[]", '{"run": {"train": []}}', None])
def test_a_work_directory_of_another_kind_is_refused_in_one_line(toy_data, tmp_path, content):
    if content is None:
        content = json.dumps({"task": "sequence_classification", "run": to_dict(FinetuneConfig())})
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=r"of another kind of run, or damaged; give another workdir"):
        run(toy_data, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_such_a_path_is_refused_before_anything_is_written(toy_data, pretrained, tmp_path):
    name = "run [1]"
    fine = topics_run(make_topics(tmp_path / "topics", 32, 16), pretrained)
    before = sorted(tmp_path.rglob("*"))
    for write in (
        lambda: run(toy_data, tmp_path / name),
        lambda: finetune(fine, tmp_path / name, jax.devices()[:1]),
        lambda: sweep(dataclasses.replace(fine, sweep=SweepConfig(seeds=2)), tmp_path / name, jax.devices()[:1]),
        lambda: save_pretrained(growing_bert(), tmp_path / name),
    ):
        with pytest.raises(InputError, match=r"is read as a pattern .*; give a path without .*, or a link to it"):
            write()
        assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_config_of_a_run_is_deleted_and_written_again(finished, toy_data, tmp_path):
    shutil.copytree(finished[0], workdir := tmp_path / "run")
    path = workdir / "config.json"
    content = path.read_text()
    path.write_text(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"config\.json.*damaged"):
        run(toy_data, workdir)
    path.unlink()
    run(toy_data, workdir)
    assert json.loads(path.read_text()) == json.loads(content)


@pytest.mark.parametrize("name", ["pretrained", "finetuned"])
def test_a_model_without_its_seal_is_named_before_the_run_trains_on(finished, toy_data, tmp_path, name):
    shutil.copytree(finished[0], workdir := tmp_path / "run")
    (workdir / "pretrained" / SEAL).unlink()
    (workdir / "pretrained").rename(workdir / name)
    records = (workdir / "metrics.jsonl").read_bytes()
    more = tiny_run(toy_data, mesh=ONE_DEVICE, train=TrainConfig(num_steps=30))
    with pytest.raises(InputError, match=rf"{name} lacks its checksums.json, .*; delete it, or move it away"):
        train(more, workdir)
    assert (workdir / "metrics.jsonl").read_bytes() == records


def test_the_password_of_a_url_is_in_no_file_and_no_line_of_a_run(toy_data, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    with serving(toy_data.parent) as server:
        url = server.url.replace("://", "://me:let-me-in@") + f"/{toy_data.name}"
        config = tiny_run(url, mesh=ONE_DEVICE)  # type: ignore[arg-type]
        for _ in range(2):
            train(config, tmp_path / "run")
        said = capfd.readouterr()
    assert not [line for line in (said.out + said.err).splitlines() if "let-me-in" in line]
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"let-me-in" not in path.read_bytes(), path


def test_a_link_without_brackets_leads_to_a_directory_with_brackets(tmp_path):
    (tmp_path / "run [1]").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run [1]")
    save_pretrained(growing_bert(), tmp_path / "link" / "model")
    assert load_pretrained(tmp_path / "run [1]" / "model").config.vocab_size == 20


def test_other_data_is_refused(finished, tmp_path):
    other = make_dataset(tmp_path, seed=1)
    with pytest.raises(InputError, match="was trained on other data"):
        run(other, finished[0])


@pytest.mark.parametrize(
    ("older", "note"),
    [
        (lambda workdir: (workdir / "about.json").unlink(), "from here on it draws other masks"),
        (lambda workdir: set_format(workdir, 1), "note: from step 12 on dropout draws other bits"),
    ],
)
def test_a_run_that_an_older_version_began_says_once_what_is_another(finished, toy_data, tmp_path, capfd, older, note):
    shutil.copytree(finished[0], workdir := tmp_path / "run")
    older(workdir)
    for times in (1, 0):
        run(toy_data, workdir)
        assert capfd.readouterr().err.count(note) == times


def set_format(workdir, number):
    path = workdir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": number}))


def test_an_attempt_that_is_killed_before_its_first_step_counts(toy_data, tmp_path, monkeypatch):
    monkeypatch.setattr("bert_jax.training.train.init_state", mock.Mock(side_effect=KeyboardInterrupt))
    for attempt in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            run(toy_data, tmp_path / "run")
        last = read_metrics(tmp_path / "run" / "metrics.jsonl", ["goodput"])[-1]
        assert (last["step"], last["attempts"]) == (0, attempt)


def test_a_resume_needs_nothing_of_the_model_that_the_run_started_from(finished, toy_data, tmp_path, capsys):
    workdir, gone = tmp_path / "run", str(tmp_path / "gone")
    shutil.copytree(finished[0], workdir)
    identity = json.loads((workdir / "config.json").read_text())
    identity["run"]["init_checkpoint"] = gone
    (workdir / "config.json").write_text(json.dumps(identity))
    assert run(toy_data, workdir, init_checkpoint=gone).step == 12
    assert "resume from step 12" in capsys.readouterr().err
    with pytest.raises(InputError, match="gone"):
        run(toy_data, tmp_path / "new", init_checkpoint=gone)
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_warm_start_takes_parameters_alone_and_again_after_a_kill_in_the_first_save(
    finished, toy_data, tmp_path, capsys
):
    start, workdir = str(finished[0] / "pretrained"), tmp_path / "run"
    config = tiny_run(toy_data, mesh=ONE_DEVICE, train=TrainConfig(num_steps=1), init_checkpoint=start)
    first = train(config, workdir)
    assert_same_state(first.state.params, finished[1].state.params)  # step 0 has rate 0
    moments = zip(*(jax.tree.leaves(jax.device_get(run.state.optimizer)) for run in (first, finished[1])), strict=True)
    assert any((ours != theirs).any() for ours, theirs in moments)
    (workdir / "checkpoints" / "00000001" / SEAL).unlink()
    assert_same_state(train(config, workdir).state, first.state)
    assert re.search("so it was never finished\n.*warm start from", capsys.readouterr().err)
    assert (workdir / "damaged" / "00000001").is_dir()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_last_good_one(toy_data, tmp_path):
    optimizer = OptimizerConfig(learning_rate=1e30, warmup_steps=0, clip_norm=0.0)
    config = tiny_run(toy_data, mesh=ONE_DEVICE, optimizer=optimizer)
    with pytest.raises(InputError, match=r"(is nan|is inf) at step.*finite until step.*lower optimizer.learning_rate"):
        train(config, tmp_path / "run")


LONG = {
    "train": TrainConfig(num_steps=2**31 - 1),
    "phase2": Phase2Config(num_steps=1, path="DATA", schedule="continue"),
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"data": DataConfig(path="")}, "data.path is empty"),
        ({"data": DataConfig(path="nowhere")}, "nowhere"),
        ({"model": tiny_model(vocab_size=50)}, "tokenizer has 167 tokens and model.vocab_size is 50"),
        (
            {"model": tiny_model(vocab_size=0, max_positions=16)},
            "rows of 32 tokens .* longer than model.max_positions 16",
        ),
        ({"mesh": MeshConfig(data=3)}, "batch_size 16 is not divisible by data x fsdp = 3; use 15 or 18"),
        ({"train": TrainConfig(num_steps=12, accumulate=3)}, "16 is not divisible by accumulate 3; use 15 or 18"),
        ({"train": TrainConfig(steps_per_call=0)}, "train.steps_per_call 0"),
        (
            {"masking": MaskingConfig(whole_word=True, max_ngram=10**6)},
            "masking.max_ngram 1000000 is not from 1 to 100",
        ),
        (LONG, "the run has 2,147,483,648 steps, which devices cannot count"),
    ],
)
def test_bad_settings_are_one_line_and_write_nothing(toy_data, tmp_path, change, expected):
    config = tiny_run(toy_data, **{"mesh": ONE_DEVICE} | change)
    if config.phase2.num_steps:
        config = dataclasses.replace(config, phase2=dataclasses.replace(config.phase2, path=str(toy_data)))
    with pytest.raises(InputError, match=expected) as caught:
        train(config, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_damaged_newest_checkpoint_is_told_of_and_an_older_one_is_read(finished, tmp_path, capsys):
    shutil.copytree(finished[0], tmp_path / "run", ignore=shutil.ignore_patterns("pretrained"))
    newest = tmp_path / "run" / "checkpoints" / "00000012"
    victim = max((p for p in newest.rglob("*") if p.is_file() and p.name != SEAL), key=lambda p: p.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[100] ^= 1
    victim.write_bytes(content)
    bert = bert_jax.load_pretrained(tmp_path / "run")
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and f"warning: checkpoint {newest} is not used: file" in told and victim.name in told
    assert bert.trained["step"] == 8


@pytest.mark.parametrize("part", ["run", "run/pretrained"])
def test_a_flipped_byte_of_the_vocabulary_is_seen(finished, tmp_path, part):
    shutil.copytree(finished[0], tmp_path / "run")
    (vocabulary,) = (tmp_path / part / "tokenizer").glob("vocab*")
    content = vocabulary.read_bytes()
    vocabulary.write_bytes(content.replace(b"\nban\n", b"\ncan\n"))
    with pytest.raises(InputError, match="gives other ids than the tokenizer that the model was trained with"):
        bert_jax.load_pretrained(tmp_path / part)
    # The fingerprint is in two places: that of the checkpoints counts where config.json is of an older version.
    about = json.loads((tmp_path / part / "config.json").read_text())
    assert about.pop("tokenizer")
    (tmp_path / part / "config.json").write_text(json.dumps(about))
    with pytest.raises(InputError, match=r"gives other ids than|is damaged: file"):
        bert_jax.load_pretrained(tmp_path / part)


def test_a_model_without_a_fingerprint_opens_as_before(finished, tmp_path):
    """As version 0 of the formats wrote it: neither config.json nor a seal knows the tokenizer."""
    shutil.copytree(finished[0], tmp_path / "run")
    for name in ("config.json", *(f"checkpoints/{step:08d}/{SEAL}" for step in (8, 12))):
        about = json.loads((tmp_path / "run" / name).read_text())
        assert about.pop("tokenizer")
        if name.endswith(SEAL):
            assert about.pop("digest")
            about["format"] = 1
        (tmp_path / "run" / name).write_text(json.dumps(about))
    assert bert_jax.load_pretrained(tmp_path / "run").trained["step"] == 12


def another_token(data):
    path = data / "tokenizer" / "vocab.txt"
    path.write_bytes(path.read_bytes().replace(b"\nthe\n", b"\nthd\n"))


def other_options(data):
    path = data / "tokenizer" / "tokenizer_config.json"
    path.write_text(path.read_text().replace("true", "false"))


def no_rows(data):
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["splits"]["train"]["shards"] = []
    (data / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (another_token, "/tokenizer is damaged or was replaced: it gives other ids than the rows"),
        (other_options, "/tokenizer is damaged or was replaced: it gives other ids than the rows"),
        (no_rows, "has no row to train on"),
    ],
)
def test_a_damaged_data_set_is_one_line(toy_data, tmp_path, damage, told):
    damage(data := shutil.copytree(toy_data, tmp_path / "data"))
    with pytest.raises(InputError, match=told) as caught:
        run(data, tmp_path / "run")
    assert "prepare it with --tokenizer" not in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
