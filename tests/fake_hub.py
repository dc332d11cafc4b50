"""A Hub on this machine: repositories of files in memory, behind the addresses that huggingface_hub calls."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0" * 39
FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/[^/]+/(?P<path>.+)")
API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>\w+))?(?:/.*)?")


class Hub(ThreadingHTTPServer):
    """Repositories: name -> path -> content, and how many commits each had."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.commits = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def commit(self) -> str:
        return f"{COMMIT}{self.commits % 10}"


class Handler(BaseHTTPRequestHandler):
    """Answers as the Hub does, as far as uploads and downloads of models need it."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, content: bytes = b"", status=200, kind="application/json", **headers):
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), **headers}
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def answer_json(self, **content):
        self.answer(json.dumps(content).encode())

    def missing(self, code):
        self.answer(b"{}", 404, X_Error_Code=code, X_Error_Message=code)

    def do_GET(self):
        address = self.path.partition("?")[0]
        if address == "/api/whoami-v2":
            return self.answer_json(name="me", type="user", auth={"type": "access_token"})
        if found := FILE.fullmatch(address):
            if (files := self.server.repositories.get(found["repo"])) is None:
                return self.missing("RepoNotFound")
            if (content := files.get(found["path"])) is None:
                return self.missing("EntryNotFound")
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            return self.answer(content, kind="text/plain", X_Repo_Commit=self.server.commit, ETag=etag)
        if (found := API.fullmatch(address)) and (files := self.server.repositories.get(found["repo"])) is not None:
            if found["what"] == "tree":
                tree = [
                    {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for path, content in files.items()
                ]
                return self.answer(json.dumps(tree).encode())
            names = [{"rfilename": path} for path in files]
            return self.answer_json(id=found["repo"], sha=self.server.commit, siblings=names, tags=[], private=False)
        return self.missing("RepoNotFound")

    do_HEAD = do_GET

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.server.repositories.setdefault(name, {})
            return self.answer_json(url=f"{self.server.address}/{name}", id=name, name=name)
        if self.path == "/api/validate-yaml":
            return self.answer_json(errors=[], warnings=[])
        found = API.fullmatch(self.path.partition("?")[0])
        if found["what"] == "preupload":
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            return self.answer_json(files=files)
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.server.repositories[found["repo"]][line["value"]["path"]] = content
        self.server.commits += 1
        url = f"{self.server.address}/{found['repo']}/commit/{self.server.commit}"
        return self.answer_json(success=True, commitOid=self.server.commit, commitUrl=url, hookOutput="")


@contextmanager
def running() -> Iterator[Hub]:
    """A Hub that answers until the block ends."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
