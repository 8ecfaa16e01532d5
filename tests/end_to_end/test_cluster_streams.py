# SPDX-License-Identifier: Apache-2.0
"""Real processes that read one data set from a server while they train: the losses of one process, half the bytes."""

import processes
import pytest
from builders import make_dataset
from object_server import serving
from processes import TRAIN, finish, wait_for_lines

from bert_jax.training.report import read_metrics

pytestmark = pytest.mark.slow
# Windows of 29 rows in blocks of 10; the data set has some hundreds.
STREAM = (
    "--config.data.stream=on",
    "--config.data.streams=8",
    "--config.data.window_mb=0.01",
    "--config.data.cache_gb=0.001",
    "--config.eval.every_steps=0",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Returns the directory of a data set with blocks of ten rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bert_jax.data.blocks.BLOCK_BYTES", 450)
        return make_dataset(tmp_path_factory.mktemp("data"), shards=3, duplicates=4)


@pytest.fixture
def server(data, tmp_path, monkeypatch):
    """Yields a server of the data set, to processes with a cache of their own."""
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    with serving(data.parent) as server:
        yield server


def start(repository, path, workdir, num_processes):
    arguments = [*TRAIN, f"--workdir={workdir}", f"--config.data.path={path}", *STREAM]
    return processes.start(repository, arguments, num_processes)


def losses(workdir):
    return {r["step"]: r["mlm_loss"] for r in read_metrics(workdir / "metrics.jsonl") if r["kind"] == "train"}


def test_processes_that_stream_have_the_losses_of_one_on_local_data(repository, data, server, tmp_path):
    finish(start(repository, data, tmp_path / "local", 1))
    read = {}
    for count in (1, 2):
        server.forget()
        finish(start(repository, f"{server.url}/data", tmp_path / str(count), count))
        read[count] = sum(end - begin for name, begin, end in server.data_requests() if "train" in name)
        assert losses(tmp_path / str(count)) == pytest.approx(losses(tmp_path / "local"), rel=2e-4)
    assert sorted(losses(tmp_path / "2")) == list(range(1, 25))
    # Together two read what one reads, and the blocks at the edges of streams, which two may share.
    assert read[1] <= read[2] <= read[1] + 2 * 450 * 8


def test_a_run_of_two_goes_on_as_one_at_the_same_row(repository, data, server, tmp_path):
    workdir, url = tmp_path / "run", f"{server.url}/data"
    running = start(repository, url, workdir, 2)
    wait_for_lines(workdir / "metrics.jsonl", 4, running)
    running[1].terminate()
    finish(running, 128 + 15)
    reached = max(losses(workdir))
    finish(start(repository, url, workdir, 1))
    finish(start(repository, data, tmp_path / "whole", 1))
    assert reached < 24 and losses(workdir) == pytest.approx(losses(tmp_path / "whole"), rel=2e-4)
