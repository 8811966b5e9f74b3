"""Declares exported programs: their names, and the arrays that each kind reads and returns.

A program is a function of weights, caches and inputs, each arrays by name, to its outputs by name, and to the
caches with the new rows. Names and shapes are those of the LiteRT-LM runtime: `tokens` `[1, T]` and
`input_pos` `[T]` int32, `kv_cache_k_i` and `kv_cache_v_i` `[1, K, S, H]` of layer i.

Programs that decode several tokens sample inside, by these inputs. They are few, because each argument costs
as much as a layer of a small model (see `jaxllm.sampling_state.SamplerState` for their meaning):

    limit        [1] int32       maximum number of tokens, at least 1
    stop_ids     [STOP_IDS] int32    tokens that end the answer, padded with -1
    options      [6] float32     `OPTIONS`, in this order
    draw         [5] int32       top_k, penalized (0 or 1), drawn, and the two words of the seed as stored
    bias         [V] float32     these three are read only if `penalized`
    in_prompt    [1, V] bool
    counts       [1, V] int32    number of each token in the answer

Programs of a codec encode and load contexts: `encode_chunks_8` accepts the caches, and returns chunks at 8
bits; `load_chunks_8` puts such chunks into caches. Blobs are those of the live service's codec, byte for
byte (see `jaxllm.contexts.codecs`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxllm.config import FULL_LEVEL, MAX_DIMENSION, ModelConfig
from jaxllm.contexts import CHUNK_TOKENS, ROW_BYTES
from jaxllm.contexts.codecs import CODECS, WIDTHS, ChunkFormat, find_codec
from jaxllm.export.folder_format.parts import ADAPTER, KEEP, MODEL, PROMPT, TinyLmFacts
from jaxllm.options import check_options, option
from jaxllm.sampling_state import NUMBERS, SamplerState

Kind = Literal["prefill", "decode", "block", "verify", "encode", "tiny_lm", "encode_chunks", "load_chunks"]
CODED_KINDS: tuple[Kind, ...] = ("encode_chunks", "load_chunks")
_KINDS: tuple[Kind, ...] = ("prefill", "decode", "block", "verify", "encode")

KEYS, VALUES = "kv_cache_k_{}", "kv_cache_v_{}"
CHUNKS = "chunks"
# Of a cache's name.
LEVELS, FACTORS = "{}_levels", "{}_factors"

TOKENS, POSITIONS, MASK, LOGITS = "tokens", "input_pos", "mask", "logits"
# Encoder-decoders: keys and values of the source that the decoder attends to, and its number of tokens.
SOURCE_KEYS, SOURCE_VALUES, SOURCE_TOKENS = "source_k_{}", "source_v_{}", "source_tokens"
# Outputs of a block: the tokens `[1, T]` int32, -1 after the last one, and their number `[1]` int32.
NEXT_TOKENS, COUNT = "next_tokens", "count"
STOP_IDS = 16
OPTIONS = NUMBERS
TOP_K, PENALIZED, DRAWN, SEED = 0, 1, 2, slice(3, 5)
# Read only if a sampler penalizes.
PENALTIES = ("bias", "in_prompt", "counts")
Shapes = dict[str, tuple[tuple[int, ...], np.dtype]]
Arrays = dict[str, np.ndarray]
_IDS, _FLAGS, _FLOATS = np.dtype(np.int32), np.dtype(np.bool_), np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """One program.

    Attributes:
      kind: prefill, decode, block (decodes several tokens), verify, encode (encodes a source), tiny_lm
        (encodes a row of a prompt, to plan), encode_chunks or load_chunks (of contexts).
      tokens: T, number of new tokens; maximum for a block; length of the longest source for an encode
        program.
      level: sub-model, in percent; 100 for a tiny LM's, which all levels share.
      cache_tokens: S, length of its caches; 0 for the whole context.
      codec, bits: codec name and width of chunks of contexts; empty and 0 for other programs.
    """

    kind: Kind
    tokens: int = option(low=1, high=MAX_DIMENSION)
    level: int = option(low=1, high=MAX_DIMENSION)
    cache_tokens: int = option(0, low=0, high=MAX_DIMENSION)
    file: str
    codec: str = ""
    bits: int = 0

    def __post_init__(self) -> None:
        check_options(self)
        if self.kind not in CODED_KINDS and (self.codec or self.bits):
            raise ValueError("a codec of a program that has none")
        coded = self.codec in CODECS and self.bits in WIDTHS and not self.tokens % CHUNK_TOKENS
        if self.kind in CODED_KINDS and not coded:
            raise ValueError(f"a program of chunks with codec {self.codec!r:.40} at {self.bits!r:.40} bits")

    @functools.cached_property
    def name(self) -> str:
        """Its name in runtimes. Levels and short caches come first, so that LiteRT-LM, which matches
        prefixes, does not mistake their signatures for the model's."""
        parts = [] if self.level == FULL_LEVEL else [f"level_{self.level}"]
        parts += [f"cache_{self.cache_tokens}"] if self.cache_tokens else []
        size = self.bits or self.tokens
        parts += [self.kind] if self.kind == "decode" else [f"{self.kind}_{size}"]
        return "_".join(parts)


