# SPDX-License-Identifier: Apache-2.0
"""Several processes of which one is wrong, late, or dead: all end, soon, and say which it was."""

import shutil
import signal
import time
from pathlib import Path

import processes
import pytest
from builders import make_dataset
from processes import TRAIN, finish, told, wait_for_lines, wait_until

from bert_jax.checkpoints.sealed import checkpoint_steps

pytestmark = pytest.mark.slow
# Runs the command in another folder.
IN_FOLDER = """
import os, runpy, sys
sys.path.insert(0, os.getcwd())
sys.argv = [word.replace("configs/", os.path.abspath("configs") + "/") for word in sys.argv[1:]]
sys.argv[0] = os.path.abspath(sys.argv[0])
os.chdir({folder!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SOON = 60  # seconds, from what went wrong to the end of the last process


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"))


def start(repository, data, workdir, more=None, count=2, common=()):
    arguments = [*TRAIN, f"--workdir={workdir}", f"--config.data.path={data}", *common]
    return processes.start(repository, arguments, count, more=more)


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("--config.data.batch_size=32", "has run.data.batch_size 32, and process 0"),
        ("--config.data.path=OTHER", "has dataset "),
        ("--workdir=elsewhere", "has workdir 'elsewhere', and process 0"),
    ],
)
def test_what_differs_on_one_is_named_on_all_and_nothing_is_written(repository, data, tmp_path, argument, line):
    argument = argument.replace("OTHER", str(make_dataset(tmp_path, duplicates=1)))
    began = time.monotonic()
    errors = told(finish(start(repository, data, tmp_path / "run", {1: [argument]}), expected=1))
    for lines in errors:
        assert len(lines) == 1 and lines[0].startswith("error: process 1 (") and line in lines[0], lines
    assert time.monotonic() - began < SOON
    assert not (tmp_path / "run").exists() and not (repository / "elsewhere").exists()


def of_two_hosts(folder):
    """Returns scripts that run two processes in folders of their own: a path is two places, as on hosts with disks."""
    scripts = {}
    for number, host in enumerate(("first", "second")):
        (folder / host).mkdir(exist_ok=True)
        scripts[number] = str(folder / f"{host}.py")
        Path(scripts[number]).write_text(IN_FOLDER.format(folder=str(folder / host)))
    return scripts


def test_a_teacher_that_one_lacks_is_named_by_that_one_and_by_no_other(repository, data, tmp_path):
    """The others end with it; none of them takes a whole model for a damaged one."""
    command = [*TRAIN, f"--workdir={tmp_path / 'first' / 'model'}", f"--config.data.path={data}"]
    finish(processes.start(repository, [*command, "--config.train.num_steps=2"], 1))
    arguments = [*TRAIN, f"--workdir={tmp_path / 'run'}", f"--config.data.path={data}"]
    arguments.append("--config.teacher.checkpoint=model")
    errors = finish(processes.start(repository, arguments, 2, script=of_two_hosts(tmp_path)), expected=1)
    (first,), (second,) = told(errors)
    assert "error: model does not exist" in second
    assert "process 1 (" in first and "model does not exist" in first
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_shard_that_one_lacks_ends_all_with_its_line(repository, data, tmp_path):
    shutil.copytree(data, tmp_path / "copy")
    shard = next((tmp_path / "copy").glob("train-*.npy"))
    shard.unlink()
    began = time.monotonic()
    more = {1: [f"--config.data.path={tmp_path / 'copy'}"]}
    others, its_own = told(finish(start(repository, data, tmp_path / "run", more), expected=1))
    assert len(its_own) == 1 and f"{shard} is missing" in its_own[0]
    assert len(others) == 1 and others[0].startswith("error: process 1 (") and f"{shard} is missing" in others[0]
    assert time.monotonic() - began < SOON


# Checks the counts, and the shards, for 45 seconds each, and is then the command that it is given.
LATE = """
import runpy, sys, time
from bert_jax.storage import files

