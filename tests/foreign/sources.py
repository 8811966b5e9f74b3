"""Fetches source distributions of other projects from the package index; none are in this repository."""

import hashlib
import html
import io
import os
import re
import tarfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin

LLAMA = "llama_cpp_python-0.3.36.tar.gz"
VLLM = "vllm-0.33.0.tar.gz"
_SHA256 = {
    LLAMA: "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    VLLM: "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
}
_INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")


def fetch(name: str, folder: Path, place: Callable[[str], str | None]) -> None:
    """Extracts files of a source distribution: `place` says where a member goes in the folder, None for
    nowhere."""
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
            file = archive.extractfile(member) if member.isfile() and place(member.name) else None
            if file is not None and (inner := place(member.name)) and ".." not in inner:
                (path := folder / inner).parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read())
