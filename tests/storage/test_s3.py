# SPDX-License-Identifier: Apache-2.0
"""Places and leases at s3://, against moto's server."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import s3fs
from buckets import free_port, variables, wait_until_open
from builders import message

from bert_jax.errors import InputError, StoppedError
from bert_jax.storage import leases, stores
from bert_jax.storage.places import to_place

pytestmark = pytest.mark.slow

SERVER = Path(sys.executable).with_name("moto_server")


@pytest.fixture(scope="module")
def bucket():
    """Returns the URL of a bucket on a server of this module's own."""
    port = free_port()
    process = subprocess.Popen([str(SERVER), "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL)
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    keys |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_EC2_METADATA_DISABLED": "true"}
    try:
        wait_until_open(port, process)
        with variables(keys):
            s3fs.S3FileSystem().mkdir("bucket")
            yield "s3://bucket"
    finally:
        process.kill()
        process.wait()


def test_objects_are_written_listed_copied_and_deleted(bucket):
    place = to_place(f"{bucket}/run")
    assert not place.exists() and place.listing() == {}
    (place / "a" / "x").write_bytes(b"1")
    assert place.listing() == {"a/x": {"bytes": 1, "etag": "c4ca4238a0b923820dcc509a6f75849b"}}
    assert list(place.iterdir()) == [place / "a"] and place.is_dir() and (place / "a" / "x").is_file()
    stores.copy_below(str(place), f"{bucket}/copy")
    place.delete_all()
    assert not place.exists() and list(to_place(f"{bucket}/copy").listing()) == ["a/x"]


def test_conditional_writes(bucket):
    url = f"{bucket}/object"
    first = stores.write_if(url, b"1", "")
    assert first and not stores.write_if(url, b"2", "")
    second = stores.write_if(url, b"2", first)
    assert second and not stores.write_if(url, b"3", first)
    version = stores.read_version(url)
    assert version is not None and (version.content, version.token) == (b"2", second) and version.age < 60


def test_a_lease_refuses_and_is_renewed(bucket, monkeypatch):
    monkeypatch.setattr(leases, "RENEW_SECONDS", 0.2)
    place = to_place(f"{bucket}/leased")
    with leases.lease(f"{place}/{leases.LEASE}", str(place)) as holder:
        assert holder == ""
        with leases.lease(f"{place}/{leases.LEASE}", str(place)) as second:
            assert f"process {os.getpid()} on" in second
        time.sleep(1)
        leases.check_held(f"{place}/x")
        (place / leases.LEASE).unlink()
        with pytest.raises(StoppedError, match="now held by nobody, as it was deleted"):
            time.sleep(2)
            leases.check_held(f"{place}/x")


def test_refusals_are_one_line(bucket, monkeypatch):
    assert "cannot write s3://nosuch/x: there is no bucket s3://nosuch" in message(
        stores.check_writable, "s3://nosuch/x"
    )
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(InputError, match=r"no valid credentials for s3://bucket .*aws configure"):
        stores.check_writable(f"{bucket}/x")
    s3fs.S3FileSystem.clear_instance_cache()
