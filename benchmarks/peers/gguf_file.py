"""Writes our parameters as a GGUF file of llama.cpp's `llama` architecture, at any of its widths.

The float weights are written once, in float32 so that llama.cpp's own quantizer starts from what the
checkpoint holds; it makes the other formats, or the package `gguf` those that it can. In its vocabulary every
token is one character unless one is given: benchmarks feed token ids, or texts of as many characters where a
server takes no ids.

Only rotary pairs differ. Hugging Face's Llama rotates dimension j of a head together with j + H/2;
llama.cpp's rotates 2j together with 2j + 1. So the rows of q and k are interleaved within each head, as
llama.cpp's converter does; scores, sums over a head's dimensions, do not depend on a common order.
"""

import ctypes
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.peer import Progress
from jaxllm.config import ModelConfig
from jaxllm.errors import JaxllmError, one_line

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
_TOP_NAMES = {
    "embed.tokens": "token_embd.weight",
    "final_norm.scale": "output_norm.weight",
    "head": "output.weight",
}
_LAYER_NAMES = {
    "attn_norm.scale": "attn_norm.weight",
    "attn.q": "attn_q.weight",
    "attn.k": "attn_k.weight",
    "attn.v": "attn_v.weight",
    "attn.o": "attn_output.weight",
    "ffn_norm.scale": "ffn_norm.weight",
    "ffn.gate": "ffn_gate.weight",
    "ffn.up": "ffn_up.weight",
    "ffn.down": "ffn_down.weight",
}


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
    """Writes a GGUF; at no moment is there a partial file at `path`.

    Args:
      path: of the file.
      cfg: the model; `refusal(cfg)` is None.
      params: (name, float array) pairs in the order of `param_specs(cfg)`; taken one by one.
      progress: called with ("Writing GGUF", parameters written, parameters in all).
      kind: one of `PACKAGE_TYPES`; rows that do not divide into its blocks are F16, vectors F32.
      vocabulary: metadata of the tokenizer without the prefix `tokenizer.ggml.`; None for one character a
        token.
    """
    import gguf

    from jaxllm.models.parameters import param_specs

    specs = param_specs(cfg)
    temporary = _temporary(path)
    writer = gguf.GGUFWriter(temporary, "llama")
    try:
        _add_config(writer, cfg)
        if vocabulary is None:
            _add_vocabulary(writer, cfg.vocab_size)
        else:
            _add_keys(writer, vocabulary)
        types = {name: _type(gguf, _gguf_shape(name, spec.shape), kind) for name, spec in specs.items()}
        for name, spec in specs.items():
            size = gguf.quant_shape_to_byte_shape(_gguf_shape(name, spec.shape), types[name])
            count = int(np.prod(size))
            writer.add_tensor_info(gguf_name(name), size, np.dtype(np.uint8), count, raw_dtype=types[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, (name, value) in enumerate(params, start=1):
            values = _gguf_values(name, np.asarray(value, np.float32), cfg)
            writer.write_tensor_data(gguf.quants.quantize(values, types[name]))
            progress("Writing GGUF", done, len(specs))
        writer.close()
        temporary.replace(path)
    except BaseException:
        writer.close()
        temporary.unlink(missing_ok=True)
        raise


def quantize_gguf(source: Path, path: Path, file_type: str, threads: int) -> None:
    """Makes `path` of a float GGUF with llama.cpp's own quantizer.

    Every matrix gets the same format (`pure`), the vocabulary's too: otherwise llama.cpp would keep the head
    at Q6_K. Rows that do not divide into blocks of 32 stay at 16 bits.

    Raises:
      JaxllmError: the quantizer fails.
    """
    import llama_cpp

    temporary = _temporary(path)
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype = getattr(llama_cpp, FILE_TYPES[file_type])
    how.pure = True
    how.nthread = threads
    said: list[bytes] = []
    # It lists every array. llama-cpp-python's own callback fails where a message ends within a character.
    listen = llama_cpp.llama_log_callback(lambda _level, text, _data: said.append(text))
    llama_cpp.llama_log_set(listen, ctypes.c_void_p(0))
    try:
        code = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(temporary), ctypes.byref(how))
        if code:
            last = one_line(said[-1].decode(errors="replace")) if said else "nothing"
            raise JaxllmError(f"llama.cpp's quantizer failed on {source} (code {code}); it said last: {last}")
        temporary.replace(path)
    finally:
        # No callback is llama.cpp's own, which outlives this call's.
        llama_cpp.llama_log_set(llama_cpp.llama_log_callback(), ctypes.c_void_p(0))
        temporary.unlink(missing_ok=True)


def tensor_bytes(path: Path) -> dict[str, tuple[int, int]]:
    """Of each tensor of a GGUF file, its bytes and its number of values."""
    import gguf

    return {t.name: (int(t.n_bytes), int(t.n_elements)) for t in gguf.GGUFReader(path).tensors}


def text_of_token(token: int) -> str:
    """The text of a token in our GGUF files: one character."""
    return chr(_FIRST_CHARACTER + token)


def gguf_name(param: str) -> str:
    """llama.cpp's name of one of our parameters."""
    if param in _TOP_NAMES:
        return _TOP_NAMES[param]
    _, layer, rest = param.split(".", 2)
    return f"blk.{layer}.{_LAYER_NAMES[rest]}"


def interleave_halves(rows: np.ndarray) -> np.ndarray:
    """Rows `[heads, H, D]` of q or k: within each head, dimension j goes to 2j and j + H/2 to 2j + 1."""
    heads, size, width = rows.shape
    return rows.reshape(heads, 2, size // 2, width).swapaxes(1, 2).reshape(heads, size, width)


def _add_config(writer: Any, cfg: ModelConfig) -> None:
    import gguf

    assert cfg.rope is not None  # `refusal` says so
    writer.add_context_length(cfg.window_tokens)
    writer.add_embedding_length(cfg.hidden_size)
    writer.add_block_count(cfg.layers)
    writer.add_feed_forward_length(cfg.ffn_size)
    writer.add_head_count(cfg.heads)
    writer.add_head_count_kv(cfg.kv_heads)
    writer.add_key_length(cfg.head_dim)
    writer.add_value_length(cfg.head_dim)
    writer.add_layer_norm_rms_eps(cfg.norm_eps)
    writer.add_rope_dimension_count(cfg.rope.dim)
    writer.add_rope_freq_base(cfg.rope.theta)
    if cfg.rope.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(cfg.rope.factor)
    writer.add_vocab_size(cfg.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def _add_keys(writer: Any, keys: Mapping[str, Any]) -> None:
    adds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    for key, value in keys.items():
        adds.get(type(value), writer.add_array)(f"tokenizer.ggml.{key}", value)


def _add_vocabulary(writer: Any, size: int) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text_of_token(each) for each in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([_UNKNOWN] + [_NORMAL] * (size - 1))
    # It needs some; the last token is as seldom chosen as any.
    writer.add_bos_token_id(size - 1)
    writer.add_eos_token_id(size - 1)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


def _type(gguf: Any, shape: tuple[int, ...], kind: str) -> Any:
    found = gguf.GGMLQuantizationType[kind if len(shape) > 1 else "F32"]
    whole = not shape or shape[-1] % gguf.GGML_QUANT_SIZES[found][0] == 0
    return found if whole else gguf.GGMLQuantizationType.F16


def _gguf_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A parameter's shape in the file: matrices are `[outputs, inputs]`."""
    if name.endswith("attn.o"):
        return (shape[-1], shape[0] * shape[1])
    if name.endswith("ffn.down"):
        return (shape[1], shape[0])
    return shape if len(shape) < 3 else (shape[0] * shape[1], shape[2])


def _gguf_values(name: str, value: np.ndarray, cfg: ModelConfig) -> np.ndarray:
    shape = _gguf_shape(name, value.shape)
    if name.endswith(("attn.q", "attn.k")):
        value = interleave_halves(value.reshape(-1, cfg.head_dim, cfg.hidden_size))
    if name.endswith(("attn.o", "ffn.down")):
        return np.ascontiguousarray(value.reshape(-1, value.shape[-1]).T)
    return np.ascontiguousarray(value.reshape(shape))


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
