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

import jax
import numpy as np
import pytest
from builders import growing_bert, make_dataset, make_pretrained, make_topics, tiny_model, tiny_run, topics_run
from object_server import serving
from whole_runs import ONE_DEVICE, assert_same_state, losses, stop_at, train

import bert_jax
from bert_jax.checkpoints.arrays import save_tree
from bert_jax.checkpoints.pretrained import save_pretrained
from bert_jax.checkpoints.states import SEAL
from bert_jax.errors import InputError
from bert_jax.finetuning import finetune
from bert_jax.inference.pretrained import load_pretrained
from bert_jax.settings.finetuning import FinetuneConfig, SweepConfig
from bert_jax.settings.pretraining import (
    CheckpointConfig,
    DataConfig,
    MaskingConfig,
    MeshConfig,
    OptimizerConfig,
    Phase2Config,
    ReportConfig,
    TrainConfig,
)
from bert_jax.settings.rules import to_dict
from bert_jax.storage.locks import LOCK
from bert_jax.sweep import sweep
from bert_jax.training import heldout
from bert_jax.training.loop import evaluate
from bert_jax.training.report import read_metrics
from bert_jax.training.workdir import locked


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


def test_the_trained_model_loads_in_three_forms_with_the_same_bits(finished):
    workdir, result = finished
    texts = ["the ban bas .", "the dar ."]
    exported = bert_jax.load_pretrained(workdir / "pretrained")
    from_run = bert_jax.load_pretrained(workdir)
    shutil.copytree(workdir, workdir.with_name("copy"))
    shutil.rmtree(workdir.with_name("copy") / "pretrained")
    from_checkpoint = bert_jax.load_pretrained(workdir.with_name("copy"))
    for bert in (exported, from_run, from_checkpoint):
        assert_same_state(bert.params, result.state.params)
        encodings = bert.encode(texts)
        assert encodings.hidden.shape == (2, 6, 32) and encodings.pooled.shape == (2, 32)
        np.testing.assert_array_equal(encodings.mask.sum(1), [6, 5])
    alone = exported.encode(texts[1:])
    np.testing.assert_allclose(alone.hidden[0], exported.encode(texts).hidden[1, :5], atol=1e-5)


def test_encode_refuses_what_it_cannot(finished):
    bert = bert_jax.load_pretrained(finished[0])
    with pytest.raises(InputError, match=r"text 2 has 82 tokens .* room for 64"):
        bert.encode(["the .", "the " * 80], "refuse")
    with pytest.raises(InputError, match="no text"):
        bert.encode([])
    assert bert.encode([("the ban .", "the dar .")]).token_ids.shape == (1, 9)


@pytest.mark.parametrize("step", [5, pytest.param(8, marks=pytest.mark.slow)])
def test_stop_and_resume_is_the_uninterrupted_run_bit_for_bit(finished, toy_data, tmp_path, monkeypatch, step):
    whole, uninterrupted = finished
    with monkeypatch.context() as patch:
        stop_at(patch, step)
        stopped = train(tiny_run(toy_data, mesh=ONE_DEVICE), tmp_path / "run")
    assert stopped.signal == signal.SIGTERM and step <= stopped.step < 12
    assert not (tmp_path / "run" / "pretrained").exists()
    resumed = train(tiny_run(toy_data, mesh=ONE_DEVICE), tmp_path / "run")
    assert_same_state(resumed.state, uninterrupted.state)
    assert losses(tmp_path / "run") == losses(whole)
    assert losses(tmp_path / "run", "eval") == losses(whole, "eval")


