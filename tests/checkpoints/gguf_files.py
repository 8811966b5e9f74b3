"""Writes GGUF files of small models by the `gguf` package, as llama.cpp's converter does."""

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

from jaxllm.checkpoints.gguf_model import apart
from jaxllm.checkpoints.huggingface import read_config, read_params
from jaxllm.config import ModelConfig
from jaxllm.models.architectures import architecture
from jaxllm.models.parameters import param_specs
from jaxllm.models.translate import swap_pairs

_ARCHITECTURES = {
    "llama": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen2_moe": "qwen2moe", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "olmo2": "olmo2", "olmoe": "olmoe", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "phi": "phi2", "phi3": "phi3", "smollm3": "smollm3", "granite": "granite",
    "stablelm": "stablelm", "ernie4_5": "ernie4_5", "gpt_oss": "gpt-oss",
}  # fmt: skip
_PAIRED = ("llama", "smollm3", "granite")
_EXPERTS = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}


def write_model(path: Path, folder: Path, kind: str = "F32", **metadata: Any) -> Path:
    """Writes the model and the tokenizer of a Hugging Face folder.

    Args:
      path: of the file.
      folder: the model.
      kind: type of its matrices; those whose rows do not divide into blocks are F16.
      metadata: further keys, or values of others; None leaves a key out.
    """
    cfg = read_config(folder)
    tensors = gguf_tensors(cfg, dict(read_params(folder, cfg)))
    keys = {**config_keys(cfg), **tokenizer_keys(folder, cfg.vocab_size), **metadata}
    return write_file(path, _ARCHITECTURES[cfg.model_type], keys, tensors, kind)


