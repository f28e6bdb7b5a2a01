"""A local stand-in for the HTTP API of the Hugging Face hub: enough of it for an upload.

Written from what `huggingface_hub` sends; no real hub was reachable.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Repositories with their files."""

    url: str = ""
    token: str = "secret"
    created: dict[str, bool] = field(default_factory=dict)
    """Repository -> whether it is private."""
    files: dict[str, bytes] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    """Content of large files, by hash."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Authorization") != f"Bearer {hub.token}":
                self._send(401, {"error": "Invalid username or password."})
            elif self.path == "/api/repos/create":
                wanted = json.loads(body)
                name = f"{wanted.get('organization')}/{wanted['name']}"
                private = wanted.get("private") or wanted.get("visibility") == "private"
                hub.created.setdefault(name, bool(private))
                self._send(200, {"url": f"{hub.url}/{name}", "name": name, "id": name})
            elif self.path == "/api/validate-yaml":
                self._send(200, {"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                files = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith("safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(body)["files"]
                ]
                self._send(200, {"files": files})
            elif self.path.endswith("/info/lfs/objects/batch"):
                self._send(200, {"transfer": "basic", "objects": self._places(json.loads(body))})
            elif "/commit/" in self.path:
                self._commit(body)
            else:
                self._send(404, {"error": f"no {self.path}"})

        def do_PUT(self) -> None:
            name = self.path.removeprefix("/upload/")
            hub.large[name] = self.rfile.read(int(self.headers["Content-Length"]))
            self._send(200, {})

        def _places(self, request: dict[str, Any]) -> list[dict[str, Any]]:
            return [
                {**one, "actions": {"upload": {"href": f"{hub.url}/upload/{one['oid']}"}}}
                for one in request["objects"]
            ]

        def _commit(self, body: bytes) -> None:
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.large[value["oid"]]
            where = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            url = f"{hub.url}/{where}/commit/{COMMIT}"
            self._send(200, {"commitUrl": url, "commitOid": COMMIT})

        def _send(self, status: int, value: dict[str, Any]) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
