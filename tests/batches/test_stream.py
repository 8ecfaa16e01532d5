# SPDX-License-Identifier: Apache-2.0
"""Data sets that are read while a run trains: the batches of local data, little disk, each host its own part."""

import dataclasses
import itertools
import json
import os
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from builders import make_dataset, tiny_run
from object_server import serving
from processes import finish, start
from whole_runs import ONE_DEVICE, assert_same_state, losses, stop_at, train

from bert_jax.batches.load import eval_batches, train_batch, train_batches
from bert_jax.batches.stream import RemoteRows, StreamedSplit, open_for_training
from bert_jax.data import blocks, records
from bert_jax.data.records import MANIFEST, open_dataset
from bert_jax.devices.sharding import make_mesh
from bert_jax.errors import InputError, StoppedError
from bert_jax.settings.pretraining import DataConfig, MeshConfig
from bert_jax.storage import ranges
from bert_jax.training.report import read_metrics

SIZE = 16
CONFIG = DataConfig(batch_size=SIZE, stream="on", streams=8, window_mb=0.01, cache_gb=1.0)


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    """Returns a data set of three shards with blocks of ten rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", 450)
        return make_dataset(tmp_path_factory.mktemp("local"), shards=3, duplicates=8, holdout_rate=0.3)


@pytest.fixture
def server(local, tmp_path, monkeypatch):
    """Yields a server of the data set, to this test's own cache."""
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ranges, "FIRST_PAUSE", 0.01)
    with serving(local.parent) as server:
        yield server


def url_of(server) -> str:
    return f"{server.url}/data"


def open_streamed(path, **changes) -> records.Dataset:
    config = dataclasses.replace(CONFIG, path=str(path), **changes)
    (dataset,), stream = open_for_training(config, [str(path)], [config.batch_size])
    assert stream == "on" and isinstance(dataset.train, StreamedSplit)
    return dataset


def take(split: StreamedSplit, steps, places=None, rows_before: int = 0) -> list[np.ndarray]:
    """Returns the rows of some steps, as this process or host would get them."""
    places = np.arange(SIZE) if places is None else places
    return [split.gather(split.train_rows(step, places, SIZE, rows_before)[0]) for step in steps]


def one_device():
    return make_mesh(MeshConfig(), jax.devices()[:1])