def write_file(
    path: Path, name: str, keys: Mapping[str, Any], tensors: Mapping[str, Any], kind: str = "F32"
) -> Path:
    """Writes a file of an architecture; keys of no other section are the architecture's. A tensor is of
    numbers, or raw blocks and their type."""
    writer = gguf.GGUFWriter(path, name)
    for key, value in keys.items():
        key = key if key.startswith(("tokenizer.", "general.", "split.")) else f"{name}.{key}"
        if value is None:
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for each, value in tensors.items():
        if isinstance(value, tuple):
            writer.add_tensor(each, value[0], raw_dtype=gguf.GGMLQuantizationType[value[1]])
            continue
        value = np.asarray(value, np.float32)
        own = gguf.GGMLQuantizationType[kind if value.ndim > 1 else "F32"]
        if value.shape[-1] % gguf.GGML_QUANT_SIZES[own][0]:
            own = gguf.GGMLQuantizationType.F16
        writer.add_tensor(each, quantize(value, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(cfg: ModelConfig, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our parameters under llama.cpp's names, in its order of rows."""
    name = _ARCHITECTURES[cfg.model_type]
    number = {each: number for number, each in gguf.MODEL_ARCH_NAMES.items()}[name]
    names, specs = gguf.get_tensor_name_map(number, cfg.layers), param_specs(cfg)
    found: dict[str, Any] = {}
    for tensor in itertools.chain.from_iterable(map(apart, architecture(cfg.model_type).tensors(cfg))):
        # As Hugging Face stores it, but norms, which llama.cpp multiplies by as they are.
        value = dataclasses.replace(tensor, plus_one=False).write(params, specs).astype(np.float32)
        param = tensor.params[0]
        if tensor.expert is not None:
            layer, part = param.split(".")[1], param.rsplit(".", 1)[1]
            found.setdefault(f"blk.{layer}.{_EXPERTS[part]}.weight", []).append(value)
            continue
        if tensor.stacked:
            layer, part = param.split(".")[1], param.rsplit(".", 1)[1]
            kind = "bias" if part.endswith("_bias") else "weight"
            part = part.removeprefix("expert_").removesuffix("_bias")
            found[f"blk.{layer}.{_EXPERTS[part]}.{kind}"] = value
            continue
        if name in _PAIRED and param.rsplit(".", 1)[-1] in ("q", "k", "q_bias", "k_bias"):
            value = swap_pairs(value, cfg.head_dim, cfg.head_dim // 2)
        stored = names.get_name(("model." if tensor.in_body else "") + tensor.name, (".weight", ".bias"))
        stored += ".weight" if tensor.name.endswith(".sinks") else ""
        found[stored] = value.reshape(-1) if param.endswith("shared.score") else value
    return {each: np.stack(value) if isinstance(value, list) else value for each, value in found.items()}


def config_keys(cfg: ModelConfig) -> dict[str, Any]:
    """The architecture's metadata."""
    keys: dict[str, Any] = {
        "embedding_length": cfg.hidden_size,
        "block_count": cfg.layers,
        "attention.head_count": cfg.heads,
        "attention.head_count_kv": cfg.kv_heads,
        "attention.key_length": cfg.head_dim,
        "attention.value_length": cfg.head_dim,
        "feed_forward_length": cfg.ffn_size,
        "context_length": cfg.window_tokens,
        "vocab_size": cfg.vocab_size,
        f"attention.layer_norm{'' if cfg.norm == 'layer' else '_rms'}_epsilon": cfg.norm_eps,
    }
    if cfg.rope is not None:
        keys |= {"rope.freq_base": cfg.rope.theta, "rope.dimension_count": cfg.rope.dim}
        if cfg.rope.kind != "default":
            keys |= {"rope.scaling.type": cfg.rope.kind, "rope.scaling.factor": cfg.rope.factor}
        if cfg.rope.kind == "yarn":
            keys["rope.scaling.original_context_length"] = cfg.rope.original_window_tokens
    if cfg.experts:
        keys |= {
            "expert_count": cfg.experts,
            "expert_used_count": cfg.experts_per_token,
            "expert_feed_forward_length": None if cfg.model_type == "mixtral" else cfg.expert_ffn_size,
            "expert_shared_feed_forward_length": cfg.shared_expert_size or None,
        }
        if cfg.model_type == "olmoe":
            keys |= {"expert_feed_forward_length": None, "attention.clamp_kqv": cfg.qkv_clip or None}
    if any(cfg.attention_windows):
        keys["attention.sliding_window"] = max(cfg.attention_windows)
    if cfg.attention_softcap:
        keys["attn_logit_softcapping"] = cfg.attention_softcap
    if cfg.logit_softcap:
        keys["final_logit_softcapping"] = cfg.logit_softcap
    if cfg.model_type == "granite":
        keys |= {
            "embedding_scale": cfg.embed_scale, "residual_scale": 1.0, "attention.scale": cfg.attention_scale,
            "logit_scale": 1.0 / cfg.logit_scale,
        }  # fmt: skip
    if cfg.model_type == "stablelm":
        keys["use_parallel_residual"] = False
    return keys


def tokenizer_keys(folder: Path, vocab_size: int) -> dict[str, Any]:
    """The tokenizer's metadata: of the folder's byte pairs or SentencePiece, or of one character for each
    token where the folder has none."""
    if not (folder / "tokenizer.json").is_file():
        tokens = ["<unk>", "<s>", "</s>", *(chr(0x4E00 + at) for at in range(vocab_size - 3))]
        return _sentence_pieces(tokens, [0.0] * vocab_size)
    data = json.loads((folder / "tokenizer.json").read_text())
    model = data["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    if not model["byte_fallback"]:
        return {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * len(tokens),
            "tokenizer.ggml.merges": [
                each if isinstance(each, str) else " ".join(each) for each in model["merges"]
            ],
        }
    # Scores are the order of merges, as Llama's SentencePiece models have them.
    rank = {"".join(each): -float(at) for at, each in reversed(list(enumerate(model["merges"])))}
    return _sentence_pieces(tokens, [rank.get(token, -1e6) for token in tokens])


def _sentence_pieces(tokens: list[str], scores: list[float]) -> dict[str, Any]:
    types = [6 if len(each) == 6 and each.startswith("<0x") else 1 for each in tokens]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *types[3:]], "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
    }  # fmt: skip
