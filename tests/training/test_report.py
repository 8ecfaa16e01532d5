# SPDX-License-Identifier: Apache-2.0
import io
import json
import math
import shutil
import subprocess
import sys

import pytest

from bert_jax.errors import InputError, StoppedError
from bert_jax.training.report import METRICS_FILE, Reporter, read_metrics
from bert_jax.training.shown import describe

EVAL = {"mlm_loss": 5.0, "mlm_accuracy": 0.25, "nsp_accuracy": 0.6, "unigram_loss": 6.5, "nsp_base_rate": 0.5}


def reported(path):
    return [(record["step"], record["kind"], record["loss"]) for record in read_metrics(path)]


def test_records_are_lines_of_strict_json(tmp_path, capsys):
    with Reporter(tmp_path, 20, tensorboard=False) as reporter:
        reporter.log(10, "train", {"loss": 1.5, "grad_norm": math.inf})
        reporter.log(10, "eval", {"loss": math.nan})
    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / METRICS_FILE).read_text().splitlines()
    ]
    assert [sorted(line) for line in lines] == [
        ["grad_norm", "kind", "loss", "step", "time"],
        ["kind", "loss", "step", "time"],
    ]
    train, evaluation = read_metrics(tmp_path / METRICS_FILE)
    assert (train["step"], train["kind"], train["loss"], train["grad_norm"]) == (10, "train", 1.5, math.inf)
    assert math.isnan(evaluation["loss"])
    written = capsys.readouterr().err.splitlines()
    assert written[0].startswith("train 10/20  loss 1.500") and written[0].endswith("left")


def test_resuming_leaves_one_curve(tmp_path):
    with Reporter(tmp_path, 30) as reporter:
        for step in (10, 20, 30):
            reporter.log(step, "train", {"loss": float(step)})
    with Reporter(tmp_path, 30, start_step=20) as reporter:
        reporter.log(30, "train", {"loss": 0.5})
    assert reported(tmp_path / METRICS_FILE) == [(10, "train", 10), (20, "train", 20), (30, "train", 0.5)]
    assert {path.name for path in tmp_path.iterdir()} == {METRICS_FILE, "tensorboard"}


def test_a_fresh_start_forgets_what_was_reported(tmp_path):
    for loss in (1.0, 2.0):  # the second attempt starts again: the first was killed before its first checkpoint
        with Reporter(tmp_path, 30, tensorboard=False) as reporter:
            reporter.log(0, "eval", {"loss": loss})
    assert reported(tmp_path / METRICS_FILE) == [(0, "eval", 2)]


def test_a_half_written_last_line_is_dropped(tmp_path):
    path = tmp_path / METRICS_FILE
    whole = '{"step": 10, "kind": "train", "time": 1.0, "loss": 2.5}\n'
    for half in ('{"step": 20, "kind": "tr', "2", "\x00" * 20, '{"kind": "train"}'):
        path.write_text(whole + half)
        assert reported(path) == [(10, "train", 2.5)]
    with Reporter(tmp_path, 30, start_step=10, tensorboard=False) as reporter:
        reporter.log(20, "train", {"loss": 2.0})
    assert reported(path) == [(10, "train", 2.5), (20, "train", 2)]
    assert path.read_text().startswith(whole)


def test_a_damaged_line_before_the_last_is_named(tmp_path):
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1, "kind"\n{"step": 2, "kind": "train"}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl is damaged at line 1"):
        read_metrics(path)
    with pytest.raises(InputError, match="No such file"):
        read_metrics(tmp_path / "missing")


@pytest.mark.parametrize("act", ["deleted", "moved"])
def test_a_work_directory_that_goes_ends_its_run(tmp_path, act):
    workdir = tmp_path / "run"
    with pytest.raises(StoppedError, match=r"metrics\.jsonl is gone"):
        with Reporter(workdir, 4, tensorboard=False, progress=False) as reporter:
            reporter.log(1, "train", {"loss": 2.0})
            workdir.rename(tmp_path / "elsewhere") if act == "moved" else shutil.rmtree(workdir)
            reporter.log(2, "train", {"loss": 1.0})


def test_a_disabled_reporter_writes_nothing(tmp_path, capsys):
    with Reporter(tmp_path / "run", 10, enabled=False) as reporter:
        reporter.message("hello")
        reporter.log(1, "train", {"loss": 1.0})
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr() == ("", "")


def test_tensorboard_gets_scalars_and_a_purge_step(tmp_path):
    from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    with Reporter(tmp_path, 30, start_step=10) as reporter:
        reporter.log(20, "train", {"loss": 2.5})
    (file,) = (tmp_path / "tensorboard").iterdir()
    events, data = [], file.read_bytes()
    while data:  # length (8 bytes), its checksum (4), the event, its checksum (4)
        size = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    assert next(event.step for event in events if event.HasField("session_log")) == 11
    scalars = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert scalars == [(20, "train/loss", 2.5)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_whole_lines(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Reporter(tmp_path, 40, tensorboard=False) as reporter:
        reporter.message("hello")
        reporter.log(20, "train", {"loss": 2.5, "tokens_per_second": 1234.0, "mfu": 0.5, "grad_norm": 1.0})
        reporter.log(20, "eval", {"loss": 2.0})
    written = terminal.getvalue().replace("\r", "\n").splitlines()
    assert "hello" in written and "eval  20/40  loss 2.000" in [line.strip() for line in written]
    assert any("20/40" in line and "loss 2.500  1.23 ktok/s  MFU 50.0%" in line for line in written), written


def test_describe():
    rates = {"sequences_per_second": 3.14159, "flops_per_second": 2.5e14}
    assert describe({"loss": 2.0, "learning_rate": 1e-4} | rates) == "loss 2.000  lr 1.00e-04  3.14 seq/s  250 TFLOP/s"
    assert describe({"flops_per_second": 2.5e14, "mfu": 0.253}) == "MFU 25.3%"
    assert describe({"mlm_loss": 5.0, "unigram_loss": 6.5}) == "mlm 5.000 (baseline 6.500)"
    assert describe({"f1_score": 0.5}) == "f1 score 0.5"


def test_heavy_libraries_are_imported_when_needed(repository):
    heavy = "{'jax', 'matplotlib', 'tensorboardX', 'tqdm'}"
    code = f"import sys, bert_jax.training.report; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=repository) == "[]\n"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"step": "2", "kind": "train"}', "Expected `int`, got `str` - at `$.step`"),
        ('{"step": 1e400, "kind": "train"}', "Expected `int`, got `float` - at `$.step`"),
        ('{"step": 2, "kind": ["train"]}', "Expected `str`, got `array` - at `$.kind`"),
        ('{"step": 2, "kind": "train", "loss": {}}', "Expected `float | str`, got `object`"),
        ('{"step": 2, "kind": "train", "loss": "high"}', "Invalid enum value 'high'"),
        ('{"kind": "train"}', "Object missing required field `step`"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_line_with_a_wrong_value_says_what_stands_there(tmp_path, line, reason):
    (tmp_path / METRICS_FILE).write_text(f'{line}\n{{"step": 2, "kind": "train"}}\n')
    with pytest.raises(InputError, match="is damaged at line 1") as caught:
        read_metrics(tmp_path / METRICS_FILE)
    assert reason in str(caught.value) and "\n" not in str(caught.value)
