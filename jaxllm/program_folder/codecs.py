"""Programs of context codecs in a folder, and the blobs of chunks that are made of their arrays.

`encode_chunks_8` takes the caches, and gives chunks at 8 bits; `load_chunks_8` puts such chunks into caches. Blobs
are those of the live service's codec, byte for byte (see `jaxllm.kv.codecs`).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.config import MAX_DIMENSION, ModelConfig
from jaxllm.kv.codecs import CODECS, WIDTHS, ChunkFormat, find_codec
from jaxllm.program_folder.arrays import KEYS, VALUES
from jaxllm.program_folder.files import require_ints

CHUNKS = "chunks"
# Of a cache's name.
LEVELS, FACTORS = "{}_levels", "{}_factors"
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodecFacts:
    """What a loop needs to know of the programs of codecs.

    Attributes:
      codec: by its name in `jaxllm.kv.codecs.CODECS`.
      chunk_tokens: of a chunk (C).
      chunks: that a program takes at once (n).
    """

    codec: str
    chunk_tokens: int
    chunks: int

    def __post_init__(self) -> None:
        if self.codec not in CODECS:
            raise ValueError(f"a codec {self.codec!r:.40}")
        require_ints("the chunks of a codec", (self.chunk_tokens, self.chunks), 1, MAX_DIMENSION)

    @classmethod
    def from_json(cls, data: Any) -> "CodecFacts | None":
        """The facts as the manifest's JSON has them; None for no codecs."""
        return None if data is None else cls(**data)

    @property
    def form(self) -> ChunkFormat:
        """The format of chunks."""
        return ChunkFormat(find_codec(self.codec), WIDTHS, self.chunk_tokens)


def coded_shapes(
    cfg: ModelConfig, facts: CodecFacts, bits: int
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shapes and dtypes of the arrays that a level's programs give and take for their chunks, by name."""
    found: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    codec, count, width = facts.form.codec, facts.chunks, cfg.head_dim
    for layer in range(cfg.layers):
        heads = cfg.units(layer).kv_heads
        for name, sharing in ((KEYS, codec.keys), (VALUES, codec.values)):
            side = name.format(layer)
            levels = (count, heads, facts.chunk_tokens, width * bits // 8)
            shared = (heads, 1, width) if sharing == "channel" else (heads, facts.chunk_tokens, 1)
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


def coded_of(blobs: Sequence[Sequence[np.ndarray]], cfg: ModelConfig, facts: CodecFacts, bits: int) -> Arrays:
    """The arrays of a program for chunks by their blobs, the last of them repeated up to `facts.chunks`."""
    found: Arrays = {}
    blobs = [*blobs, *[blobs[-1]] * (facts.chunks - len(blobs))]
    at = dict.fromkeys(range(cfg.layers), 0)
    for name, (shape, dtype) in coded_shapes(cfg, facts, bits).items():
        layer = int(name.split("_")[3])
        stored = np.dtype(np.uint8) if dtype == np.uint8 else np.dtype(np.float16)
        size = int(np.prod(shape[1:])) * stored.itemsize
        parts = [np.ascontiguousarray(each[layer][at[layer] : at[layer] + size]) for each in blobs]
        at[layer] += size
        found[name] = np.stack([each.view(stored).reshape(shape[1:]) for each in parts]).astype(dtype)
    return found
