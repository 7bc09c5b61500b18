"""A model hub on loopback: the part of the Hugging Face hub's HTTP interface that its own library uses."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = "org/tiny"
COMMIT = hashlib.sha1(b"the only commit", usedforsecurity=False).hexdigest()


class Hub:
    """Serves the files of one folder as the repository org/tiny. `sent`: bytes of bodies by file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sent: Counter[str] = Counter()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def info(self) -> dict[str, Any]:
        files = [{"rfilename": file.name, "size": file.stat().st_size} for file in sorted(self.folder.iterdir())]
        return {"_id": "1", "id": REPO, "modelId": REPO, "sha": COMMIT, "private": False, "tags": [], "siblings": files}

    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)}
            for file in sorted(self.folder.iterdir())
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if re.fullmatch(rf"/api/models/{REPO}(/revision/(main|{COMMIT}))?", path):
            self._send(200, json.dumps(self.hub.info()).encode(), {"Content-Type": "application/json"})
        elif re.fullmatch(rf"/api/models/{REPO}/tree/(main|{COMMIT})", path):
            self._send(200, json.dumps(self.hub.tree()).encode(), {"Content-Type": "application/json"})
        elif match := re.fullmatch(rf"/{REPO}/resolve/(?:main|{COMMIT})/([^/]+)", path):
            self._resolve(match[1])
        elif match := re.fullmatch(r"/cdn/([^/]+)", path):
            self._file(match[1])
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

    def _resolve(self, name: str) -> None:
        """Weights lie elsewhere, behind a redirect."""
        file = self.hub.folder / name
        if not file.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_etag(file)}"'}
        if name.endswith(".safetensors"):
            more = {"X-Linked-Size": str(file.stat().st_size), "X-Linked-ETag": f'"{_etag(file)}"'}
            self._send(302, b"", {**headers, **more, "Location": f"{self.hub.url}/cdn/{name}"})
        else:
            self._file(name, headers)

    def _file(self, name: str, headers: dict[str, str] | None = None) -> None:
        content = (self.hub.folder / name).read_bytes()
        stated = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not stated:
            self._send(200, content, headers or {}, name)
            return
        begin, end = int(stated[1]), min(int(stated[2]) + 1, len(content))
        ranged = {"Content-Range": f"bytes {begin}-{end - 1}/{len(content)}", **(headers or {})}
        self._send(206, content[begin:end], ranged, name)

    def _send(self, status: int, body: bytes, headers: dict[str, str], name: str = "") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
            self.hub.sent[name] += len(body)


@contextmanager
def hub(folder: Path) -> Iterator[Hub]:
    serving = Hub(folder)
    try:
        yield serving
    finally:
        serving.close()


def _etag(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
