"""S3 in this process's memory, over HTTP: objects are written, read whole or in part, listed and deleted."""

import contextlib
import hashlib
import http.server
import threading
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class FakeS3(http.server.ThreadingHTTPServer):
    """A server on a free port of this machine; `objects` are by "bucket/key"."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects, self.requests, self.page = {}, [], 4

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def running():
    with FakeS3() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _name(self):
        return unquote(urlsplit(self.path).path.lstrip("/"))

    def _answer(self, status, body=b"", **headers):
        self.server.requests.append((self.command, self._name(), status))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            return self._list(query)
        found = self.server.objects.get(self._name())
        if found is None:
            return self._answer(404)
        headers = {"ETag": f'"{hashlib.sha256(found).hexdigest()}"'}
        if wanted := self.headers.get("Range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            part = found[int(first) : int(last) + 1 if last else None]
            place = f"bytes {first}-{int(first) + len(part) - 1}/{len(found)}"
            return self._answer(206, part, Content_Range=place, **headers)
        return self._answer(200, found, **headers)

    def do_HEAD(self):
        self.do_GET()

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.objects[self._name()] = body
        self._answer(200, ETag=f'"{hashlib.sha256(body).hexdigest()}"')

    def do_DELETE(self):
        self.server.objects.pop(self._name(), None)
        self._answer(204)

    def _list(self, query):
        """A page of keys; the token of the next one is the last key."""
        bucket = self._name().strip("/") + "/"
        prefix = bucket + query.get("prefix", [""])[0]
        after = bucket + query.get("continuation-token", query.get("start-after", [""]))[0]
        keys = sorted(each for each in list(self.server.objects) if each.startswith(prefix) and each > after)
        page = [each.removeprefix(bucket) for each in keys[: self.server.page]]
        rows = "".join(f"<Contents><Key>{escape(key)}</Key><Size>1</Size></Contents>" for key in page)
        more = len(keys) > len(page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        told = f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
        body = f"<ListBucketResult>{told}{rows}</ListBucketResult>".encode()
        self._answer(200, body, Content_Type="application/xml")

    def log_message(self, *_):
        """Prints nothing."""