@pytest.mark.slow
def test_a_stop_in_an_evaluation_saves_at_once_and_the_evaluation_is_made_up_for(
    finished, toy_data, tmp_path, monkeypatch
):
    whole, uninterrupted = finished
    config = tiny_run(toy_data, mesh=ONE_DEVICE, checkpoint=CheckpointConfig(every_steps=6))
    evaluate, calls = heldout.evaluate, []

    def evaluate_and_signal(eval_step, params, batches, *stopped):
        calls.append(None)
        return evaluate(eval_step, params, with_a_signal(batches) if len(calls) == 2 else batches, *stopped)

    with monkeypatch.context() as patch:
        patch.setattr(heldout, "evaluate", evaluate_and_signal)
        stopped = train(config, tmp_path / "run")
    assert (stopped.step, stopped.signal) == (6, signal.SIGTERM)
    assert sorted(losses(tmp_path / "run", "eval")) == [0]
    resumed = train(config, tmp_path / "run")
    assert_same_state(resumed.state, uninterrupted.state)
    assert losses(tmp_path / "run") == losses(whole)
    assert losses(tmp_path / "run", "eval") == losses(whole, "eval")


def with_a_signal(batches):
    os.kill(os.getpid(), signal.SIGTERM)
    yield from batches


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
def test_a_report_that_spans_a_stop_is_that_of_the_uninterrupted_run(toy_data, tmp_path, monkeypatch):
    config = tiny_run(toy_data, mesh=ONE_DEVICE, report=ReportConfig(every_steps=5, tensorboard=False, progress=False))
    train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        assert train(config, tmp_path / "run").step % 5  # stopped within the second window
    train(config, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert sorted(losses(tmp_path / "run")) == [5, 10, 12]


@pytest.mark.slow
def test_resume_passes_over_a_flipped_byte_and_ends_the_same(finished, toy_data, tmp_path):
    whole, uninterrupted = finished
    shutil.copytree(whole, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "00000012"
    victim = max((p for p in newest.rglob("*") if p.is_file() and p.name != SEAL), key=lambda p: p.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[100] ^= 1
    victim.write_bytes(content)
    again = train(tiny_run(toy_data, mesh=ONE_DEVICE), tmp_path / "run")  # from step 8
    assert_same_state(again.state, uninterrupted.state)
    assert losses(tmp_path / "run") == losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "zero1"), [(MeshConfig(data=2, fsdp=2, tensor=2), "off"), (MeshConfig(data=8), "on")])
def test_another_device_count_resumes_the_same_run(finished, toy_data, tmp_path, monkeypatch, mesh, zero1):
    """Identical state, batches, masks and dropout bits: losses differ by float32 rounding only."""
    whole, _ = finished
    divided = tiny_run(toy_data, mesh=mesh)
    divided = dataclasses.replace(divided, train=dataclasses.replace(divided.train, zero1=zero1))
    with monkeypatch.context() as patch:
        stop_at(patch, 3)
        stopped = train(divided, tmp_path / "run")
    assert 3 <= stopped.step < 12
    train(tiny_run(toy_data, mesh=ONE_DEVICE), tmp_path / "run")
    ours, theirs = losses(tmp_path / "run"), losses(whole)
    assert sorted(ours) == sorted(theirs)
    for step in theirs:
        np.testing.assert_allclose(ours[step], theirs[step], rtol=2e-4, err_msg=f"step {step}")


@pytest.mark.slow
def test_a_run_of_muon_goes_on_from_mesh_to_mesh(toy_data, tmp_path, monkeypatch):
    """Its matrices are orthogonalized whole, wherever their parts are."""
    optimizer = OptimizerConfig(name="muon", learning_rate=1e-3, warmup_steps=3, layer_decay=0.9)
    config = tiny_run(toy_data, optimizer=optimizer)
    train(dataclasses.replace(config, mesh=ONE_DEVICE), tmp_path / "whole")
    for step, mesh, zero1 in ((3, MeshConfig(data=2, fsdp=2, tensor=2), "off"), (7, MeshConfig(data=8), "on")):
        divided = dataclasses.replace(config, mesh=mesh, train=dataclasses.replace(config.train, zero1=zero1))
        with monkeypatch.context() as patch:
            stop_at(patch, step)
            assert step <= train(divided, tmp_path / "run").step < 12
    train(dataclasses.replace(config, mesh=ONE_DEVICE), tmp_path / "run")
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert sorted(ours) == sorted(theirs)
    for step in theirs:
        np.testing.assert_allclose(ours[step], theirs[step], rtol=2e-4, err_msg=f"step {step}")


def test_a_finished_run_is_not_trained_again(finished, toy_data):
    workdir, result = finished
    before = read_metrics(workdir / "metrics.jsonl")
    again = train(tiny_run(toy_data, mesh=ONE_DEVICE), workdir)
    assert again.step == 12
    assert_same_state(again.state, result.state)
    assert read_metrics(workdir / "metrics.jsonl") == before


@pytest.mark.slow
def test_more_steps_may_be_asked_for_on_resume(finished, toy_data, tmp_path):
    shutil.copytree(finished[0], tmp_path / "run")
    longer = tiny_run(toy_data, mesh=ONE_DEVICE, train=TrainConfig(num_steps=14))
    assert train(longer, tmp_path / "run").step == 14
    assert sorted(losses(tmp_path / "run")) == list(range(1, 15))


def test_fewer_steps_than_a_run_has_taken_are_refused(finished, toy_data, tmp_path):
    """Before, it counted as a run of so few steps."""
    shutil.copytree(finished[0], tmp_path / "run")
    shorter = tiny_run(toy_data, mesh=ONE_DEVICE, train=TrainConfig(num_steps=10))
    with pytest.raises(InputError, match=r"run has taken 12 steps, and the settings ask for 10; ask for as many"):
        train(shorter, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["run"]["train"]["num_steps"] == 12


def test_a_limit_of_predictions_that_no_sequence_reaches_may_change(finished, toy_data):
    """Version 0.2 wrote 20 for every length of rows; 5 of 32 tokens are what the rate asks for."""
    workdir, _ = finished
    for limit in (20, 0, 5):
        assert train(tiny_run(toy_data, mesh=ONE_DEVICE, masking=MaskingConfig(max_predictions=limit)), workdir).step
    with pytest.raises(
        InputError, match=r"another masking.max_predictions; .* resume with --config.masking.max_predictions=5 "
    ):
        train(tiny_run(toy_data, mesh=ONE_DEVICE, masking=MaskingConfig(max_predictions=3)), workdir)


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (0, "task: 15% of the tokens, masked"),
        (20, "task: 15% of the tokens, masked"),
        (
            2,
            "task: 6.2% of the tokens of a full row (masking.max_predictions 2 is below masking.rate 0.15 x 32 = 5; 0",
        ),
    ],
)
def test_the_share_that_is_predicted_is_told(toy_data, tmp_path, capsys, monkeypatch, limit, told):
    """And a warm-up that is longer than the run, before its first step."""

    class Stopped(Exception):
        pass

    def stop(*_):
        raise Stopped

    monkeypatch.setattr("bert_jax.training.train.train_loop", stop)
    optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=100)
    masking = MaskingConfig(max_predictions=limit)
    with pytest.raises(Stopped):
        train(tiny_run(toy_data, mesh=ONE_DEVICE, masking=masking, optimizer=optimizer), tmp_path / "run")
    lines = capsys.readouterr().err
    assert told in lines
    assert "warning: warm-up takes 100 steps and the schedule ends after" in lines


