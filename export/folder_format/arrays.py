"""Names the arrays that a program returns for the next one, and their shapes: caches, and the source of an
encoder-decoder."""

import numpy as np

from jaxllm.config import ModelConfig

KEYS, VALUES = "kv_cache_k_{}", "kv_cache_v_{}"
# Encoder-decoders: keys and values of the source that the decoder attends to, and its number of tokens.
SOURCE_KEYS, SOURCE_VALUES, SOURCE_TOKENS = "source_k_{}", "source_v_{}", "source_tokens"


def cache_shapes(cfg: ModelConfig, cache_tokens: int) -> dict[str, tuple[int, ...]]:
    """Shapes `[1, K, S, H]` of the caches of a model by name."""
    shapes = {}
    for layer in range(cfg.layers):
        shape = (1, cfg.units(layer).kv_heads, cache_tokens, cfg.head_dim)
        shapes[KEYS.format(layer)] = shapes[VALUES.format(layer)] = shape
    return shapes


def source_shapes(cfg: ModelConfig, source_tokens: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a source of up to `source_tokens` tokens (R) in the decoder of a model by name; none without
    an encoder."""
    if cfg.encoder is None:
        return {}
    shapes: dict[str, tuple[int, ...]] = {SOURCE_TOKENS: (1,)}
    for layer in range(cfg.layers):
        shape = (1, cfg.units(layer).kv_heads, source_tokens, cfg.head_dim)
        shapes[SOURCE_KEYS.format(layer)] = shapes[SOURCE_VALUES.format(layer)] = shape
    return shapes


def lengthened(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Pads rows `[1, K, T, H]` with zeros at the end to `shape` `[1, K, S, H]`."""
    whole = np.zeros(shape, rows.dtype)
    whole[:, :, : rows.shape[2]] = rows
    return whole