def level_signatures(
    level: int,
    *,
    chunk_tokens: Sequence[int],
    verify_tokens: Sequence[int] = (),
    block_tokens: int = 0,
    cache_tokens: Sequence[int] = (),
    encode_tokens: Sequence[int] = (),
    codec: tuple[str, int] = ("", 0),
    file: Callable[[str], str] = lambda _: "",
) -> list[Signature]:
    """Lists the signatures of a level.

    Args:
      chunk_tokens, verify_tokens: lengths of prefill chunks and sizes of trees.
      block_tokens: maximum number of tokens that a program decodes; 0 for only single tokens.
      cache_tokens: lengths of caches besides the whole context; each gets the chunks and trees that fit.
      encode_tokens: lengths of sources; these programs have no caches.
      codec: codec of chunks, and number of tokens of a program's chunks; 0 for no such programs.
      file: function from a program's name to its file.
    """
    found, blocks = [], (block_tokens,) if block_tokens else ()
    for cache in (*cache_tokens, 0):
        sizes = (chunk_tokens, (1,), blocks, verify_tokens, () if cache else encode_tokens)
        coded = min(codec[1], cache or codec[1]) // CHUNK_TOKENS * CHUNK_TOKENS
        widths = itertools.product(CODED_KINDS, WIDTHS if coded else ())
        kinds: Sequence[tuple[Kind, int, str, int]] = [
            *((kind, each, "", 0) for kind, several in zip(_KINDS, sizes, strict=True) for each in several),
            *((kind, coded, codec[0], bits) for kind, bits in widths),
        ]
        for kind, tokens, name, bits in kinds:
            if not cache or tokens <= cache:
                bare = Signature(
                    kind=kind, tokens=tokens, level=level, cache_tokens=cache, file="", codec=name, bits=bits
                )
                found.append(dataclasses.replace(bare, file=file(bare.name)))
    return found


@dataclasses.dataclass(frozen=True)
class Interface:
    """The arrays of a program besides its weights, by name.

    Attributes:
      caches: keys and values; empty for a program without caches.
      inputs: its other arguments.
      outputs: its results, without caches.
      writes: whether it returns the caches, which are then donated.
    """

    caches: Shapes
    inputs: Shapes
    outputs: Shapes
    writes: bool = True