def contents(workdir):
    return {path: path.stat().st_mtime_ns for path in workdir.rglob("*")}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"optimizer": OptimizerConfig(learning_rate=2e-3, warmup_steps=3)}, "optimizer.learning_rate"),
        ({"masking": MaskingConfig(max_predictions=5, rate=0.3)}, "masking.rate"),
        ({"model": tiny_model(vocab_size=0, num_layers=1)}, "model.num_layers"),
    ],
)
def test_a_work_directory_of_another_run_is_refused_and_untouched(finished, toy_data, change, named):
    workdir, _ = finished
    before = contents(workdir)
    with pytest.raises(InputError, match=f"belongs to a run with another .*{named}"):
        train(tiny_run(toy_data, mesh=ONE_DEVICE, **change), workdir)
    assert contents(workdir) == before


def test_a_second_run_in_a_work_directory_is_refused_and_writes_nothing(finished, toy_data):
    workdir, _ = finished
    with locked(workdir):
        before = contents(workdir)
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        with pytest.raises(InputError, match=rf"is in use by another run \({holder}\); wait for it, or give") as caught:
            train(tiny_run(toy_data, mesh=ONE_DEVICE), workdir)
        assert "\n" not in str(caught.value) and contents(workdir) == before
    assert train(tiny_run(toy_data, mesh=ONE_DEVICE), workdir).step == 12


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


