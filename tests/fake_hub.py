# SPDX-License-Identifier: Apache-2.0
"""A server on this machine that answers as the Hugging Face hub does, as far as huggingface_hub asks for models."""

import base64
import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse

WRITER, READER = "hf_writer", "hf_reader"  # tokens


class Hub:
    """Repositories by name: {branch: {path: bytes}}. `private` has those that were made so."""

    def __init__(self):
        self.repositories, self.private, self.asked = {}, set(), []

    def files(self, name, branch="main"):
        return self.repositories[name][branch]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a body waits 40 ms for the answer to its head

    def log_message(self, *_):
        pass

    @property
    def hub(self):
        return self.server.hub

    def answer(self, status, body=b"", **headers):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers.setdefault("Content-Type", "application/json")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def missing(self, code):
        self.answer(404, {"error": "not found"}, X_Error_Code=code)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        path = urllib.parse.unquote(self.path.partition("?")[0])
        self.hub.asked.append(path)
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
        if token not in (WRITER, READER):
            return self.answer(401, {"error": "Invalid username or password."})
        if token == READER:
            return self.answer(403, {"error": "Forbidden: you must use a write token"})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(branch|preupload|commit)/([^/]+)", path)
        if not found or found[1] not in self.hub.repositories:
            return self.missing("RepoNotFound")
        name, what, branch = found.groups()
        branches = self.hub.repositories[name]
        if what == "branch":
            if branch in branches:
                return self.answer(409, {"error": "Reference already exists"})
            branches[branch] = dict(branches["main"])
            return self.answer(200, {})
        if branch not in branches:
            return self.missing("RevisionNotFound")
        if what == "preupload":
            regular = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            return self.answer(
                200, {"files": [{"path": file["path"], **regular} for file in json.loads(body)["files"]]}
            )
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                branches[branch][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        where = f"{self.server.url}/{name}/commit/{_oid(branches[branch])}"
        return self.answer(200, {"success": True, "commitOid": _oid(branches[branch]), "commitUrl": where})

    def create(self, asked):
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        url = {"url": f"{self.server.url}/{name}", "id": name, "name": name}
        if name in self.hub.repositories:
            return self.answer(409, {"error": "You already created this model repo", **url})
        self.hub.repositories[name] = {"main": {}}
        if asked.get("private") or asked.get("visibility") == "private":
            self.hub.private.add(name)
        return self.answer(200, url)

    def do_GET(self):
        path = urllib.parse.unquote(self.path.partition("?")[0])
        self.hub.asked.append(path)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            branches = self.hub.repositories.get(found[1])
            if branches is None:
                return self.missing("RepoNotFound")
            files = self.at(branches, found[3] or "main")
            if files is None:
                return self.missing("RevisionNotFound")
            if found[2] == "tree":
                tree = [
                    {"type": "file", "path": file, "size": len(data), "oid": _oid(data)} for file, data in files.items()
                ]
                return self.answer(200, tree)
            siblings = [{"rfilename": file} for file in files]
            about = {"id": found[1], "sha": _oid(files), "private": False, "tags": [], "downloads": 0, "likes": 0}
            return self.answer(200, {**about, "siblings": siblings, "modelId": found[1]})
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        files = self.at(self.hub.repositories.get(found[1], {}), found[2]) if found else None
        if files is None or found[3] not in files:
            return self.missing("EntryNotFound")
        data = files[found[3]]
        return self.answer(200, data, ETag=f'"{_oid(data)}"', X_Repo_Commit=_oid(files))

    do_HEAD = do_GET

    def at(self, branches, revision):
        """Returns the files of a branch or of a commit; None if there is none."""
        return branches.get(revision) or next((files for files in branches.values() if _oid(files) == revision), None)


def _oid(data):
    if isinstance(data, dict):
        data = repr(sorted(data.items())).encode()
    return hashlib.sha1(data).hexdigest()


@contextlib.contextmanager
def serve():
    """Yields (hub, URL)."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub, server.url = Hub(), f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.hub, server.url
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