def test_the_batches_are_those_of_local_data_in_the_same_order(server, local):
    ours, theirs = open_streamed(url_of(server)), open_streamed(local)
    steps = 2 * ours.train.num_rows // SIZE + 3  # over two epochs
    for one, other in zip(take(ours.train, range(steps)), take(theirs.train, range(steps)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert ours.fingerprint == theirs.fingerprint and ours.train.num_sequences == theirs.train.num_sequences
    ours.close()


def test_every_sequence_comes_once_in_every_epoch(server):
    dataset = open_streamed(url_of(server))
    numbers, epochs = [], []
    for batch in itertools.islice(
        train_batches(dataset.train, 0, SIZE, 0, one_device()), 2 * dataset.train.num_rows // SIZE + 1
    ):
        numbers.append(np.asarray(batch.sequence_numbers)[:, 0])
        epochs.append(np.asarray(batch.epochs))
    numbers, epochs = np.concatenate(numbers), np.concatenate(epochs)
    local = open_dataset(server.root / "data").train
    everything = sorted(local.gather(np.arange(local.num_rows))["numbers"][:, 0])
    for epoch in range(2):
        assert sorted(numbers[epochs == epoch]) == everything
    dataset.close()


def test_a_run_begins_at_any_step(server, local):
    from_start = take(open_streamed(local).train, range(30))
    other = open_streamed(url_of(server))
    for step, rows in zip(range(25, 30), take(other.train, range(25, 30)), strict=True):
        np.testing.assert_array_equal(rows, from_start[step])
    other.close()
    # Nothing is replayed: what was read are the windows of these steps and the next ones, not those before.
    order = other.train.order
    reached = {part.window for step in range(25, 30) for part in order.parts(step, np.arange(SIZE), SIZE)}
    wanted = set().union(*(order.blocks(w).tolist() for window in reached for w in (window, order.next(window))))
    assert 0 < len(server.data_requests()) <= len(wanted)


def test_the_mesh_does_not_change_the_batch(server):
    whole, parts = open_streamed(url_of(server)), open_streamed(url_of(server))
    for step in (0, 7):
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.device_get(train_batch(whole.train, step, SIZE, 0, one_device())),
            jax.device_get(train_batch(parts.train, step, SIZE, 0, make_mesh(MeshConfig(data=4, tensor=2)))),
        )
    whole.close()
    parts.close()


LOAD = """
import dataclasses, json, sys
import jax, numpy as np
from bert_jax.batches.load import train_batch
from bert_jax.batches.stream import open_for_training
from bert_jax.devices.sharding import make_mesh
from bert_jax.settings.pretraining import DataConfig, MeshConfig

url, output, *joining = sys.argv[1:]
flags = dict(flag.removeprefix("--").split("=") for flag in joining)
jax.distributed.initialize(flags["coordinator"], int(flags["num_processes"]), int(flags["process_id"]))
config = DataConfig(path=url, batch_size=16, stream="on", streams=8, window_mb=0.01, cache_gb=1.0)
(dataset,), _ = open_for_training(config, [url], [16])
mesh, numbers = make_mesh(MeshConfig(data=4)), []
for step in range(dataset.train.num_rows // 16):
    batch = train_batch(dataset.train, step, 16, 0, mesh)
    shards = [np.asarray(shard.data)[:, 0].tolist() for shard in batch.sequence_numbers.addressable_shards]
    numbers.append(sum(shards, []))
found = {"numbers": numbers, "bytes": dataset.train.source.cache.bytes_fetched}
with open(output + flags["process_id"], "w") as file:
    json.dump(found, file)
"""


@pytest.mark.slow
def test_two_processes_read_their_own_halves(repository, server, local, tmp_path):
    """For one epoch. Together they have the batches of one process."""
    arguments = ["-c", LOAD, url_of(server), f"{tmp_path}/found"]
    finish(start(repository, arguments, num_processes=2, devices=2), timeout=400)
    ours, theirs = (json.loads((tmp_path / f"found{number}").read_text()) for number in range(2))
    alone = open_streamed(local).train
    whole = alone.num_rows * alone.dtype.itemsize
    for step, rows in enumerate(take(alone, range(alone.num_rows // SIZE))):
        assert ours["numbers"][step] + theirs["numbers"][step] == rows["numbers"][:, 0].tolist()
    # Half of the data, the blocks at the edges of streams, and the windows of the next epoch that are read ahead.
    assert max(ours["bytes"], theirs["bytes"]) < 0.7 * whole and ours["bytes"] + theirs["bytes"] >= 0.95 * whole


def test_a_host_reads_its_own_streams_only(server, num_hosts=4):
    """Over two epochs with room for its share: an equal part of all rows, once, and blocks that two streams share."""
    shares, read, taken = np.split(np.arange(SIZE), num_hosts), [], []
    for places in shares:
        host = open_streamed(url_of(server))
        server.forget()
        steps = range(2 * host.train.num_rows // SIZE)
        taken.append(take(host.train, steps, places))
        host.close()
        read.append(sum(end - start for _, start, end in server.data_requests()))
    whole = host.train.num_rows * host.train.dtype.itemsize
    edges = 2 * CONFIG.streams / num_hosts * 450
    assert max(read) <= whole / num_hosts + edges and sum(read) >= whole
    alone = open_streamed(url_of(server))
    for step, rows in enumerate(take(alone.train, steps)):
        np.testing.assert_array_equal(np.concatenate([host[step] for host in taken]), rows)
    alone.close()


def test_the_disk_holds_no_more_than_the_limit(server):
    """Here a quarter of the data. What was dropped is read again in the next epoch."""
    limit = 12_000
    dataset = open_streamed(url_of(server), cache_gb=limit / 1e9, window_mb=0.0005, streams=2)
    whole = dataset.train.num_rows * dataset.train.dtype.itemsize
    assert whole > 3 * limit
    theirs = open_streamed(server.root / "data", window_mb=0.0005, streams=2)
    steps = range(2 * dataset.train.num_rows // SIZE)
    held = 0
    for ours, other in zip(take(dataset.train, steps), take(theirs.train, steps), strict=True):
        np.testing.assert_array_equal(ours, other)
        held = max(held, os.fstat(dataset.train.source.cache._file.fileno()).st_size)
    list(eval_batches(dataset.heldout, SIZE, one_device()))
    held += os.fstat(dataset.heldout.cache._file.fileno()).st_size
    assert 0 < held <= limit
    assert dataset.train.source.cache.bytes_fetched > 1.5 * whole
    dataset.close()


def test_a_cache_that_is_too_small_is_refused(server):
    dataset = open_streamed(url_of(server), cache_gb=1.2e-5, window_mb=0.002)
    with pytest.raises(InputError, match=r"data.cache_gb 1.2e-05 is too small for the 8 streams of this process"):
        take(dataset.train, [0])
    dataset.close()
    dataset = open_streamed(url_of(server), cache_gb=5e-7)
    with pytest.raises(InputError, match=r"data.cache_gb is too small for the blocks of http.*/data"):
        take(dataset.train, [0])


def test_the_next_windows_are_read_while_this_one_trains(server):
    dataset = open_streamed(url_of(server))
    take(dataset.train, [0])
    order, cache = dataset.train.order, dataset.train.source.cache
    windows = [part.window for part in order.parts(0, np.arange(SIZE), SIZE)]
    wanted = set().union(*(order.blocks(w).tolist() for window in windows for w in (window, order.next(window))))
    deadline = time.monotonic() + 20
    while len(cache._slots) < len(wanted):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    count = len(server.data_requests())
    assert count == len(wanted) < len(order.block_rows)
    last = min(order.first_turn(order.next(window)) for window in windows) // (SIZE // order.num_streams)
    take(dataset.train, range(1, last))
    assert len(server.data_requests()) == count
    dataset.close()


@pytest.mark.parametrize(
    ("stream", "cache_gb", "expected"), [("auto", 1.0, "auto"), ("auto", 1e-5, "on"), ("off", 1e-5, "off")]
)
def test_data_behind_a_url_are_streamed_if_they_do_not_fit(server, stream, cache_gb, expected):
    config = dataclasses.replace(CONFIG, stream=stream, cache_gb=cache_gb)
    (dataset,), found = open_for_training(config, [url_of(server)], [SIZE])
    assert found == expected and isinstance(dataset.train, StreamedSplit) == (expected == "on")
    assert bool(server.data_requests()) == (expected != "on")  # nothing is read before it is needed


def test_local_data_are_streamed_only_if_asked_for(local):
    config = dataclasses.replace(CONFIG, stream="auto", cache_gb=1e-6)
    (dataset,), found = open_for_training(config, [str(local)], [SIZE])
    assert found == "auto" and isinstance(dataset.train, records.LocalRows)


def test_phases_with_the_same_data_have_one_order(local, tmp_path):
    config = dataclasses.replace(CONFIG, streams=8)
    (first, second), _ = open_for_training(config, [str(local)] * 2, [SIZE, 6])
    assert first.train.order.num_streams == second.train.order.num_streams == 8
    shutil.copytree(local, tmp_path / "copy")
    (first, second), _ = open_for_training(config, [str(local), str(tmp_path / "copy")], [SIZE, 6])
    assert second.train.order.num_streams == 8  # wherever they are
    other = make_dataset(tmp_path, row_length=48)
    (first, second), _ = open_for_training(config, [str(local), str(other)], [SIZE, 6])
    assert second.train.order.num_streams == 6


def test_heldout_rows_are_read_in_order_and_ahead(server, local):
    dataset = open_streamed(url_of(server))
    theirs = open_dataset(local).heldout
    assert isinstance(dataset.heldout, RemoteRows) and theirs.num_rows > 40
    for _ in range(2):
        pairs = zip(eval_batches(dataset.heldout, 8, one_device()), eval_batches(theirs, 8, one_device()), strict=True)
        for ours, other in pairs:
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(ours), jax.device_get(other))
    requests = [request for request in server.data_requests() if "heldout" in request[0]]
    assert len(requests) == -(-theirs.num_rows // 10)  # once, as there is room for all
    assert len(dataset.heldout.gather(np.empty(0, np.int64))) == 0
    dataset.close()


def test_bytes_that_are_not_what_was_written_are_refused(server, monkeypatch):
    monkeypatch.setattr(ranges, "TRIES", 3)
    server.fault = lambda path, start: "wrong" if "-of-" in path else ""
    dataset = open_streamed(url_of(server))
    problem = (
        r"/data/train-0000\d-of-00003.npy: rows \d+ to \d+ are damaged: their checksum is not the manifest's, at "
        r"the last of 3 tries in \d+ s"
    )
    with pytest.raises(StoppedError, match=problem):
        take(dataset.train, [0])
    dataset.close()


def test_a_server_with_hiccups_gives_the_same_batches(server, local):
    """A place is refused once at most, so that no request runs out of tries, in whatever order they come."""
    seen: dict[tuple[str, int], str] = {}

    def fault(path, start):
        if "-of-" not in path or (path, start) in seen:
            return ""
        return seen.setdefault((path, start), ("500", "", "cut", "429", "wrong")[len(seen) % 5])

    server.retry_after = "0"
    server.fault = fault
    ours, theirs = open_streamed(url_of(server)), open_streamed(local)
    for one, other in zip(take(ours.train, range(20)), take(theirs.train, range(20)), strict=True):
        np.testing.assert_array_equal(one, other)
    ours.close()
    assert {"500", "cut", "429", "wrong"} <= set(seen.values())


def test_data_of_earlier_versions_cannot_be_checked_block_by_block(server, local, tmp_path):
    shutil.copytree(local, tmp_path / "data")
    manifest = json.loads((tmp_path / "data" / MANIFEST).read_text())
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            del shard["blocks"]
    (tmp_path / "data" / MANIFEST).write_text(json.dumps(manifest))
    server.root = tmp_path
    with pytest.raises(
        InputError, match=r"was made by an earlier version: its blocks have no checksums.*data.verify=False"
    ):
        open_streamed(url_of(server))
    ours, theirs = open_streamed(url_of(server), verify=False), open_streamed(tmp_path / "data")
    for one, other in zip(take(ours.train, range(9)), take(theirs.train, range(9)), strict=True):
        np.testing.assert_array_equal(one, other)
    ours.close()


def test_a_manifest_that_contradicts_itself_is_refused(server, local, tmp_path):
    shutil.copytree(local, tmp_path / "data")
    manifest = json.loads((tmp_path / "data" / MANIFEST).read_text())
    manifest["splits"]["train"]["shards"][0]["bytes"] = 5
    (tmp_path / "data" / MANIFEST).write_text(json.dumps(manifest))
    server.root = tmp_path
    with pytest.raises(InputError, match=r"manifest's bytes of train-00000-of-00003.npy are too few"):
        open_streamed(url_of(server))


def test_the_checksums_of_blocks_are_those_of_their_rows(local):
    dataset = open_dataset(local)
    for name in ("train", "heldout"):
        for index, shard in enumerate(dataset.manifest["splits"][name]["shards"]):
            split = getattr(dataset, name)
            rows = split.shards[index].view(split.dtype)[:, 0]
            assert shard["blocks"]["rows"] == 450 // rows.dtype.itemsize
            sums = blocks.BlockSums(shard["blocks"]["rows"], rows.dtype.itemsize)
            content = rows.tobytes()
            for place in range(0, len(content), 77):  # however they were written
                sums.update(content[place : place + 77])
            assert sums.result() == shard["blocks"]
            assert len(shard["blocks"]["crc32c"]) == 8 * -(-len(rows) // shard["blocks"]["rows"])


# Runs


def run_of(path, **changes):
    data = dataclasses.replace(CONFIG, path=str(path))
    return tiny_run(path, data=data, mesh=ONE_DEVICE, **changes)


@pytest.mark.slow
def test_a_run_that_streams_is_that_on_local_data_and_resumes_exactly(server, local, tmp_path, monkeypatch):
    theirs = train(run_of(local), tmp_path / "local")
    server.rate = 100e6
    ours = train(run_of(url_of(server)), tmp_path / "whole")
    waits = [r["data_wait"] for r in read_metrics(tmp_path / "whole" / "metrics.jsonl") if "data_wait" in r]
    assert len(waits) > 5 and np.median(waits) < 0.005
    assert losses(tmp_path / "whole") == losses(tmp_path / "local")
    assert_same_state(ours.state, theirs.state)
    with monkeypatch.context() as patch:
        stop_at(patch, 7)
        assert 7 <= train(run_of(url_of(server)), tmp_path / "stopped").step < 12
    resumed = train(run_of(url_of(server)), tmp_path / "stopped")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert_same_state(resumed.state, ours.state)


@pytest.mark.slow
def test_another_order_is_not_resumed_with(server, local, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        train(run_of(url_of(server)), tmp_path / "run")
    for changes in ({"stream": "off"}, {"streams": 4}, {"window_mb": 1.0}):
        config = run_of(url_of(server))
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, **changes))
        with pytest.raises(InputError, match=rf"belongs to a run with another data.{next(iter(changes))}"):
            train(config, tmp_path / "run")
    config = run_of(local)  # the same data elsewhere, and a larger cache
    train(dataclasses.replace(config, data=dataclasses.replace(config.data, cache_gb=2.0)), tmp_path / "run")


@pytest.mark.slow
def test_a_server_that_fails_for_good_ends_the_run_in_one_line(server, tmp_path, monkeypatch):
    """And the run goes on from its last checkpoint when the server is back."""
    monkeypatch.setattr(ranges, "TRIES", 3)
    config = run_of(url_of(server))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, window_mb=0.001))
    calls = itertools.count()
    server.fault = lambda path, start: "500" if "train" in path and next(calls) > 18 else ""
    with pytest.raises(StoppedError, match=r"cannot read http.*train-0.*npy: .*500.* at the last of 3 tries"):
        train(config, tmp_path / "run")
    assert 0 < len(losses(tmp_path / "run")) < 12
    server.fault = lambda path, start: ""
    train(config, tmp_path / "run")
    assert sorted(losses(tmp_path / "run")) == list(range(1, 13))