def interface_of(
    signature: Signature,
    cfg: ModelConfig,
    cache_tokens: int,
    cache_dtype: np.dtype,
    *,
    source_tokens: int = 0,
    adapter_size: int = 0,
    tiny_lm: TinyLmFacts | None = None,
) -> Interface:
    """Returns the arrays of a program.

    Args:
      cache_tokens: length of its caches (S).
      source_tokens: number of rows of an encoder-decoder's source's keys and values (R).
      adapter_size: size of an adapter (N); 0 if programs accept none.
      tiny_lm: facts of the tiny LM, for a program of one.
    """
    kind, count, row = signature.kind, signature.tokens, (1, signature.tokens)
    if kind == "tiny_lm":
        assert tiny_lm is not None
        sizes = {KEEP: count, MODEL: len(tiny_lm.levels), PROMPT: len(tiny_lm.prompt_ratios)}
        outputs: Shapes = {name: ((1, size), _FLOATS) for name, size in sizes.items()}
        return Interface({}, {TOKENS: (row, _IDS), MASK: (row, _FLAGS)}, outputs, writes=False)
    if kind == "encode":
        outputs = _typed(source_shapes(cfg, count), cache_dtype)
        number = {SOURCE_TOKENS: outputs.pop(SOURCE_TOKENS)}
        return Interface({}, {TOKENS: (row, _IDS), **number}, outputs, writes=False)
    caches = _typed(cache_shapes(cfg, cache_tokens, cache_dtype), cache_dtype)
    if kind in CODED_KINDS:
        chunks = count // CHUNK_TOKENS
        numbers: Shapes = {CHUNKS: ((chunks,), _IDS)}
        coded = coded_shapes(cfg, signature.codec, signature.bits, chunks)
        if kind == "encode_chunks":
            return Interface(caches, numbers, coded, writes=False)
        return Interface(caches, numbers | coded, {})
    new = 1 if kind == "block" else count
    inputs: Shapes = {TOKENS: ((1, new), _IDS), POSITIONS: ((new,), _IDS)}
    outputs = {} if kind == "prefill" else {LOGITS: ((1, count, cfg.vocab_size), _FLOATS)}
    if kind == "verify":
        inputs[MASK] = (count, count), _FLAGS
    elif kind == "block":
        inputs |= control_shapes(cfg.vocab_size)
        outputs = {NEXT_TOKENS: (row, _IDS), COUNT: ((1,), _IDS)}
    if adapter_size:
        inputs[ADAPTER] = (adapter_size,), _FLOATS
    return Interface(caches, inputs | _typed(source_shapes(cfg, source_tokens), cache_dtype), outputs)


def _typed(shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype) -> Shapes:
    return {name: (shape, _IDS if name == SOURCE_TOKENS else dtype) for name, shape in shapes.items()}


def cache_shapes(
    cfg: ModelConfig, cache_tokens: int, dtype: np.dtype = _FLOATS
) -> dict[str, tuple[int, ...]]:
    """Shapes `[1, K, S, H]` of the caches of a model by name; at 8 bits `[1, K, S, H + 4]` (see
    `jaxllm.kv.byte_rows`)."""
    more = ROW_BYTES if dtype == np.int8 else 0
    shapes = _layer_shapes(cfg, cache_tokens, (KEYS, VALUES))
    return {name: (*shape, width + more) for name, (*shape, width) in shapes.items()}