@pytest.mark.parametrize("content", ["{}", "[]", '{"run": {}}', '{"run": {"train": []}}', None])
def test_a_work_directory_of_another_kind_is_refused_in_one_line(toy_data, tmp_path, content):
    if content is None:
        content = json.dumps({"task": "sequence_classification", "run": to_dict(FinetuneConfig())})
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputError, match=r"of another kind of run, or damaged; give another workdir"):
        train(tiny_run(toy_data, mesh=ONE_DEVICE), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("name", ["a\\b", "run*", "what?", "in [1]/run"])
def test_a_path_that_orbax_takes_for_a_pattern_is_refused(tmp_path, name):
    """Its arrays could not be found again: Orbax globs the whole path."""
    with pytest.raises(InputError, match=r"is read as a pattern .*; give a path without .*, or a link to it"):
        save_tree(tmp_path / name, {"a": np.ones(3)})
    assert not list(tmp_path.iterdir())


def test_such_a_path_is_refused_before_anything_is_written(toy_data, tmp_path):
    name = "run [1]"
    (tmp_path / "source").mkdir()
    fine = topics_run(make_topics(tmp_path / "topics", 32, 16), make_pretrained(tmp_path / "source"))
    before = sorted(tmp_path.rglob("*"))
    for write in (
        lambda: train(tiny_run(toy_data, mesh=ONE_DEVICE), tmp_path / name),
        lambda: finetune(fine, tmp_path / name, jax.devices()[:1]),
        lambda: sweep(dataclasses.replace(fine, sweep=SweepConfig(seeds=2)), tmp_path / name, jax.devices()[:1]),
        lambda: save_pretrained(growing_bert(), tmp_path / name),
    ):
        with pytest.raises(InputError, match=r"is read as a pattern .*; give a path without .*, or a link to it"):
            write()
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("half", [True, False])
def test_a_damaged_config_of_a_run_is_deleted_and_written_again(finished, toy_data, tmp_path, half):
    shutil.copytree(finished[0], workdir := tmp_path / "run")
    path = workdir / "config.json"
    content = path.read_text()
    path.write_text(content[: len(content) // 2] if half else content.replace('"seed": 0', '"seed": "0"'))
    with pytest.raises(InputError, match=r"config\.json.*damaged"):
        train(tiny_run(toy_data, mesh=ONE_DEVICE), workdir)
    path.unlink()
    train(tiny_run(toy_data, mesh=ONE_DEVICE), workdir)
    assert json.loads(path.read_text()) == json.loads(content)


def test_a_run_that_drew_other_bits_of_dropout_says_so_once_and_goes_on(finished, toy_data, tmp_path, capfd):
    shutil.copytree(finished[0], workdir := tmp_path / "run")
    path = workdir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    note = "note: from step 12 on dropout draws other bits"
    for times in (1, 0):
        train(tiny_run(toy_data, mesh=ONE_DEVICE), workdir)
        assert capfd.readouterr().err.count(note) == times


@pytest.mark.parametrize("name", ["pretrained", "finetuned"])
def test_a_model_without_its_seal_is_named_before_the_run_trains_on(finished, toy_data, tmp_path, name):
    shutil.copytree(finished[0], workdir := tmp_path / "run")
    if name == "finetuned":
        (workdir / "pretrained").rename(workdir / name)
    (workdir / name / SEAL).unlink()
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
        train(tiny_run(other, mesh=ONE_DEVICE), finished[0])


@pytest.mark.slow
def test_warm_start_takes_parameters_and_nothing_else(finished, toy_data, tmp_path, capsys):
    workdir, result = finished
    config = tiny_run(toy_data, mesh=ONE_DEVICE, train=TrainConfig(num_steps=1))
    warm = train(dataclasses.replace(config, init_checkpoint=str(workdir)), tmp_path / "run")
    assert warm.step == 1
    assert_same_state(warm.state.params, result.state.params)  # step 0 has rate 0
    assert "warm start" in capsys.readouterr().err
    moments = jax.tree.leaves(jax.device_get(warm.state.optimizer))
    assert any(
        (ours != theirs).any() for ours, theirs in zip(moments, jax.tree.leaves(result.state.optimizer), strict=True)
    )


def test_a_run_that_version_0_1_began_is_told_of_its_masks(finished, toy_data, tmp_path, capsys):
    shutil.copytree(finished[0], tmp_path / "run")
    (tmp_path / "run" / "about.json").unlink()
    config, told = tiny_run(toy_data, mesh=ONE_DEVICE), []
    for _ in range(2):  # it writes the file itself
        train(config, tmp_path / "run")
        told.append("from here on it draws other masks" in capsys.readouterr().err)
    assert told == [True, False]


def test_an_attempt_that_is_killed_before_its_first_step_counts(toy_data, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("bert_jax.training.train.init_state", killed)
    for attempt in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            train(tiny_run(toy_data, mesh=ONE_DEVICE), tmp_path / "run")
        last = read_metrics(tmp_path / "run" / "metrics.jsonl", ["goodput"])[-1]
        assert (last["step"], last["attempts"]) == (0, attempt)


def test_a_resume_needs_nothing_of_the_model_that_the_run_started_from(finished, toy_data, tmp_path, capsys):
    workdir, gone = tmp_path / "run", str(tmp_path / "gone")
    shutil.copytree(finished[0], workdir)
    identity = json.loads((workdir / "config.json").read_text())
    identity["run"]["init_checkpoint"] = gone
    (workdir / "config.json").write_text(json.dumps(identity))
    assert train(tiny_run(toy_data, mesh=ONE_DEVICE, init_checkpoint=gone), workdir).step == 12
    assert "resume from step 12" in capsys.readouterr().err
    with pytest.raises(InputError, match="gone"):
        train(tiny_run(toy_data, mesh=ONE_DEVICE, init_checkpoint=gone), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_run_that_was_killed_in_its_first_save_starts_warm_again(finished, toy_data, tmp_path, capsys):
    start, workdir = str(finished[0] / "pretrained"), tmp_path / "run"
    config = tiny_run(toy_data, mesh=ONE_DEVICE, train=TrainConfig(num_steps=1), init_checkpoint=start)
    first = train(config, workdir)
    (workdir / "checkpoints" / "00000001" / SEAL).unlink()
    assert_same_state(train(config, workdir).state, first.state)
    assert re.search("so it was never finished\n.*warm start from", capsys.readouterr().err)
    assert (workdir / "damaged" / "00000001").is_dir()


def test_warm_start_of_another_shape_spells_the_flags_to_add(finished, toy_data, tmp_path):
    config = tiny_run(toy_data, mesh=ONE_DEVICE, model=tiny_model(vocab_size=0, num_layers=1))
    with pytest.raises(InputError, match=r"is another model; add --config.model.num_layers=2$"):
        train(dataclasses.replace(config, init_checkpoint=str(finished[0])), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_several_steps_a_call_train_the_same_model_and_resume_exactly(toy_data, tmp_path, monkeypatch):
    config = tiny_run(toy_data, mesh=ONE_DEVICE, report=ReportConfig(every_steps=2, tensorboard=False, progress=False))
    several = dataclasses.replace(config, train=dataclasses.replace(config.train, steps_per_call=2))
    single = train(config, tmp_path / "single")
    whole = train(several, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 6)
        assert train(several, tmp_path / "run").signal == signal.SIGTERM
    resumed = train(several, tmp_path / "run")
    assert_same_state(resumed.state, whole.state)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert resumed.seen == whole.seen == single.seen
    ours, theirs = losses(tmp_path / "whole"), losses(tmp_path / "single")
    assert sorted(ours) == sorted(theirs) == [2, 4, 6, 8, 10, 12]
    for step, pair in ours.items():
        assert pair == pytest.approx(theirs[step], rel=2e-5)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_last_good_one(toy_data, tmp_path):
    config = tiny_run(
        toy_data,
        mesh=ONE_DEVICE,
        optimizer=OptimizerConfig(learning_rate=1e30, warmup_steps=0, clip_norm=0.0),
        train=TrainConfig(num_steps=40),
    )
    with pytest.raises(InputError, match=r"not finite|is nan at step|is inf at step") as caught:
        train(config, tmp_path / "run")
    assert "finite until step" in str(caught.value) and "lower optimizer.learning_rate" in str(caught.value)
    checkpoints = tmp_path / "run" / "checkpoints"
    for path in checkpoints.glob("*/state"):  # whatever was saved is finite
        bert = bert_jax.load_pretrained(tmp_path / "run")
        assert path.exists() and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(bert.params))


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
        ({"mesh": MeshConfig(data=1, tensor=8)}, "num_heads 4 is not divisible by mesh.tensor 8"),
        ({"train": TrainConfig(num_steps=12, accumulate=3)}, "16 is not divisible by accumulate 3; use 15 or 18"),
        ({"train": TrainConfig(steps_per_call=0)}, "train.steps_per_call 0"),
        (
            {"masking": MaskingConfig(whole_word=True, max_ngram=10**6)},
            "masking.max_ngram 1000000 is not from 1 to 100",
        ),
    ],
)
def test_bad_settings_are_one_line_and_write_nothing(toy_data, tmp_path, change, expected):
    with pytest.raises(InputError, match=expected) as caught:
        train(tiny_run(toy_data, **{"mesh": ONE_DEVICE} | change), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_run_of_more_steps_than_devices_count_is_refused(toy_data, tmp_path):
    second = Phase2Config(num_steps=1, path=str(toy_data), schedule="continue")
    with pytest.raises(InputError, match="the run has 2,147,483,648 steps, which devices cannot count"):
        train(
            tiny_run(toy_data, mesh=ONE_DEVICE, train=TrainConfig(num_steps=2**31 - 1), phase2=second), tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_nothing_held_out_trains_without_evaluation(tmp_path):
    data = make_dataset(tmp_path, holdout_rate=0.0)
    result = train(tiny_run(data, mesh=ONE_DEVICE, train=TrainConfig(num_steps=2)), tmp_path / "run")
    assert result.step == 2 and losses(tmp_path / "run", "eval") == {}


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


@pytest.mark.parametrize("kind", ["another token", "not UTF-8", "other options"])
def test_a_damaged_vocabulary_of_a_data_set_is_not_to_be_prepared_with(toy_data, tmp_path, kind):
    data = shutil.copytree(toy_data, tmp_path / "data")
    vocab, options = data / "tokenizer" / "vocab.txt", data / "tokenizer" / "tokenizer_config.json"
    content = vocab.read_bytes()
    if kind == "other options":
        options.write_text(options.read_text().replace("true", "false"))
    else:
        vocab.write_bytes(content.replace(b"\nthe\n", b"\nthd\n" if kind == "another token" else b"\n\xff\n"))
    with pytest.raises(InputError) as caught:
        train(tiny_run(data, mesh=ONE_DEVICE), tmp_path / "run")
    message = str(caught.value)
    assert str(data / "tokenizer") in message and "prepare it with --tokenizer" not in message
    assert not (tmp_path / "run").exists() and "\n" not in message
    if kind != "not UTF-8":
        assert "is damaged or was replaced: it gives other ids than the rows" in message


def test_a_data_set_without_a_row_to_train_on_is_one_line(toy_data, tmp_path):
    data = shutil.copytree(toy_data, tmp_path / "data")
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["splits"]["train"]["shards"] = []
    (data / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="has no row to train on"):
        train(tiny_run(data, mesh=ONE_DEVICE), tmp_path / "run")
    assert not (tmp_path / "run").exists()
