"""A local stand-in for the HTTP API of the Hugging Face hub: enough of it to download a data set.

Written from what `huggingface_hub` requests; no real hub was reachable.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1000
"""Files of this many bytes or more are stored by their SHA-256, as the hub does with LFS."""


@dataclass
class DataSets:
    """Files by repository, and what the hub says about them."""

    url: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    declared: dict[str, bytes] = field(default_factory=dict)
    """Content whose hash is declared instead of the real one, by path."""
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)

    def described(self, repository: str) -> dict[str, Any]:
        siblings = []
        for path, real in self.files[repository].items():
            content = self.declared.get(path, real)
            blob = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": blob}
            if len(content) >= LARGE:
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        card = {"license": "apache-2.0"}
        return {"id": repository, "sha": COMMIT, "siblings": siblings, "cardData": card}


@contextmanager
def data_hub() -> Iterator[DataSets]:
    hub = DataSets()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            if path.startswith("/api/datasets/"):
                repository = path.removeprefix("/api/datasets/").partition("/revision/")[0]
                if repository in hub.gated:
                    self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
                elif repository not in hub.files:
                    self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                else:
                    self._send(200, json.dumps(hub.described(repository)).encode(), {})
                return
            repository, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
            content = hub.files.get(repository, {}).get(rest.partition("/")[2])
            if content is None:
                self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
            etag = hashlib.sha256(content).hexdigest()
            self._send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
