# SPDX-License-Identifier: Apache-2.0
"""Processes that join without a flag: by the variables of a scheduler, or the metadata server of TPU VMs.

Who the others are is found by JAX's own detection, in two real processes. Only the machine around them is made up.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest
from jax._src import distributed
from metadata_server import serve

from bert_jax.devices import cluster
from bert_jax.devices.tpu_hosts import count_hosts

# JAX believes to be on a TPU VM by JAX_FORCE_TPU_INIT, and without a chip it would not ask the metadata server.
PROGRAM = """
import os
import jax
if os.environ.get("GCE_METADATA_IP"):
    os.environ.pop("TPU_SKIP_MDS_QUERY", None)
from bert_jax.devices import cluster
from bert_jax.devices.job import this_job
cluster.join("auto", join_seconds=100)
with cluster.one_fate():
    said = this_job().broadcast_int("x", 7 - jax.process_index())
    print("joined", jax.process_index(), jax.process_count(), said, flush=True)
"""


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def join(repository, *variables):
    """Returns what each of the processes with these variables says: its number, their count, what the first says."""
    common = {"PYTHONPATH": str(repository), "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
    common |= {"JAX_COORDINATOR_PORT": free_port(), "JAX_PLATFORMS": "cpu"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM], env=os.environ | common | own, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for own in variables
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(error for _, error in said)
    # Gloo writes lines of its own.
    return [line.split()[1:] for out, _ in said for line in out.splitlines() if line.startswith("joined ")]


TWO = [["0", "2", "7"], ["1", "2", "7"]]


@pytest.mark.slow
def test_slurm(repository):
    job = {"SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    tasks = [job | {"SLURM_PROCID": str(number), "SLURM_LOCALID": "0"} for number in range(2)]
    assert join(repository, *tasks) == TWO


@pytest.mark.slow
def test_open_mpi(repository):
    job = {"OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://127.0.0.1:43370", "OMPI_COMM_WORLD_SIZE": "2"}
    ranks = [job | {"OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_LOCAL_RANK": "0"} for number in range(2)]
    assert join(repository, *ranks) == TWO


@pytest.mark.slow
def test_an_indexed_job_of_gke(repository):
    """GKE gives these to the pods of an indexed job or a job set that asks for TPUs."""
    job = {"JAX_FORCE_TPU_INIT": "1", "TPU_WORKER_HOSTNAMES": "localhost,localhost"}
    with serve({}) as address:  # which knows nothing of slices
        job["GCE_METADATA_IP"] = address
        assert join(repository, *(job | {"TPU_WORKER_ID": str(number)} for number in range(2))) == TWO


@pytest.mark.slow
def test_tpu_vms_ask_the_metadata_server(repository):
    with contextlib.ExitStack() as stack:
        hosts = []
        for number in range(2):
            endpoints = ",".join(["unknown:unknown:127.0.0.1"] * 2)
            attributes = {
                "agent-worker-number": str(number),
                "worker-network-endpoints": endpoints,
                "tpu-env": "A: 'b'",
            }
            hosts.append({"JAX_FORCE_TPU_INIT": "1", "GCE_METADATA_IP": stack.enter_context(serve(attributes))})
        assert join(repository, *hosts) == TWO


@pytest.mark.slow
def test_a_tpu_vm_alone_joins_nobody(repository):
    attributes = {"agent-worker-number": "0", "worker-network-endpoints": "unknown:unknown:127.0.0.1", "tpu-env": ""}
    with serve(attributes) as address:
        assert join(repository, {"JAX_FORCE_TPU_INIT": "1", "GCE_METADATA_IP": address}) == [["0", "1", "7"]]


def test_hosts_of_several_slices_are_counted():
    attributes = {
        "worker-network-endpoints": "a:b:10.0.0.1,a:b:10.0.0.2",
        "tpu-env": "ZONE: 'x'\nMEGASCALE_NUM_SLICES: '3'\n",
    }
    with serve(attributes) as address:
        environment = {"TPU_ML_PLATFORM": "JAX", "GCE_METADATA_IP": address}
        assert count_hosts(environment) == 6
        assert count_hosts(environment | {"TPU_SKIP_MDS_QUERY": "1"}) == 0
        attributes.pop("tpu-env")
        assert count_hosts(environment) == 2
        attributes.clear()
        assert count_hosts(environment) == 0


def test_no_metadata_server_is_no_tpu_vm():
    started = time.monotonic()
    assert count_hosts({}) == 0
    assert count_hosts({"TPU_ML_PLATFORM": "JAX", "GCE_METADATA_IP": f"127.0.0.1:{free_port()}"}) == 0
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("missing", ["_jax", "get_distributed_runtime_client"])
def test_a_version_of_jax_without_its_inner_names_is_joined_as_it_is(monkeypatch, missing):
    if missing == "_jax":
        monkeypatch.delattr(distributed, missing)
    else:
        monkeypatch.setattr(distributed, "_jax", object())
    inner = getattr(distributed, "_jax", None)
    with cluster._failing_calmly():  # it changes nothing, and does not fail
        assert getattr(distributed, "_jax", None) is inner
        assert not hasattr(inner, "get_distributed_runtime_client")


def test_the_errors_of_a_client_are_made_calm_for_the_time_of_joining():
    inner = distributed._jax
    before = inner.get_distributed_runtime_client
    with contextlib.suppress(ZeroDivisionError), cluster._failing_calmly():
        assert inner.get_distributed_runtime_client is not before
        raise ZeroDivisionError
    assert inner.get_distributed_runtime_client is before
