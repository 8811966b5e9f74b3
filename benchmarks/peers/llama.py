"""Runs llama.cpp through llama-cpp-python's low-level binding, on a GGUF of the same weights.

Both settings of flash attention are tried: on a CPU it makes prompts faster and long decodes slower. All
else is as its own tools set it: batches of 512, repacked weights (tile or vector kernels as the CPU has
them), logits of the last token alone, greedy.

It drafts as its own tools do (`common/speculative.cpp`): a line of the draft's likeliest tokens, until one
has a probability below 0.75, of at most 16 tokens by default; then one batch of the target verifies the
line. Here the loop is in Python around its low-level binding, and 4 and 8 tokens are tried too.

GGUF files of Hugging Face folders are made once, in llama.cpp's `llama` architecture, and kept in the user's
cache directory. The float weights are written in float32, so that llama.cpp's own quantizer starts from what
the checkpoint holds; it makes the other formats, or the package `gguf` those that it can. In its vocabulary
every token is one character unless one is given: benchmarks feed token ids, or texts of as many characters
where a server takes no ids.
"""

import collections
import ctypes
import dataclasses
import fcntl
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.peer import Opening, Progress, Session
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError, JaxllmError, one_line
from jaxllm.export import gguf_file as exported
from jaxllm.files.atomic import temporary_file
from jaxllm.serving.host.user_cache import cache_folder

# Our widths -> the nearest file type of one format for every matrix.
FORMATS = {
    "f32": "F32",
    "bf16": "BF16",
    "int8": "Q8_0",
    "int4": "Q4_1",
    "int4-all": "Q4_0",
}
# What llama.cpp's users take at 4 bits: some matrices have more.
MIXED = "Q4_K_M"
_BATCH_TOKENS = 512


def systems(weights: str) -> dict[str, str]:
    """llama.cpp at the formats that a width of ours is compared with, by name."""
    mixed = {f"llama.cpp-{MIXED}": MIXED} if weights.startswith("int4") else {}
    return {"llama.cpp": FORMATS[weights], **mixed}


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
            for name, flash in {"flash attention": 1, "no flash attention": 0}.items()
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
            # The buffers that weights were packed into, such as AMX or REPACK, show which kernels run.
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
        # Of ggml's levels this is a warning's.
        if level >= 3:
            self._warnings.append(line)

    def _last_log(self) -> str:
        return " ".join(filter(None, self._warnings)) or "it does not say why"


def open_drafted(opening: Opening, progress: Progress) -> Session:
    """llama.cpp with a draft: the same model at 4 bits, or a small model at 8. Writes and quantizes the files
    unless that was done, and loads them. `Opening.options` may name the folder of the small model's float
    weights as `draft`."""

    def file(folder: Path, format_: str) -> Path:
        return gguf_of(folder, format_, threads=opening.threads, progress=progress)

    drafts = {"Q4_0": file(opening.model, "Q4_0")}
    if small := opening.options.get("draft"):
        drafts["the small model"] = file(Path(small), "Q8_0")
    return DraftedLlamaSession(file(opening.model, opening.format), drafts, opening)


