"""Writes a plain model as a GGUF file for llama.cpp, and verifies it before it gets its name.

A level of a Llama-like family whose layers differ is written as llama.cpp's architecture `deci`, which has
numbers of heads and neurons for each layer: nothing is padded. Other families get layers of one size (see
`plain_model.py`).

Tokenizers are byte-level BPE, or SentencePiece's with byte fallback: the inverse of
`jaxllm/checkpoints/gguf_tokenizer.py`, which reads each written file again for comparison.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.checkpoints.gguf_config import family_of, read_gguf_config
from jaxllm.checkpoints.gguf_file import import_gguf, read_gguf
from jaxllm.checkpoints.gguf_model import read_gguf_params, stored_name, turned
from jaxllm.checkpoints.gguf_tokenizer import SAMPLING_KEYS, read_gguf_tokenizer, split_name
from jaxllm.config import ModelConfig
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.export.folder import require_new
from jaxllm.export.plain_model import PlainModel, uniform
from jaxllm.files.atomic import temporary_file
from jaxllm.models.architectures import architecture
from jaxllm.models.parameters import param_specs
from jaxllm.models.translate import Tensor
from jaxllm.nn.layers import inverse_frequencies
from jaxllm.text.tokenizer import Tokenizer, TokenizerFiles

# model_type -> llama.cpp's architecture, for those whose metadata is written here.
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma",
    "smollm3": "smollm3", "ernie4_5": "ernie4_5",
}  # fmt: skip
# Precision -> GGUF's type of matrices; vectors are F32.
TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "int8": "Q8_0"}
_DECI = "deci"
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SAMPLES = ("Once upon a time, there was 1 dog.", "  two  spaces\n\nünïcödé 語 don't 1234", "")


def write_plain_gguf(path: Path, model: PlainModel, precision: str) -> ModelConfig:
    """Writes a file atomically. Returns the config of its model.

    Args:
      precision: precision of its matrices, a key of `TYPES`; rows that do not divide into blocks are F16.

    Raises:
      ConfigError: llama.cpp has no such architecture or tokenizer, or the written file has another model.
    """
    require_new(path)
    level = model.cfg
    if level.model_type not in ARCHITECTURES:
        raise ConfigError(
            f"models of the type {level.model_type} are not written as GGUF, only "
            f"{', '.join(ARCHITECTURES)}; export as hf, and convert that by llama.cpp's own converter"
        )
    plain = level if _as_deci(level) else uniform(level)
    plain = dataclasses.replace(
        plain, model_type="llama" if plain.model_type == "mistral" else plain.model_type
    )
    with temporary_file(path) as (written, _):
        params = model.params(plain, np.dtype(np.float32)).items()
        # Besides the config: name, sampling and tokenizer.
        keys: dict[str, Any] = {"general.name": model.name}
        for option, value in model.tokenizer.sampling.items():
            keys[SAMPLING_KEYS[option]] = value if option == "top_k" else float(value)
        for key, value in vocabulary_keys(model.tokenizer, plain.vocab_size).items():
            keys[f"tokenizer.{'' if key.startswith('chat_template') else 'ggml.'}{key}"] = value
        write_gguf(written, plain, params, TYPES[precision], keys)
        _require_same(written, model, plain)
        written.replace(path)
    return plain


def _as_deci(cfg: ModelConfig) -> bool:
    """Whether a level has layers that differ, and blocks like those of `deci`."""
    if len({cfg.units(layer) for layer in range(cfg.layers)}) == 1 or cfg.rope is None:
        return False
    kept = (
        "model_type", "vocab_size", "hidden_size", "layers", "heads", "kv_heads", "head_dim", "ffn_size",
        "window_tokens", "norm_eps", "rope", "qkv_bias", "tied_head",
    )  # fmt: skip
    plain = ModelConfig(**{name: getattr(cfg, name) for name in kept})
    return plain == cfg.whole and cfg.rope.dim == cfg.head_dim


def write_gguf(
    path: Path,
    cfg: ModelConfig,
    params: Iterable[tuple[str, Any]],
    kind: str,
    keys: Mapping[str, Any],
    on_tensor: Callable[[int, int], None] | None = None,
) -> None:
    """Writes parameters and the metadata of their config, tensor by tensor. Failures leave a partial file.

    Args:
      cfg: config of the model; its type is a key of `ARCHITECTURES`.
      params: (name, float array or what makes one) in the order of `param_specs(cfg)`.
      kind: GGUF's type of matrices, one that the package `gguf` quantizes to; rows that do not divide into
        its blocks are F16, vectors F32.
      keys: further metadata, such as the tokenizer's.
      on_tensor: called with the numbers of tensors written and in all.
    """
    gguf, family, own = import_gguf(), architecture(cfg.model_type), ARCHITECTURES[cfg.model_type]
    name, rope, factors = _DECI if cfg.layer_units else own, cfg.rope, None
    if rope is not None and (rope.kind == "llama3" or rope.factors):
        # Divisors of frequencies, `[rotary / 2]`, of the kinds that llama.cpp stores so (Llama 3).
        plain = dataclasses.replace(rope, kind="default", factors=(), factor=1.0)
        factors = (inverse_frequencies(plain)[0] / inverse_frequencies(rope)[0]).astype(np.float32)
    specs, ready = param_specs(cfg), dict[str, Any]()
    order = {param: place for place, param in enumerate(specs)}
    numbers = {each: number for number, each in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(numbers[own], 1)
    interleaved = family_of(own).interleaved or bool(cfg.layer_units)
    found = {stored_name(each, names, family): turned(each, interleaved) for each in family.tensors(cfg)}
    tensors = sorted(found.items(), key=lambda each: max(order[param] for param in each[1].params))

    def type_of(tensor: Tensor) -> Any:
        matrix = specs[tensor.params[0]].role != "vector"
        wanted = gguf.GGMLQuantizationType[kind if matrix else "F32"]
        whole = tensor.shape(specs)[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
        return wanted if whole else gguf.GGMLQuantizationType.F16

    writer = gguf.GGUFWriter(path, name)
    try:
        for key, value in _config_keys(cfg, kind).items():
            _add(writer, key if key.startswith("general.") else f"{name}.{key}", value)
        for key, value in keys.items():
            _add(writer, key, value)
        if factors is not None:
            writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
        for stored, tensor in tensors:
            size = gguf.quant_shape_to_byte_shape(tensor.shape(specs), type_of(tensor))
            count = int(np.prod(size))
            writer.add_tensor_info(stored, size, np.dtype(np.uint8), count, raw_dtype=type_of(tensor))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        arriving = iter(params)
        for done, (_, tensor) in enumerate(tensors, start=1):
            while not ready.keys() >= set(tensor.params):
                ready.update([next(arriving)])
            value = tensor.write(ready, specs).astype(np.float32)
            writer.write_tensor_data(gguf.quants.quantize(value, type_of(tensor)))
            for param in tensor.params:
                del ready[param]
            if on_tensor is not None:
                on_tensor(done, len(tensors))
    finally:
        writer.close()


def _config_keys(cfg: ModelConfig, kind: str) -> dict[str, Any]:
    gguf, rope = import_gguf(), cfg.rope
    units = [cfg.units(layer) for layer in range(cfg.layers)]
    norm = "layer_norm_epsilon" if cfg.norm == "layer" else "layer_norm_rms_epsilon"

    def by_layer(counts: list[int]) -> int | list[int]:
        return counts if cfg.layer_units else counts[0]

    keys = {
        "general.file_type": int(gguf.LlamaFileType[f"{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}"]),
        "embedding_length": cfg.hidden_size,
        "block_count": cfg.layers,
        "attention.head_count": by_layer([each.kv_heads * cfg.group for each in units]),
        "attention.head_count_kv": by_layer([each.kv_heads for each in units]),
        "attention.key_length": cfg.head_dim,
        "attention.value_length": cfg.head_dim,
        "feed_forward_length": by_layer([each.neurons for each in units]),
        "context_length": cfg.window_tokens,
        "vocab_size": cfg.vocab_size,
        f"attention.{norm}": float(cfg.norm_eps),
    }
    if rope is not None:
        keys |= {"rope.freq_base": float(rope.theta), "rope.dimension_count": rope.dim}
        if rope.kind in ("linear", "yarn"):
            keys |= {"rope.scaling.type": rope.kind, "rope.scaling.factor": float(rope.factor)}
        if rope.kind == "yarn":
            keys["rope.scaling.original_context_length"] = rope.original_window_tokens
    return keys


def _add(writer: Any, key: str, value: Any) -> None:
    adds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adds.get(type(value), writer.add_array)(key, value)


def _require_same(path: Path, model: PlainModel, cfg: ModelConfig) -> None:
    """Raises ConfigError unless the file is read as this model and tokenizer."""
    try:
        file = read_gguf(path)
        ours, theirs = Tokenizer(model.tokenizer), Tokenizer(read_gguf_tokenizer(file, cfg.vocab_size))
        if any(ours.encode(text) != theirs.encode(text) for text in _SAMPLES):
            raise ConfigError(
                "llama.cpp's kinds of tokenizers give other tokens than this model's; export it as hf"
            )
        if cfg.layer_units:
            return
        found = read_gguf_config(file)
        read_gguf_params(file, found)
    except CheckpointError as error:
        raise ConfigError(f"GGUF cannot express this model: {error}") from error
    wanted, read = _comparable(cfg), _comparable(found)
    if lost := [f"{name} {value!r:.80}" for name, value in wanted.items() if read.get(name) != value]:
        raise ConfigError(
            f"GGUF cannot express this {cfg.model_type} model, it loses {', '.join(lost)}; export it as hf"
        )


def _comparable(cfg: ModelConfig) -> Mapping[str, Any]:
    """A config's fields, with numbers in float32, as GGUF stores them, and frequencies in place of how they
    are made."""
    fields = {
        name: float(np.float32(value)) if isinstance(value, float) else value
        for name, value in cfg.to_json().items()
    }
    rope = fields.pop("rope")
    if rope is not None and cfg.rope is not None:
        frequencies, scale = inverse_frequencies(cfg.rope)
        fields["rope"] = [float(f"{each:.5g}") for each in (*frequencies, scale)], cfg.rope.query_growth
    return fields


def vocabulary_keys(files: TokenizerFiles, vocab_size: int) -> dict[str, Any]:
    """Returns the metadata of a tokenizer, without the prefix `tokenizer.ggml.` but for the chat template.

    Args:
      vocab_size: number of rows of the embedding; missing tokens are named as unused.

    Raises:
      ConfigError: llama.cpp has no tokenizer of this kind.
    """
    data = json.loads(files.tokenizer_json)
    model = data["model"]
    if model.get("type") != "BPE":
        raise _unknown(f"a model of the type {model.get('type')!r:.40}")
    added = {each["id"]: each for each in data.get("added_tokens") or ()}
    tokens = {at: token for token, at in model["vocab"].items()} | {
        at: a["content"] for at, a in added.items()
    }
    if max(tokens, default=0) >= vocab_size:
        raise ConfigError(
            f"the tokenizer has tokens up to {max(tokens)}, the model's embedding {vocab_size} rows; GGUF "
            "has one list of both: export it as hf"
        )
    names = [tokens.get(at, f"[unused{at}]") for at in range(vocab_size)]
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    types = [_kind(at, tokens, added, model) for at in range(vocab_size)]
    keys: dict[str, Any] = {"tokens": names, "token_type": types}
    if model.get("byte_fallback"):
        # The order of merges replaces SentencePiece's scores.
        normalizer = data.get("normalizer") or {}
        parts = normalizer.get("normalizers", [normalizer] if normalizer else [])
        rank = {merge.replace(" ", ""): -float(at) for at, merge in reversed(list(enumerate(merges)))}
        keys |= {
            "model": "llama",
            "scores": [rank.get(name, -1e6) for name in names],
            "add_space_prefix": any(each["type"] == "Prepend" for each in parts),
        }
    else:
        normalizer = (data.get("normalizer") or {}).get("type")
        if normalizer not in (None, "NFC"):
            raise _unknown(f"the normalizer {normalizer}")
        keys |= {"model": "gpt2", "pre": split_name(data.get("pre_tokenizer")), "merges": merges}
        if keys["pre"] is None:
            raise _unknown("a rule of its own by which texts are split")
    if len(files.eos_ids) > len(_ENDS):
        raise _unknown(f"{len(files.eos_ids)} tokens that end an answer, more than {len(_ENDS)}")
    at = {token: number for number, token in tokens.items()}
    keys |= {
        "bos_token_id": files.bos_id,
        "add_bos_token": Tokenizer(files).adds_bos,
        "add_eos_token": False,
        "unknown_token_id": at.get(files.special.get("unk_token", "")),
        "padding_token_id": at.get(files.special.get("pad_token", "")),
        "chat_template": files.chat_template,
        **{f"chat_template.{name}": source for name, source in files.templates.items()},
        **dict(zip(_ENDS, files.eos_ids, strict=False)),
    }
    return {name: value for name, value in keys.items() if value is not None}


def _kind(at: int, tokens: Mapping[int, str], added: Mapping[int, Any], model: Mapping[str, Any]) -> int:
    token = tokens.get(at)
    if token is None:
        return _UNUSED
    if model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
        return _BYTE
    if token == model.get("unk_token"):
        return _UNKNOWN
    return _NORMAL if at not in added else _CONTROL if added[at]["special"] else _USER


def _unknown(what: str) -> ConfigError:
    return ConfigError(
        f"the tokenizer has {what}, which llama.cpp does not know by a name; export it as hf, and convert "
        "that by llama.cpp's own converter"
    )
