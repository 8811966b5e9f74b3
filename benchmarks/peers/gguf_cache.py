"""Makes GGUF files of Hugging Face folders once, and keeps them in the user's cache directory."""

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.gguf_file import quantize_gguf, write_gguf
from benchmarks.peers.peer import Progress
from serving.host.user_cache import cache_folder

# Changes whenever the same folder would make another file.
_VERSION = "2"


def gguf_of(folder: Path, file_type: str, *, threads: int, progress: Progress) -> Path:
    """The GGUF of a folder's weights at a llama.cpp file type, made unless it is there.

    Args:
      folder: a Hugging Face model folder.
      file_type: one of `gguf_file.FILE_TYPES`.
      threads: that the quantizer may use.
      progress: called with ("Writing GGUF", parameters written, parameters in all).

    Raises:
      CheckpointError: the folder cannot be read.
    """
    cache = cache_folder() / "benchmarks" / "gguf" / _digest(str(folder.resolve()))
    cache.mkdir(parents=True, exist_ok=True)
    key = content_key(folder)
    wanted, floats = cache / f"{key}-{file_type}.gguf", cache / f"{key}-F32.gguf"
    with _locked(cache):
        for older in cache.glob("*.gguf"):
            if not older.name.startswith(key):
                older.unlink()
        if not wanted.exists():
            keep = floats.exists() or wanted == floats
            if not floats.exists():
                _write_floats(folder, floats, progress)
            if wanted != floats:
                quantize_gguf(floats, wanted, file_type, threads)
            if not keep:
                # Several times the size of the file that was asked for, and quickly made again.
                floats.unlink()
    return wanted


def _write_floats(folder: Path, path: Path, progress: Progress) -> None:
    from jaxllm.checkpoints.huggingface import read_config, read_params

    cfg = read_config(folder)
    write_gguf(path, cfg, read_params(folder, cfg), progress)


def content_key(folder: Path) -> str:
    """A key of a folder's content: name, size and time of its config and weights."""
    parts = [_VERSION]
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        stat = path.stat()
        parts += [path.name, str(stat.st_size), str(stat.st_mtime_ns)]
    return _digest("\0".join(parts))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks a folder against other processes that make files in it."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