class DraftedLlamaSession(LlamaCppSession):
    """A target and its drafts, each with a context for each setting."""

    def __init__(self, path: Path, drafts: Mapping[str, Path], opening: Opening) -> None:
        super().__init__(path, opening)
        sessions = {name: LlamaCppSession(draft, opening) for name, draft in drafts.items()}
        self._kinds = {
            f"{setting}, lines of {most} by {name}": (setting, most, draft)
            for name, draft in sessions.items()
            for setting in self.settings
            for most in (16, 8, 4)
            if setting in draft.settings
        }
        self.settings = tuple(self._kinds)
        self._passes = 0

    def passes(self) -> int:
        """Verifications so far."""
        return self._passes

    def prefill(self, prompt: Sequence[int], setting: str) -> int:
        """See `Session.prefill`."""
        kind, self._most, self._draft = self._kinds[setting]
        self._seen, self._drafted = list(prompt), len(prompt)
        self._draft.begin(kind)
        self._draft.feed(prompt)
        return super().prefill(prompt, kind)

    def decode(self, tokens: int, setting: str) -> list[int]:
        """See `Session.decode`."""
        ids: list[int] = []
        while len(ids) < tokens:
            line = self._line(min(self._most, tokens - len(ids) - 1))
            picked = self.feed_all([self._token, *line], len(self._seen)).argmax(-1)
            self._passes += 1
            right = next((i for i, token in enumerate(line) if token != picked[i]), len(line))
            self._seen += [self._token, *line[:right]]
            self._token = int(picked[right])
            self.forget(len(self._seen))
            # The draft has not been fed the line's last token.
            self._drafted = min(self._drafted, len(self._seen))
            self._draft.forget(self._drafted)
            ids += [*line[:right], self._token]
        return ids

    def _line(self, most: int) -> list[int]:
        """What the draft finds likeliest after the last token."""
        line: list[int] = []
        if most <= 0:
            return line
        pending = [*self._seen[self._drafted :], self._token]
        self._drafted = len(self._seen) + 1
        while len(line) < most:
            logits = self._draft.feed(pending)
            # The probability of the likeliest token, among the ten likeliest ones.
            top = np.partition(logits, -10)[-10:]
            line.append(int(logits.argmax()))
            if 1 / np.exp(top - top.max()).sum() < 0.75 or len(line) == most:
                break
            pending = line[-1:]
            self._drafted += 1
        return line


# llama.cpp's file types by the names of its formats.
FILE_TYPES = {
    "F32": "LLAMA_FTYPE_ALL_F32",
    "BF16": "LLAMA_FTYPE_MOSTLY_BF16",
    "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "Q4_1": "LLAMA_FTYPE_MOSTLY_Q4_1",
    "Q4_K": "LLAMA_FTYPE_MOSTLY_Q4_K_S",
    MIXED: "LLAMA_FTYPE_MOSTLY_Q4_K_M",
}
# Types that the package `gguf` writes, too.
PACKAGE_TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1")
# Changes whenever the same folder would make another file.
_VERSION = 3


def gguf_of(
    folder: Path,
    file_type: str,
    *,
    threads: int,
    progress: Progress,
    by_package: Sequence[str] = ("F32",),
    vocabulary: Mapping[str, Any] | None = None,
) -> Path:
    """The GGUF of a folder's weights at a llama.cpp file type, made unless it is there.

    Args:
      folder: a Hugging Face model folder.
      file_type: one of `FILE_TYPES`, or of `by_package`.
      threads: that the quantizer may use.
      by_package: of `PACKAGE_TYPES`, those that the package `gguf` quantizes; llama.cpp does the others.
      vocabulary: metadata of the tokenizer (see `write_gguf`), always the same for a folder.
    """
    from jaxllm.checkpoints.huggingface import read_config, read_params

    cache = cache_folder() / "benchmarks" / "gguf" / _digest(str(folder.resolve()))
    cache.mkdir(parents=True, exist_ok=True)
    key = f"v{_VERSION}-{content_key(folder)}"

    def named(kind: str) -> Path:
        return cache / f"{key}-{kind}{'-package' if kind in by_package else ''}.gguf"

    wanted = named(file_type)
    # Other processes may make files in it.
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for older in cache.glob("*.gguf"):
            if not older.name.startswith(key):
                older.unlink()
        if wanted.exists():
            return wanted
        kind = file_type if file_type in by_package else "F32"
        written = named(kind)
        keep = written.exists() or wanted == written
        if not written.exists():
            cfg = read_config(folder)
            if reason := refusal(cfg):
                raise ConfigError(f"{folder}: {reason}")
            write_gguf(written, cfg, read_params(folder, cfg), progress, kind=kind, vocabulary=vocabulary)
        if wanted != written:
            quantize_gguf(written, wanted, file_type, threads)
        if not keep:
            # Several times the size of the file that was asked for, and quickly made again.
            written.unlink()
    return wanted


