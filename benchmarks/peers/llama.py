"""Runs llama.cpp through llama-cpp-python's low-level binding, on a GGUF of the same weights.

Both settings of flash attention are tried: on a CPU it makes prompts faster and long decodes slower. All
else is as its own tools set it: batches of 512, repacked weights (tile or vector kernels as the CPU has
them), logits of the last token alone, greedy.

Makes GGUF files of Hugging Face folders once, and keeps them in the user's cache directory.
"""

import collections
import ctypes
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.gguf_file import quantize_gguf, tensor_bytes, write_gguf
from benchmarks.peers.peer import Opening, Progress, Session
from jaxllm.errors import JaxllmError
from jaxllm.serving.host.user_cache import cache_folder

# Our widths -> the nearest file type.
FORMATS = {
    "f32": "F32",
    "bf16": "BF16",
    "int8": "Q8_0",
    "int4": "Q4_0",
    "int4-min": "Q4_1",
    "int4-all": "Q4_0",
}
_BATCH_TOKENS = 512
_WARNING = 3  # of ggml's log levels
_SETTINGS = {"flash attention": 1, "no flash attention": 0}


def open_llama(opening: Opening, progress: Progress) -> Session:
    """Writes and quantizes the GGUF unless that has been done or the model is one, and loads it."""
    path = opening.model
    if path.is_dir():
        path = gguf_of(path, opening.format, threads=opening.threads, progress=progress)
    return LlamaCppSession(path, opening)


class LlamaCppSession:
    """One model and, for each setting, a context on it."""

    def __init__(self, path: Path, opening: Opening) -> None:
        import llama_cpp

        self._lib = llama_cpp
        self._path, self._format = path, opening.format
        self._buffers: list[str] = []
        self._warnings: collections.deque[str] = collections.deque(maxlen=3)
        # Kept: the library calls it for as long as the process lives.
        self._on_log = llama_cpp.llama_log_callback(self._log)
        llama_cpp.llama_log_set(self._on_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        how = llama_cpp.llama_model_default_params()
        how.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), how)
        if not self._model:
            raise JaxllmError(f"llama.cpp cannot load {path}: {self._last_log()}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        contexts = {
            name: self._context(opening.context_tokens, opening.threads, flash)
            for name, flash in _SETTINGS.items()
        }
        self._contexts = {name: context for name, context in contexts.items() if context}
        if not self._contexts:
            raise JaxllmError(f"llama.cpp cannot make a context for {path}: {self._last_log()}")
        self.settings = tuple(self._contexts)
        self._token = 0

    def facts(self) -> dict[str, Any]:
        """Sizes of the file's tensors, and where llama.cpp put them."""
        sizes = tensor_bytes(self._path)
        weight_bytes = sum(size for size, _ in sizes.values())
        tied = "output.weight" not in sizes
        return {
            "weight_bytes": weight_bytes,
            "bits_per_weight": 8 * weight_bytes / sum(count for _, count in sizes.values()),
            # One row of an embedding is read; a tied one is the head too, and read whole.
            "step_bytes": weight_bytes - (0 if tied else sizes["token_embd.weight"][0]),
            # The buffers that weights were packed into, such as AMX or REPACK, tell which kernels run.
            "format": f"{self._format} in {' and '.join(self._buffers)} buffers",
        }

    def prefill(self, prompt: Sequence[int], setting: str) -> int:
        """See `Session.prefill`."""
        self.begin(setting)
        self._token = int(self.feed(prompt).argmax())
        return self._token

    def decode(self, tokens: int, setting: str) -> list[int]:
        """See `Session.decode`."""
        ids = []
        for _ in range(tokens):
            self._token = int(self.feed((self._token,)).argmax())
            ids.append(self._token)
        return ids

    def score(self, tokens: Sequence[int], targets: Sequence[int]) -> Sequence[float]:
        """See `Session.score`."""
        self.begin(next(iter(self._contexts)))
        scores: list[float] = []
        for start in range(0, len(tokens), _BATCH_TOKENS):
            chunk = tokens[start : start + _BATCH_TOKENS]
            rows = self.feed_all(chunk, start).astype(np.float64)
            rows -= rows.max(-1, keepdims=True)
            rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
            scores += rows[np.arange(len(chunk)), list(targets[start : start + len(chunk)])].tolist()
        return scores

    def begin(self, setting: str) -> None:
        """Begins with nothing, in the context of a setting."""
        self._current = self._contexts[setting]
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._current), True)

    def forget(self, seen: int) -> None:
        """Forgets all tokens but the first `seen`."""
        self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._current), 0, seen, -1)

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        """Feeds tokens after those already seen: logits `[V]` of the next one, until the next call."""
        lib = self._lib
        for start in range(0, len(tokens), _BATCH_TOKENS):
            chunk = tokens[start : start + _BATCH_TOKENS]
            # The batch points into this array: it has to stay until the call has returned.
            array = (lib.llama_token * len(chunk))(*chunk)
            self._check(lib.llama_decode(self._current, lib.llama_batch_get_one(array, len(chunk))))
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(self._current, -1), (self._vocab,))

    def feed_all(self, tokens: Sequence[int], seen: int) -> np.ndarray:
        """Feeds at most a batch of tokens after the first `seen`: logits `[tokens, V]` of the token after
        each, until the next call."""
        lib = self._lib
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, seen + i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.n_tokens = len(tokens)
        code = lib.llama_decode(self._current, batch)
        lib.llama_batch_free(batch)
        self._check(code)
        return np.ctypeslib.as_array(lib.llama_get_logits(self._current), (len(tokens), self._vocab))

    def _context(self, tokens: int, threads: int, flash: int) -> Any:
        """A context; None where the model's shape does not allow the setting."""
        how = self._lib.llama_context_default_params()
        how.n_ctx, how.n_batch, how.n_ubatch = tokens, _BATCH_TOKENS, _BATCH_TOKENS
        how.n_threads = how.n_threads_batch = threads
        how.flash_attn_type = flash
        how.no_perf = True
        return self._lib.llama_init_from_model(self._model, how)

    def _check(self, code: int) -> None:
        if code:
            raise JaxllmError(f"llama_decode failed with {code}: {self._last_log()}")

    def _log(self, level: int, text: bytes, _: Any) -> None:
        line = text.decode(errors="replace").strip()
        if found := re.search(r"(\S+) +model buffer size", line):
            self._buffers.append(found[1])
        if level >= _WARNING:
            self._warnings.append(line)

    def _last_log(self) -> str:
        return " ".join(filter(None, self._warnings)) or "it does not say why"


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
