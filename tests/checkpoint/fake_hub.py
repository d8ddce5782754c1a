"""A server on this machine that answers as the Hugging Face Hub does, for tests of fetching."""

import dataclasses
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclasses.dataclass
class FakeHub:
    """Repositories by id, and what the server was asked; downloads of the file `cut` break off."""

    endpoint: str = ""
    repos: dict[str, dict[str, bytes]] = dataclasses.field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = dataclasses.field(default_factory=dict)
    revisions: tuple[str, ...] = ("main", COMMIT)
    cut: str | None = None
    fetched: list[str] = dataclasses.field(default_factory=list)


@contextmanager
def serve() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(_Handler):
        fake = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        pass

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo, rest = ("/".join(parts[2:4]), parts[4:]) if api else ("/".join(parts[:2]), parts[2:])
        if repo in self.fake.refused:
            status, code = self.fake.refused[repo]
            return self.send(status, b"{}", {"X-Error-Code": code})
        if repo not in self.fake.repos:
            return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in self.fake.revisions:
            return self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = self.fake.repos[repo]
        if not api:
            return self.send_file(files, "/".join(rest[2:]))
        body = tree(files) if rest[:1] == ["tree"] else about(repo, files)
        return self.send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def send_file(self, files, name):
        if name not in files:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
        content, wanted = files[name], self.headers.get("Range")
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
        if self.command == "GET":
            self.fake.fetched.append(name)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = name == self.fake.cut
        return self.send(206 if start else 200, content[start:], headers, cut=cut)

    def send(self, status, body, headers, *, cut=False):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut:
            body, self.close_connection = body[: len(body) // 2], True
        self.wfile.write(body)


def about(repo, files):
    siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
    return {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []}


def tree(files):
    return [
        {
            "type": "file",
            "path": name,
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
        }
        for name, content in files.items()
    ]
