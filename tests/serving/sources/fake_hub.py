"""A hub on the loopback: the part of Hugging Face's HTTP API that serves files of models, with faults."""

import functools
import hashlib
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
LARGE = (".safetensors", ".gguf", ".bin")
_PIECE = 1 << 16


class FakeHub:
    """Repositories with one revision, `main`.

    Attributes:
      files: contents by repository and name.
      facts: what the API says of a repository besides its files, such as `gated`.
      fault: called with each path; returns a status and headers to answer with, or None.
      altered: what is sent of a file instead of its contents, by name.
      gate: called before each piece of a file with its name and offset; may block.
      sent: (name, first byte, bytes, authorization) of each file that was asked for.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.fault: Callable[[str], tuple[int, dict[str, str]] | None] = lambda path: None
        self.altered: dict[str, bytes] = {}
        self.gate: Callable[[str, int], object] = lambda name, at: None
        self.sent: list[tuple[str, int, int, str | None]] = []
        self.commit = COMMIT
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

            def do_HEAD(self) -> None:
                hub._answer(self, body=False)

            def do_GET(self) -> None:
                hub._answer(self, body=True)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def sent_bytes(self, name: str) -> int:
        return sum(count for each, _, count, _ in self.sent if each == name)

    def _answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlsplit(handler.path).path)
        status, headers = self.fault(path) or (0, {})
        if not any(each in path for each in self.files):
            status = 404
        if status:
            self._send(handler, status, headers, b"{}", body=body)
            return
        _, first, *parts = path.split("/")
        if first == "api":
            repository = "/".join(parts[1:3])
            self._send(handler, 200, {}, self._listing(repository), body=body)
        elif first == "cdn":
            self._file(handler, "/".join(parts[:2]), "/".join(parts[2:]), body=body)
        else:
            repository, name = f"{first}/{parts[0]}", "/".join(parts[3:])
            if not name.endswith(LARGE):
                self._file(handler, repository, name, body=body)
                return
            # As the hub does: the storage is another host, which must not see the token.
            data = self.files[repository][name]
            headers = {
                "X-Repo-Commit": self.commit,
                "X-Linked-Etag": f'"{sha256(data)}"',
                "X-Linked-Size": str(len(data)),
                "Location": f"http://localhost:{self._port}/cdn/{repository}/{name}",
            }
            self._send(handler, 302, headers, b"", body=body)

    def _listing(self, repository: str) -> bytes:
        siblings: list[dict[str, Any]] = []
        for name, data in self.files[repository].items():
            about = {"rfilename": name, "size": len(data), "blobId": git_hash(data)}
            if name.endswith(LARGE):
                digest = sha256(data)
                about["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
            siblings.append(about)
        facts = {"id": repository, "sha": self.commit, "siblings": siblings}
        return json.dumps(facts | self.facts.get(repository, {})).encode()

    def _file(self, handler: BaseHTTPRequestHandler, repository: str, name: str, *, body: bool) -> None:
        data = self.altered.get(name, self.files[repository][name])
        ranged = handler.headers.get("Range", "")
        start = int(ranged.removeprefix("bytes=").partition("-")[0]) if ranged else 0
        headers = {"X-Repo-Commit": self.commit, "ETag": f'"{git_hash(self.files[repository][name])}"'}
        if ranged:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        handler.send_response(206 if ranged else 200)
        for key, value in {**headers, "Content-Length": str(len(data) - start)}.items():
            handler.send_header(key, value)
        handler.end_headers()
        if not body:
            return
        at = start
        try:
            while at < len(data):
                self.gate(name, at)
                handler.wfile.write(data[at : at + _PIECE])
                at = min(len(data), at + _PIECE)
        except OSError:
            pass
        self.sent.append((name, start, at - start, handler.headers.get("Authorization")))

    def _send(
        self,
        handler: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        data: bytes,
        *,
        body: bool,
    ) -> None:
        handler.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            handler.send_header(key, value)
        handler.end_headers()
        if body:
            handler.wfile.write(data)


@functools.lru_cache
def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@functools.lru_cache
def git_hash(data: bytes) -> str:
    """The id of a blob in git."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
