# SPDX-License-Identifier: Apache-2.0
"""A metadata server of a TPU VM, on this machine."""

import contextlib
import http.server
import threading


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
        known = self.headers["Metadata-Flavor"] == "Google" and name in self.server.attributes
        body = self.server.attributes[name].encode() if known else b""
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serve(attributes):
    """Yields the address, for GCE_METADATA_IP. `attributes` may change while it serves."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.attributes = attributes
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
