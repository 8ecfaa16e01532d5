# SPDX-License-Identifier: Apache-2.0
"""Work directories in an object store: killed, resumed, damaged, wanted by two runs, shared by two processes."""

import contextlib
import json
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import processes
import pytest
from buckets import behind_a_front, variables
from builders import make_dataset, tiny_run
from whole_runs import ONE_DEVICE, assert_same_state, losses, train

import bert_jax
from bert_jax.checkpoints.sealed import SEAL, read_seal, state_place
from bert_jax.errors import InputError
from bert_jax.settings.pretraining import CheckpointConfig
from bert_jax.storage.leases import LEASE
from bert_jax.storage.places import to_place
from bert_jax.training.report import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp("data"))


def start(repository, data, workdir, num_processes=1):
    """Returns the processes of a run of 24 steps that saves every 8."""
    command = [*processes.TRAIN, f"--workdir={workdir}", f"--config.data.path={data}"]
    command += ["--config.report.tensorboard=True", "--config.report.every_steps=3"]
    return processes.start(repository, command, num_processes)


def kill_at(front, what, number, running):
    """Makes a server kill all processes by SIGKILL in place of answering the nth upload of objects named `what`."""
    seen = []

    def rule(method, path):
        if method == "POST" and "/upload/" in path and what in path:
            seen.append(path)
            if len(seen) == number:
                for process in running:
                    process.send_signal(signal.SIGKILL)
            if len(seen) >= number:
                return 503, "killed"
        return None

    front.rule = rule


def state_at(run, step):
    """Returns a saved state, optimizer and all, as NumPy arrays: also that of devices of other processes."""
    directory = to_place(f"{run}/checkpoints/{step:08d}")
    path = str(state_place(directory, read_seal(directory)))
    with contextlib.closing(ocp.PyTreeCheckpointer()) as checkpointer:
        saved = checkpointer.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
        state = checkpointer.restore(path, ocp.args.PyTreeRestore(restore_args=as_numpy))
    assert {"params", "optimizer", "step"} <= state.keys() and int(state["step"]) == step
    return state


