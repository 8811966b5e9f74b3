"""Puts outliers into the keys of a model without changing what it computes.

A pair of channels that rotary embedding turns together is made larger in keys by a power of two, and smaller
in queries: their products are the same. Large models have such channels by themselves (KIVI, arXiv
2402.02750, figure 2).
"""

import dataclasses
from pathlib import Path

import numpy as np

from jaxllm.bundle import Bundle, rewrite_bundle
from jaxllm.bundle.prefill import has_channel_scales
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.quant import BlockedArray

FACTOR = 4.0


def write_with_outliers(model: Path, out: Path, factor: float = FACTOR) -> None:
    """Writes a bundle whose keys have two channels per head that are larger.

    Args:
      model: a bundle of 8 bits with a scale per channel.
      out: the new bundle's path.
      factor: a power of two.

    Raises:
      ConfigError: the model's scales are shared otherwise, or norms or biases of queries and keys would undo
        it.
    """
    with Bundle.open(model) as bundle:
        cfg = bundle.cfg
        if not has_channel_scales(bundle) or cfg.qk_norm or cfg.joint_qk_norm or cfg.qkv_bias or cfg.qkv_clip:
            raise ConfigError(
                f"outliers cannot be put into {model}: it takes 8-bit weights with a scale per channel, and "
                "queries and keys without norms, biases and clipping"
            )
        changed = {}
        for layer in range(cfg.layers):
            for part, by in (("q", 1 / factor), ("k", factor)):
                name = f"layers.{layer}.attn.{part}"
                stored = bundle.stored(name)
                assert isinstance(stored, BlockedArray)
                changed[name] = _scaled(stored, cfg, by)
        # Steps of integer prefill are those of other weights.
        parts = dict.fromkeys(bundle.layout.parts.keys() & {"prefill", "contexts"})
        rewrite_bundle(out, bundle, parts, instead=changed)


def _scaled(weight: BlockedArray, cfg: ModelConfig, factor: float) -> BlockedArray:
    """A weight `[K, n·H, D]` with the rows of two channels of each head multiplied."""
    pairs = (cfg.head_dim if cfg.rope is None else cfg.rope.dim) // 2
    by = np.ones(cfg.head_dim, np.float32)
    # The pair that turns slowest.
    by[[pairs - 1, 2 * pairs - 1]] = factor
    units, rows, _ = weight.shape
    scale = np.array(weight.scale)
    scale[: units * rows] *= np.tile(by, units * rows // cfg.head_dim)
    return dataclasses.replace(weight, scale=scale)  # pyright: ignore[reportArgumentType]: a host array