check = files.check_sizes
files.check_sizes = lambda *arguments: (time.sleep(45), check(*arguments))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_process_that_is_minutes_late_with_its_data_is_waited_for(repository, data, tmp_path):
    """As a cold cache makes it. JAX alone waits two minutes for the devices of the others."""
    arguments = [*TRAIN, f"--workdir={tmp_path / 'run'}", f"--config.data.path={data}", "--config.train.num_steps=2"]
    script = tmp_path / "late.py"
    script.write_text(LATE)
    assert "trained to step 2" in finish(processes.start(repository, arguments, 2, script={1: str(script)}))[0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_that_dies_or_hangs_ends_the_others_with_its_number(repository, data, tmp_path, number):
    common = ["--config.train.num_steps=100000", "--lost_seconds=20"]
    running = start(repository, data, tmp_path / "run", common=common)
    wait_for_lines(tmp_path / "run" / "metrics.jsonl", 12, running)
    wait_until(lambda: checkpoint_steps(tmp_path / "run" / "checkpoints"), running)  # saved beside the steps
    running[1].send_signal(number)
    began = time.monotonic()
    error = running[0].communicate(timeout=SOON)[1]
    assert time.monotonic() - began < SOON
    running[1].kill()
    running[1].communicate()
    assert running[0].returncode == 75, error
    (lines,) = told([error])
    assert len(lines) == 1 and lines[0].startswith("error: process 1 (") and "resumes" in lines[0], error
    assert "Traceback" not in error
    # What was saved is whole: one process goes on from it.
    arguments = [*TRAIN, f"--workdir={tmp_path / 'run'}", f"--config.data.path={data}", "--config.train.num_steps=40"]
    if number == signal.SIGKILL:
        assert "resume from step" in finish(processes.start(repository, arguments, 1))[0]


def test_the_first_one_killed_ends_the_others_at_once(repository, data, tmp_path):
    """The others lose the store in which they find each other: JAX itself ends them then, with a message of its own."""
    common = ["--config.train.num_steps=100000", "--config.data.batch_size=18"]
    running = start(repository, data, tmp_path / "run", common=common, count=3)
    wait_for_lines(tmp_path / "run" / "metrics.jsonl", 12, running)
    running[0].kill()
    began = time.monotonic()
    statuses = [process.communicate(timeout=SOON) and process.returncode for process in running[1:]]
    assert time.monotonic() - began < SOON and 0 not in statuses


def test_the_first_one_stopped_ends_the_others(repository, data, tmp_path):
    """Questions to its store wait for ever: nothing breaks off, and nothing is answered."""
    running = start(repository, data, tmp_path / "run", common=["--config.train.num_steps=100000", "--lost_seconds=20"])
    wait_for_lines(tmp_path / "run" / "metrics.jsonl", 12, running)
    running[0].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        error = running[1].communicate(timeout=SOON)[1]
    finally:
        running[0].kill()
        running[0].communicate()
    assert time.monotonic() - began < SOON and running[1].returncode == 75, error
    (lines,) = told([error])
    assert len(lines) == 1 and lines[0].startswith("error: process 0 has not answered for"), error


def test_a_job_that_is_stopped_as_a_whole_goes_on_later(repository, data, tmp_path):
    """As schedulers suspend jobs: nobody has heard of anybody, and all are well."""
    running = start(repository, data, tmp_path / "run", common=["--config.train.num_steps=60", "--lost_seconds=10"])
    wait_for_lines(tmp_path / "run" / "metrics.jsonl", 12, running)
    for process in running:
        process.send_signal(signal.SIGSTOP)
    time.sleep(20)
    for process in running:
        process.send_signal(signal.SIGCONT)
    assert "trained to step 60" in finish(running)[0]


def test_one_that_wakes_when_the_others_have_ended_says_so(repository, data, tmp_path):
    running = start(repository, data, tmp_path / "run", common=["--config.train.num_steps=100000", "--lost_seconds=10"])
    wait_for_lines(tmp_path / "run" / "metrics.jsonl", 12, running)
    running[1].send_signal(signal.SIGSTOP)
    assert running[0].communicate(timeout=SOON) and running[0].returncode == 75
    running[1].send_signal(signal.SIGCONT)
    error = running[1].communicate(timeout=SOON)[1]
    assert running[1].returncode == 75, error
    (lines,) = told([error])
    assert len(lines) == 1 and "process 0" in lines[0] and "resumes from the last checkpoint" in lines[0], error
    assert "Fatal" not in error and "Traceback" not in error, error


def test_one_of_two_alone_says_so_in_one_line(repository, data, tmp_path):
    running = start(repository, data, tmp_path / "run", common=["--join_seconds=10"])
    running[1].kill()
    error = running[0].communicate(timeout=SOON)[1]
    assert running[0].returncode == 1
    (lines,) = told([error])
    assert len(lines) == 1 and "not all of 2 processes came together" in lines[0] and "10 s" in lines[0], error
    assert "Check failure stack trace" not in error and "Traceback" not in error


def test_a_work_directory_that_is_not_shared_is_refused(repository, data, tmp_path):
    arguments = [*TRAIN, "--workdir=run", f"--config.data.path={data}"]
    running = processes.start(repository, arguments, 2, script=of_two_hosts(tmp_path))
    for lines in told(finish(running, expected=1)):
        assert len(lines) == 1 and "process 1 (" in lines[0] and "give a directory that all processes share" in lines[0]


# Joins by itself, as a program of its own does, and then trains.
OWN_PROGRAM = """
import pathlib, sys
import jax
from bert_jax import InputError, PretrainConfig, pretrain
from bert_jax.settings.pretraining import DataConfig, MaskingConfig, ModelConfig, OptimizerConfig, TrainConfig

data, workdir, *joining = sys.argv[1:]
address, count, number = (each.partition("=")[2] for each in joining)
jax.distributed.initialize(address, int(count), int(number))
config = PretrainConfig(
    data=DataConfig(path=data, batch_size=16, seed=1 + int(number)),
    model=ModelConfig(hidden_size=32, num_heads=4, num_layers=2, intermediate_size=64, max_positions=32),
    optimizer=OptimizerConfig(warmup_steps=1),
    masking=MaskingConfig(max_predictions=5),
    train=TrainConfig(num_steps=2),
)
try:
    print(pretrain(config, pathlib.Path(workdir)).step, file=sys.stderr)
except InputError as error:
    print(f"error: {error}", file=sys.stderr)
"""


def test_a_program_that_has_joined_by_itself_agrees_with_the_others_too(repository, data, tmp_path):
    program = tmp_path / "own.py"
    program.write_text(OWN_PROGRAM)
    errors = finish(processes.start(repository, [str(program), str(data), str(tmp_path / "run")], 2))
    for lines in told(errors):
        assert len(lines) == 1 and "has run.data.seed 2, and process 0" in lines[0], errors
    assert not (tmp_path / "run").exists()


# Fails on the second process, in the first save, when the first one waits for it.
FAILING = """
from bert_jax.checkpoints import states
from bert_jax.devices import job

def fail(self, needed):
    raise ZeroDivisionError("of this process alone")

job._LOST_SECONDS = 5.0
if "1" in sys.argv[-1].partition("=")[2]:
    states.Checkpoints._check_writable = fail
"""


def test_a_program_that_has_joined_by_itself_learns_which_process_failed(repository, data, tmp_path):
    program = tmp_path / "own.py"
    own = OWN_PROGRAM.replace("1 + int(number)", "0")
    program.write_text(own.replace("data, workdir, *", FAILING + "data, workdir, *"))
    running = processes.start(repository, [str(program), str(data), str(tmp_path / "run")], 2)
    first = running[0].communicate(timeout=300)[1]
    running[1].kill()  # it may wait for the first one at its end
    assert "ZeroDivisionError: of this process alone" in running[1].communicate()[1]
    assert "error: process 1 (" in first and "has not been heard of for " in first, first


# Makes the work directory read-only for this process alone, once there are so many records, as a lost mount is.
READ_ONLY = """
import ctypes, os, pathlib, runpy, sys, threading, time

place, lines, probes = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "probes"
sys.argv = sys.argv[4:]
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit(99)  # this user may not mount

def lock_up():
    records = pathlib.Path(place, "metrics.jsonl")
    while lines and not (records.exists() and records.read_text().count("\\n") >= lines):
        time.sleep(0.01)
    if not probes:
        from bert_jax.checkpoints import states
        states.Checkpoints._touch = lambda self: None
    for options in (4096, 4096 | 32 | 1):  # bind, and again as read-only
        if libc.mount(place.encode(), place.encode(), None, options, None):
            os._exit(98)

(threading.Thread(target=lock_up).start if lines else lock_up)()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("lines", "probes"), [(0, True), (12, False)])
def test_one_that_cannot_write_ends_all_at_once_with_its_number(repository, data, tmp_path, lines, probes):
    """Before the first step, and in the midst of a save, where the others wait in Orbax."""
    workdir = tmp_path / "run"
    workdir.mkdir()
    script = tmp_path / "read_only.py"
    script.write_text(READ_ONLY)
    through = [str(script), str(workdir), str(lines), "probes" if probes else "none"]
    arguments = [*TRAIN, f"--workdir={workdir}", f"--config.data.path={data}", "--config.train.num_steps=100000"]
    running = processes.start(repository, arguments, 2, script={1: through})
    try:
        errors = [process.communicate(timeout=3 * SOON)[1] for process in running]
    finally:
        for process in running:
            process.kill()
    if running[1].returncode == 99:
        pytest.skip("no file system can be mounted here")
    assert [process.returncode for process in running] == [1, 1], "\n\n".join(errors)
    for lines_of_one in told(errors):
        assert len(lines_of_one) == 1 and str(workdir) in lines_of_one[0], errors
        assert "ead-only" in lines_of_one[0] or "ermission" in lines_of_one[0], errors
    assert "process 1 (" in told(errors)[0][0] and "Traceback" not in "".join(errors), errors
    assert (workdir / "metrics.jsonl").exists() == (lines > 0)


# Stops the loader of one process for good while the process itself goes on, as a dead file server does.
HANGING = """
import runpy, sys, time
from bert_jax.batches import load

make = load.train_batch
load.train_batch = lambda split, step, *others: time.sleep(10_000) if step == 5 else make(split, step, *others)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_run_in_which_nothing_ends_prints_its_stacks_and_ends(repository, data, tmp_path):
    arguments = [*TRAIN, f"--workdir={tmp_path / 'run'}", f"--config.data.path={data}", "--config.train.hang_seconds=8"]
    script = tmp_path / "hanging.py"
    script.write_text(HANGING)
    errors = finish(processes.start(repository, arguments, 2, script={1: str(script)}), expected=76)
    assert sum("(train.hang_seconds 8)" in error for error in errors) >= 1
    for error in errors:
        assert "Thread 0x" in error and "loop.py" in error, error
