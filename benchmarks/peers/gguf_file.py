"""Writes our parameters as a GGUF file of llama.cpp's `llama` architecture, at any of its widths.

The float weights are written once, in float32 so that llama.cpp's own quantizer starts from what the
checkpoint holds; it makes the other formats, or the package `gguf` those that it can. In its vocabulary every
token is one character unless one is given: benchmarks feed token ids, or texts of as many characters where a
server takes no ids.
"""

import ctypes
import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.peer import Progress
from jaxllm.config import ModelConfig
from jaxllm.errors import JaxllmError, one_line
from jaxllm.export import gguf_file as exported
from jaxllm.files.atomic import temporary_file

# llama.cpp's file types by the names of its formats.
FILE_TYPES = {
    "F32": "LLAMA_FTYPE_ALL_F32",
    "BF16": "LLAMA_FTYPE_MOSTLY_BF16",
    "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "Q4_1": "LLAMA_FTYPE_MOSTLY_Q4_1",
    "Q4_K": "LLAMA_FTYPE_MOSTLY_Q4_K_S",
}
# Types that the package `gguf` writes, too.
PACKAGE_TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1")
# Characters of the supplementary planes, of which there are enough for any vocabulary.
_FIRST_CHARACTER = 0x20000
# SPM's kinds of tokens.
_UNKNOWN, _NORMAL = 2, 1


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
      path: path of the file.
      cfg: config of the model; `refusal(cfg)` is None.
      params: (name, float array) pairs in the order of `param_specs(cfg)`.
      progress: called with ("Writing GGUF", tensors written, tensors in all).
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
    at Q6_K. Rows that do not divide into blocks of 32 stay at 16 bits.

    Raises:
      JaxllmError: the quantizer fails.
    """
    import llama_cpp

    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype = getattr(llama_cpp, FILE_TYPES[file_type])
    how.pure = True
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
    return chr(_FIRST_CHARACTER + token)


def _characters(size: int) -> dict[str, Any]:
    """A vocabulary in which each token is one character."""
    return {
        "model": "llama",
        "tokens": [text_of_token(each) for each in range(size)],
        "scores": [0.0] * size,
        "token_type": [_UNKNOWN] + [_NORMAL] * (size - 1),
        # It needs some; the last token is as seldom chosen as any.
        "bos_token_id": size - 1,
        "eos_token_id": size - 1,
        "unknown_token_id": 0,
        "add_bos_token": False,
        "add_eos_token": False,
        "add_space_prefix": False,
    }
