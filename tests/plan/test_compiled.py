# SPDX-License-Identifier: Apache-2.0
"""Compiled steps in files: refused unless they are the run's own, and then equal to what is compiled at the start."""

import dataclasses
import json
import os
import resource
import subprocess
import sys

import jax
import pytest
from builders import tiny_run
from processes import TRAIN

from bert_jax.devices.sharding import make_mesh
from bert_jax.errors import InputError
from bert_jax.plan import compiled
from bert_jax.plan.compiled import load_compiled, lower_phase
from bert_jax.settings.pretraining import MeshConfig, ReportConfig, TrainConfig
from bert_jax.training.goodput import KIND, describe
from bert_jax.training.inputs import open_inputs
from bert_jax.training.report import read_metrics
from bert_jax.training.step import abstract_state


def opened(toy_data, **sections):
    """Returns the configuration of a run, its parts, its state and its mesh."""
    config, _, parts = open_inputs(tiny_run(toy_data, mesh=MeshConfig(data=1), **sections))
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    return config, parts, abstract_state(parts[0].objective, config.optimizer, config.train, mesh), mesh


@pytest.fixture(scope="module")
def step(toy_data, tmp_path_factory):
    """Returns a file that says the right things of a run, and no executable that could be loaded."""
    _, parts, state, mesh = opened(toy_data)
    lowered, about = lower_phase(parts[0], state, mesh)
    path = tmp_path_factory.mktemp("compiled") / "step"
    write(path, about)
    return path, about, lowered, mesh


def write(path, about, executable=b"no executable", **changes):
    first = {
        "format": compiled.MAGIC,
        "bytes": len(executable),
        "sha256": compiled.hashlib.sha256(executable).hexdigest(),
    }
    path.write_bytes(json.dumps(first | about | changes).encode() + b"\n" + executable)


def load_again(path, step):
    """Loads a file for the run of the fixture."""
    _, about, lowered, mesh = step
    return compiled.load_step(path, about, lowered, mesh, compiled.read_step(path))


def load(toy_data, path, **sections):
    train = dataclasses.replace(sections.pop("train", TrainConfig(num_steps=12)), compiled=str(path))
    config, parts, state, mesh = opened(toy_data, train=train, **sections)
    return load_compiled(config.train.compiled, parts, state, mesh)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": {"kind": "TPU v5 lite"}}, 'devices.kind is "TPU v5 lite" there and "cpu" here'),
        ({"devices": {"mesh": {"data": 8}}}, "devices.mesh.data is 8 there and 1 here"),
        ({"devices": {"cpu": "arm64, features 0"}}, 'devices.cpu is "arm64, features 0" there'),
        ({"versions": {"jaxlib": "0.9.0"}}, 'versions.jaxlib is "0.9.0" there'),
    ],
)
def test_other_devices_and_versions_are_refused(step, tmp_path, change, message):
    about = json.loads(json.dumps(step[1]))
    for section, values in change.items():
        for name, value in values.items():
            about[section][name] = about[section][name] | value if isinstance(value, dict) else value
    write(tmp_path / "step", about)
    with pytest.raises(InputError) as caught:
        load_again(tmp_path / "step", step)
    assert message in str(caught.value) and "plan --output" in str(caught.value)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": TrainConfig(num_steps=13)}, "settings.train.num_steps is 12 there and 13 here;"),
        ({"train": TrainConfig(num_steps=12, seed=1)}, "settings.train.seed is 0 there and 1 here;"),
    ],
)
def test_settings_that_change_the_program_are_refused_by_name(toy_data, step, sections, message):
    with pytest.raises(InputError, match=message):
        load(toy_data, step[0], **sections)


def test_settings_that_change_no_program_pass(toy_data, step):
    """They get as far as the executable, which is none here."""
    with pytest.raises(InputError, match="cannot be loaded here"):
        load(toy_data, step[0], train=TrainConfig(num_steps=12, hang_seconds=7), report=ReportConfig(every_steps=5))


def test_another_program_of_the_same_settings_is_refused(step, tmp_path):
    write(tmp_path / "step", step[1], program="0" * 64)
    with pytest.raises(InputError, match="does not fit this run: the program, by other code or XLA settings; write"):
        load_again(tmp_path / "step", step)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is not a compiled step of this version"),
        (b"\x00" * 100, "is not a compiled step of this version"),
        (b'{"format": 3}\n', "is not a compiled step of this version"),
        ("cut", "is damaged: it has 12 of 13 bytes"),
        ("flipped", "is damaged"),
    ],
)
def test_damaged_files_are_refused(toy_data, step, tmp_path, content, message):
    path = tmp_path / "step"
    if isinstance(content, str):
        data = step[0].read_bytes()
        content = data[:-1] if content == "cut" else data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        load(toy_data, path)


def command(repository, tmp_path, *arguments):
    """Runs a command with a compilation cache of its own, as on a new host."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / f"cache{len(list(tmp_path.iterdir()))}")}
    environment = os.environ | cache | {"PYTHONPATH": str(repository)}
    os.makedirs(cache["JAX_COMPILATION_CACHE_DIR"])
    return subprocess.run(
        [sys.executable, *arguments], cwd=repository, env=environment, capture_output=True, text=True, timeout=900
    )


@pytest.mark.slow
def test_a_run_from_a_compiled_step_starts_sooner_and_has_the_same_losses(repository, toy_data, tmp_path):
    settings = [*TRAIN[1:], f"--config.data.path={toy_data}"]
    file = tmp_path / "step"
    plan = ["-m", "bert_jax.tools.plan", *settings, "--topology=here", f"--output={file}"]
    done = command(repository, tmp_path, *plan)
    assert done.returncode == 0 and done.stdout.startswith("compiled in "), done.stderr
    runs, seconds = {}, {}  # of the processor: other work on the machine does not count
    for name, more in (("compiled", [f"--config.train.compiled={file}"]), ("usual", [])):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = command(repository, tmp_path, "train.py", *settings, f"--workdir={tmp_path / name}", *more)
        assert done.returncode == 0, done.stderr
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds[name] = after.ru_utime - before.ru_utime
        (*_, last) = read_metrics(tmp_path / name / "metrics.jsonl", [KIND])
        losses = [
            (r["step"], r["kind"], r["loss"], r.get("grad_norm"))
            for r in read_metrics(tmp_path / name / "metrics.jsonl")
        ]
        runs[name] = losses
        print(name, f"{seconds[name]:.1f} s of the processor, {describe(last)}")
    assert runs["compiled"] == runs["usual"]
    assert seconds["compiled"] < seconds["usual"]
    # A flag that the program does not depend on passes; one that it depends on is refused before anything is written.
    wrong = ["--config.optimizer.learning_rate=1e-4", f"--workdir={tmp_path / 'wrong'}"]
    done = command(repository, tmp_path, "train.py", *settings, f"--config.train.compiled={file}", *wrong)
    assert done.returncode == 1 and not (tmp_path / "wrong").exists()
    assert "settings.optimizer.learning_rate is 0.001 there and 0.0001 here" in done.stderr
