# SPDX-License-Identifier: Apache-2.0
"""A loopback HTTP server of a directory: it knows ranges, counts bytes, can be slow, and can fail as it is told to."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Server:
    """What a server is told, and what it has counted. A client says who it is by "?host=NAME" or not at all."""

    def __init__(self, root: Path):
        self.root = root
        self.url = ""  # of the directory
        self.bytes_sent = 0  # of the contents of files
        self.requests: list[tuple[str, int, int]] = []  # (path, start, end) of the contents of files
        self.rate = 0.0  # bytes per second, of all connections together; 0 is no limit
        # Returns what to do with a request for a file, by its path and its first byte: "" to answer it, "500", "429",
        # "cut" (half of the bytes), "wrong" (one bit is flipped) or "stall".
        self.fault: Callable[[str, int], str] = lambda path, start: ""
        self.knows_ranges = True
        self.retry_after = "1"
        self._lock = threading.Lock()
        self._free_at = 0.0  # when the line is free again

    def take(self, count: int) -> None:
        """Waits as long as so many bytes take on a line of this rate, which all connections share."""
        with self._lock:
            self.bytes_sent += count
            if not self.rate:
                return
            self._free_at = max(self._free_at, time.monotonic()) + count / self.rate
            wait = self._free_at - time.monotonic()
        time.sleep(max(0.0, wait))

    def data_requests(self) -> list[tuple[str, int, int]]:
        """Returns the requests for shards."""
        return [request for request in self.requests if "-of-" in request[0]]

    def forget(self) -> None:
        """Counts from zero again."""
        self.bytes_sent, self.requests = 0, []


@contextlib.contextmanager
def serving(root: Path) -> Iterator[Server]:
    """Yields a server of a directory."""
    state = Server(root)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or a body waits 40 ms for the answer to its head

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET(head=True)

        def do_GET(self, head: bool = False) -> None:
            path = unquote(urlsplit(self.path).path).strip("/")
            file = state.root / path
            if file.is_dir():
                names = [f"{each.name}/" if each.is_dir() else each.name for each in sorted(file.iterdir())]
                links = "".join(f'<a href="/{path}/{name}">{name}</a>\n' for name in names)
                self.answer(200, links.encode(), head, {"Content-Type": "text/html"})
            elif not file.is_file():
                self.answer(404, b"", head)
            else:
                self.answer_file(path, file, head)

        def answer_file(self, path: str, file: Path, head: bool) -> None:
            size = file.stat().st_size
            start, end, status = 0, size, 200
            wanted = self.headers.get("Range", "")
            if wanted.startswith("bytes=") and state.knows_ranges:
                first, last = wanted.removeprefix("bytes=").split("-")
                start, end, status = int(first), min(int(last or size - 1) + 1, size), 206
            fault = "" if head else state.fault(path, start)
            if fault == "stall":
                time.sleep(60)
            if fault in ("500", "429"):
                self.answer(int(fault), b"no", head, {"Retry-After": state.retry_after} if fault == "429" else {})
                return
            with open(file, "rb") as stream:
                stream.seek(start)
                content = stream.read(end - start)
            if fault == "wrong":
                content = bytes([content[0] ^ 1]) + content[1:]
            headers = {"ETag": f'"{file.stat().st_mtime_ns}"'}
            if status == 206:
                headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            if not head:
                state.requests.append((path, start, end))
            self.answer(status, content, head, headers, cut=fault == "cut")

        def answer(
            self, status: int, content: bytes, head: bool, headers: dict[str, str] | None = None, cut: bool = False
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if head:
                return
            if cut:
                content = content[: len(content) // 2]
                self.close_connection = True
            for place in range(0, len(content), 1 << 16):
                part = content[place : place + (1 << 16)]
                state.take(len(part))
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(part)

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:  # clients may go away
            pass

    with Quiet(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        state.url = f"http://127.0.0.1:{server.server_port}"
        yield state
        server.shutdown()