def source_shapes(cfg: ModelConfig, source_tokens: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a source of up to `source_tokens` tokens (R) in the decoder of a model by name; none without
    an encoder."""
    if cfg.encoder is None:
        return {}
    return {SOURCE_TOKENS: (1,), **_layer_shapes(cfg, source_tokens, (SOURCE_KEYS, SOURCE_VALUES))}


def _layer_shapes(cfg: ModelConfig, tokens: int, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    return {
        name.format(layer): (1, cfg.units(layer).kv_heads, tokens, cfg.head_dim)
        for layer in range(cfg.layers)
        for name in names
    }


def lengthened(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Pads rows `[1, K, T, H]` with zeros at the end to `shape` `[1, K, S, H]`."""
    whole = np.zeros(shape, rows.dtype)
    whole[:, :, : rows.shape[2]] = rows
    return whole


def controls(sampler: SamplerState, stop_ids: np.ndarray, limit: int) -> dict[str, np.ndarray]:
    """The inputs of a block for a request; `stop_ids` is `[STOP_IDS]` int32."""
    options = [np.float32(getattr(sampler, name)) for name in OPTIONS]
    numbers = [int(sampler.top_k), int(bool(sampler.penalized)), int(sampler.drawn)]
    seed = np.asarray(sampler.seed, np.uint32).view(np.int32)
    return {
        "limit": np.array([limit], np.int32),
        "stop_ids": np.asarray(stop_ids, np.int32),
        "options": np.array(options, np.float32),
        "draw": np.concatenate([np.array(numbers, np.int32), seed]),
        **{name: np.asarray(getattr(sampler, name)) for name in PENALTIES},
    }


def sampler_of(controls: Mapping[str, Any], counts: Any, done: Any) -> SamplerState:
    """The sampler of a block's `controls`, with the counts `[1, V]` after `done` tokens since then."""
    draw = controls["draw"]
    return SamplerState(
        **dict(zip(OPTIONS, controls["options"], strict=True)),
        top_k=draw[TOP_K],
        penalized=draw[PENALIZED] > 0,
        bias=controls["bias"],
        in_prompt=controls["in_prompt"],
        counts=counts,
        seed=draw[SEED],
        drawn=draw[DRAWN] + done,
    )


def control_shapes(vocab_size: int) -> Shapes:
    """Shape and dtype of each of the `controls`."""
    return {
        "limit": ((1,), _IDS),
        "stop_ids": ((STOP_IDS,), _IDS),
        "options": ((len(OPTIONS),), _FLOATS),
        "draw": ((SEED.stop,), _IDS),
        "bias": ((vocab_size,), _FLOATS),
        "in_prompt": ((1, vocab_size), _FLAGS),
        "counts": ((1, vocab_size), _IDS),
    }


def chunk_format(codec: str) -> ChunkFormat:
    """The format of a codec's chunks."""
    return ChunkFormat(find_codec(codec), WIDTHS, CHUNK_TOKENS)


def coded_shapes(cfg: ModelConfig, codec_name: str, bits: int, count: int) -> Shapes:
    """Returns shapes and dtypes of the programs' input and output arrays for `count` chunks (n), by name."""
    found: Shapes = {}
    codec, width = find_codec(codec_name), cfg.head_dim
    for layer in range(cfg.layers):
        heads = cfg.units(layer).kv_heads
        for name, sharing in ((KEYS, codec.keys), (VALUES, codec.values)):
            side = name.format(layer)
            levels = (count, heads, CHUNK_TOKENS, width * bits // 8)
            shared = (heads, 1, width) if sharing == "channel" else (heads, CHUNK_TOKENS, 1)
            found[LEVELS.format(side)] = levels, np.dtype(np.uint8)
            found[FACTORS.format(side)] = (count, 2, *shared), np.dtype(np.float32)
    return found


def blobs_of(coded: Mapping[str, np.ndarray], layers: int, count: int) -> list[tuple[np.ndarray, ...]]:
    """The blobs of the first `count` chunks of a program's arrays, one of each layer."""
    found = []
    for chunk in range(count):
        layer_blobs = []
        for layer in range(layers):
            parts = []
            for name in (KEYS, VALUES):
                side = name.format(layer)
                parts.append(coded[LEVELS.format(side)][chunk].reshape(-1))
                factors = coded[FACTORS.format(side)][chunk].astype(np.float16)
                parts.append(np.ascontiguousarray(factors).reshape(-1).view(np.uint8))
            layer_blobs.append(np.concatenate(parts))
        found.append(tuple(layer_blobs))
    return found


def coded_of(blobs: Sequence[Sequence[np.ndarray]], shapes: Shapes, layers: int) -> Arrays:
    """The arrays of a program for chunks by their blobs, the last of them repeated up to the program's
    number; `shapes`: see `coded_shapes`."""
    found: Arrays = {}
    for layer in range(layers):
        at = 0
        for name in (KEYS, VALUES):
            for part in (LEVELS, FACTORS):
                key = part.format(name.format(layer))
                (count, *shape), dtype = shapes[key]
                stored = np.dtype(np.uint8) if part == LEVELS else np.dtype(np.float16)
                size = math.prod(shape) * stored.itemsize
                cut = [np.ascontiguousarray(each[layer][at : at + size]) for each in blobs]
                cut += cut[-1:] * (count - len(cut))
                at += size
                found[key] = np.stack([each.view(stored).reshape(shape) for each in cut]).astype(dtype)
    return found