def content_key(folder: Path) -> str:
    """A key of a folder's content: name, size and time of its config and weights."""
    stats = ((path, path.stat()) for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))])
    return _digest("".join(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n" for path, stat in stats))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def refusal(cfg: ModelConfig) -> str | None:
    """The reason why the `llama` architecture of GGUF cannot describe a model, None if it can."""
    if cfg.model_type not in ("llama", "mistral"):
        return f"model_type {cfg.model_type} is not written as GGUF, only llama and mistral are"
    if cfg.rope is None or cfg.rope.kind not in ("default", "linear") or any(cfg.attention_windows):
        return "rotary scalings other than linear and attention windows are not written as GGUF"
    if cfg.qkv_bias or cfg.o_bias or cfg.ffn_bias or cfg.activation != "silu":
        return "biases and activations other than silu are not written as GGUF"
    return None


def write_gguf(
    path: Path,
    cfg: ModelConfig,
    params: Iterable[tuple[str, np.ndarray]],
    progress: Progress,
    *,
    kind: str = "F32",
    vocabulary: Mapping[str, Any] | None = None,
) -> None:
    """Writes a GGUF file atomically (see `jaxllm.export.gguf_file.write_gguf`).

    Args:
      cfg: config of the model; `refusal(cfg)` is None.
      params: (name, float array) pairs in the order of `param_specs(cfg)`.
      kind: one of `PACKAGE_TYPES`.
      vocabulary: metadata of the tokenizer without the prefix `tokenizer.ggml.`; None for one character a
        token.
    """
    keys = vocabulary or _characters(cfg.vocab_size)
    cfg = dataclasses.replace(cfg, model_type="llama")
    with temporary_file(path) as (written, _):
        exported.write_gguf(
            written,
            cfg,
            params,
            kind,
            {f"tokenizer.ggml.{key}": value for key, value in keys.items()},
            lambda done, total: progress("Writing GGUF", done, total),
        )
        written.replace(path)


def quantize_gguf(source: Path, path: Path, file_type: str, threads: int) -> None:
    """Makes `path` of a float GGUF with llama.cpp's own quantizer.

    Every matrix gets the same format (`pure`), the vocabulary's too: otherwise llama.cpp would keep the head
    at Q6_K. `MIXED` is mixed as llama.cpp does. Rows that do not divide into a format's blocks get more bits.
    """
    import llama_cpp

    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype = getattr(llama_cpp, FILE_TYPES[file_type])
    how.pure = file_type != MIXED
    how.nthread = threads
    said: list[bytes] = []
    # It lists every array. llama-cpp-python's own callback fails where a message ends within a character.
    listen = llama_cpp.llama_log_callback(lambda _level, text, _data: said.append(text))
    llama_cpp.llama_log_set(listen, ctypes.c_void_p(0))
    try:
        with temporary_file(path) as (written, _):
            code = llama_cpp.llama_model_quantize(
                os.fsencode(source), os.fsencode(written), ctypes.byref(how)
            )
            if code:
                last = one_line(said[-1].decode(errors="replace")) if said else "nothing"
                raise JaxllmError(
                    f"llama.cpp's quantizer failed on {source} (code {code}); it said last: {last}"
                )
            written.replace(path)
    finally:
        # No callback is llama.cpp's own, which outlives this call's.
        llama_cpp.llama_log_set(llama_cpp.llama_log_callback(), ctypes.c_void_p(0))


def tensor_bytes(path: Path) -> dict[str, tuple[int, int]]:
    """Of each tensor of a GGUF file, its bytes and its number of values."""
    import gguf

    return {t.name: (int(t.n_bytes), int(t.n_elements)) for t in gguf.GGUFReader(path).tensors}


def text_of_token(token: int) -> str:
    """The text of a token in our GGUF files: one character."""
    # Of the supplementary planes, which have enough for any vocabulary.
    return chr(0x20000 + token)


def _characters(size: int) -> dict[str, Any]:
    """A vocabulary in which each token is one character."""
    return {
        "model": "llama",
        "tokens": [text_of_token(each) for each in range(size)],
        "scores": [0.0] * size,
        # SPM's kinds of tokens: one of unknown ones, and normal ones.
        "token_type": [2] + [1] * (size - 1),
        # It needs some; the last token is as seldom chosen as any.
        "bos_token_id": size - 1,
        "eos_token_id": size - 1,
        "unknown_token_id": 0,
        "add_bos_token": False,
        "add_eos_token": False,
        "add_space_prefix": False,
    }
