"""Describes programs of context codecs in a folder, and makes chunks' blobs of their arrays.

`encode_chunks_8` accepts the caches, and returns chunks at 8 bits; `load_chunks_8` puts such chunks into
caches. Blobs are those of the live service's codec, byte for byte (see `jaxllm.contexts.codecs`).
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.contexts.codecs import WIDTHS, ChunkFormat, find_codec

KEYS, VALUES = "kv_cache_k_{}", "kv_cache_v_{}"
CHUNKS = "chunks"
# Of a chunk (C), as the live service has them by default.
CHUNK_TOKENS = 16
# Of a cache's name.
LEVELS, FACTORS = "{}_levels", "{}_factors"
Arrays = dict[str, np.ndarray]


def chunk_format(codec: str) -> ChunkFormat:
    """The format of a codec's chunks."""
    return ChunkFormat(find_codec(codec), WIDTHS, CHUNK_TOKENS)


def coded_shapes(
    cfg: ModelConfig, codec_name: str, bits: int, count: int
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Returns shapes and dtypes of the programs' input and output arrays for `count` chunks (n), by name."""
    found: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
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


def coded_of(
    blobs: Sequence[Sequence[np.ndarray]], shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]], layers: int
) -> Arrays:
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