def assert_same_run(ours, theirs):
    """Fails unless two finished runs of 24 steps have the same records, state and model, bit for bit."""
    for kind in ("train", "eval"):
        assert losses(to_place(ours), kind) == losses(to_place(theirs), kind)
    order = [
        [(record["kind"], record["step"]) for record in read_metrics(f"{run}/metrics.jsonl")] for run in (ours, theirs)
    ]
    assert order[0] == order[1] and len(order[0]) == 12
    states = [state_at(run, 24) for run in (ours, theirs)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    assert_same_state(*states)
    assert_same_state(*(bert_jax.load_pretrained(f"{run}/pretrained").params for run in (ours, theirs)))


@pytest.mark.parametrize("count", [1, 2])
def test_killed_in_a_save_and_at_its_seal_it_ends_as_an_undisturbed_local_run(
    repository, data, bucket_server, bucket, tmp_path, count
):
    """Of one process, and of two, each of which writes its own."""
    processes.finish(start(repository, data, tmp_path / "run", count), timeout=900)
    workdir = f"{bucket}/run"
    with behind_a_front(bucket_server) as (server, front), variables(server.environment):
        running = start(repository, data, workdir, count)
        kill_at(front, "checkpoints/00000016/state", 3, running)
        processes.finish(running, expected=-signal.SIGKILL, timeout=900)
        names = server.names(workdir)
        assert [name for name in names if name.startswith("checkpoints/00000016/")] and LEASE in names
        assert f"checkpoints/00000016/{SEAL}" not in names and f"checkpoints/00000008/{SEAL}" in names

        running = start(repository, data, workdir, count)
        kill_at(front, f"checkpoints/00000016/{SEAL}", 1, running)
        told = processes.finish(running, expected=-signal.SIGKILL, timeout=900)
        assert "resume from step 8" in told[0]
        assert "checkpoints/00000016/commit_success.txt" in server.names(workdir)  # Orbax takes it for whole

        front.rule = lambda method, path: None
        told = processes.finish(start(repository, data, workdir, count), timeout=900)
        assert "resume from step 8" in told[0] and "error" not in told[-1]
        assert "00000016 is not used: checksums.json is missing" in told[0]
        names = server.names(workdir)
        assert "damaged/00000016/commit_success.txt" in names
        assert {"config.json", "curves.png", "metrics.jsonl", "tokenizer/vocab.txt"} <= set(names)
        assert sum(name.startswith("tensorboard/events") for name in names) == 3
        assert not [name for name in names if ".seen-" in name or name == LEASE]
        assert any("ocdbt.process_1/" in name for name in names) == (count == 2)
        assert_same_run(workdir, tmp_path / "run")


def test_a_second_run_is_refused_and_one_that_lost_its_lease_stops(repository, data, bucket_server, bucket):
    workdir = f"{bucket}/run"
    command = [
        *processes.TRAIN,
        f"--workdir={workdir}",
        f"--config.data.path={data}",
        "--config.train.num_steps=100000",
    ]
    first = processes.start(repository, command, 1)
    try:
        deadline = time.monotonic() + 600
        while f"checkpoints/00000008/{SEAL}" not in bucket_server.names(workdir):
            assert first[0].poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        told = processes.finish(processes.start(repository, command, 1), expected=1)
        errors = processes.told(told)[0]
        assert (
            len(errors) == 1 and f"workdir {workdir} is in use by another run (process {first[0].pid} on " in errors[0]
        )
        assert "wait for it, or give another" in errors[0] and "Traceback" not in told[0]

        other = {"name": "another", "pid": 1, "host": "elsewhere", "expire_seconds": 60}
        bucket_server.write(f"{workdir}/{LEASE}", json.dumps(other).encode())
        told = processes.finish(first, expected=1, timeout=60)
        assert f"error: the lease {workdir}/{LEASE} of this run is now held by process 1 on elsewhere" in told[0]
        assert "Traceback" not in told[0]
        assert json.loads(bucket_server.read(f"{workdir}/{LEASE}")) == other
    finally:
        first[0].kill()


def test_a_flipped_byte_is_found_and_the_checkpoint_before_it_used(data, bucket_server, bucket, tmp_path, capfd):
    """Old checkpoints are deleted in a bucket too, but for the best and for revisions."""
    saves = CheckpointConfig(every_steps=2, keep_last=2, keep_best=1, keep_every=4)
    config = tiny_run(data, mesh=ONE_DEVICE, checkpoint=saves)
    whole = train(config, tmp_path / "run")
    workdir = to_place(f"{bucket}/run")
    train(config, workdir)
    kept = [sorted(path.name for path in (run / "checkpoints").iterdir()) for run in (workdir, tmp_path / "run")]
    assert kept[0] == kept[1] and {"00000010", "00000012"} <= set(kept[0]) and "00000002" not in kept[0]
    assert bert_jax.load_pretrained(f"{workdir}@4").trained["step"] == 4
    with pytest.raises(InputError, match=r"gs://.*/run has no revision of step 5; it has those of steps 0, 4, "):
        bert_jax.load_pretrained(f"{workdir}@5")

    names = bucket_server.names(str(workdir))
    for name in names:
        if name.startswith("pretrained/"):
            bucket_server.delete(f"{workdir}/{name}")
    arrays = [name for name in names if name.startswith("checkpoints/00000012/state-") and "/d/" in name]
    changed = max(arrays, key=lambda name: len(bucket_server.read(f"{workdir}/{name}")))
    bucket_server.flip_byte(f"{workdir}/{changed}")
    capfd.readouterr()
    bert = bert_jax.load_pretrained(workdir)
    line = f"00000012 is not used: file {changed.removeprefix('checkpoints/00000012/')} has another checksum than"
    assert bert.trained["step"] == 10 and line in capfd.readouterr().err
    resumed = train(config, workdir)
    said = capfd.readouterr().err
    assert line in said and "resume from step 10" in said
    assert_same_state(resumed.state, whole.state)
    assert losses(workdir) == losses(tmp_path / "run")
    assert changed.replace("checkpoints", "damaged") in bucket_server.names(str(workdir))
