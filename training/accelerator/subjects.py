"""Makes what is measured: models of a size with random weights on the device, rows of random documents."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.bundle.layout import contracted_axis
from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import ParamSpec, init_param, init_params, param_specs
from jaxllm.models.scanned_layers import stacked
from jaxllm.quant.blocks import BlockedArray, blocked_shapes
from training.data.packing import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and the rows of a step."""

    cfg: ModelConfig
    batch: int
    row_tokens: int


def _size(D: int, L: int, N: int, K: int, F: int, V: int, batch: int, row_tokens: int) -> Size:
    cfg = ModelConfig(
        model_type="llama", vocab_size=V, hidden_size=D, layers=L, heads=N, kv_heads=K, head_dim=D // N,
        ffn_size=F, window_tokens=8192, norm_eps=1e-5, tied_head=False,
        rope=RopeConfig(dim=D // N, theta=5e5),
    )  # fmt: skip
    return Size(cfg=cfg, batch=batch, row_tokens=row_tokens)


SIZES = {
    # For trying the script on a CPU.
    "tiny": _size(64, 2, 4, 2, 128, 288, 2, 128),
    "60m": _size(512, 12, 8, 8, 1408, 32000, 16, 2048),
    "350m": _size(1024, 24, 8, 8, 2816, 32000, 16, 2048),
    "1b": _size(2048, 16, 16, 8, 8192, 128256, 4, 4096),
    "8b": _size(4096, 32, 32, 8, 14336, 128256, 2, 4096),
}


def size_of(name: str) -> Size:
    """The size of a name.

    Raises:
      ConfigError: there is none.
    """
    if name not in SIZES:
        raise ConfigError(f"there is no size {name!r}; choose among {', '.join(SIZES)}")
    return SIZES[name]


def random_batch(size: Size, seed: int = 0) -> Batch:
    """Rows `[B, T]` of documents of 50 to 1,000 random tokens."""
    draw = np.random.default_rng(seed)
    shape = size.batch, size.row_tokens
    ids = draw.integers(0, size.cfg.vocab_size, (shape[0], shape[1] + 1)).astype(np.int32)
    starts = np.zeros(shape, np.int32)
    for row in starts:
        at = 0
        while at < len(row):
            row[at:] = at
            at += int(draw.integers(50, 1000))
    weights = np.ones(shape, np.float32)
    # The token after a document's last is the next one's first.
    weights[:, :-1] = starts[:, 1:] == starts[:, :-1]
    return Batch(ids[:, :-1], ids[:, 1:], starts, weights, np.zeros(shape, np.int32))


def dense_params(cfg: ModelConfig, dtype: Any, *, stack: bool) -> dict[str, jax.Array]:
    """Random parameters, drawn on the device by one compiled function."""

    def draw(key: jax.Array) -> dict[str, jax.Array]:
        params = init_params(cfg, key, dtype)
        return stacked(params, cfg) if stack else params

    return jax.jit(draw)(jax.random.key(0))


def four_bit_params(cfg: ModelConfig, *, stack: bool) -> dict[str, Any]:
    """Random weights of 4 bits in the form of a bundle's `int4`, drawn on the device; embeddings have 8."""
    specs = param_specs(cfg)

    def draw(key: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(key, len(specs))
        params = {
            name: _drawn(cfg, name, spec, own) for (name, spec), own in zip(specs.items(), keys, strict=True)
        }
        return stacked(params, cfg) if stack else params

    return jax.jit(draw)(jax.random.key(0))


def _drawn(cfg: ModelConfig, name: str, spec: ParamSpec, key: jax.Array) -> Any:
    if spec.role == "vector":
        return init_param(cfg, name, key, jnp.dtype(jnp.float32))
    bits, group = (8, 0) if spec.role == "embed" else (4, 32)
    axis = contracted_axis(spec)
    data, scale = blocked_shapes(spec.shape, bits=bits, group=group, axis=axis)
    # So that products are of order one: the deviation of equally likely levels is 2^bits / sqrt(12).
    deviation = np.prod(spec.shape[:-1] if axis == -2 else spec.shape[-1:]) ** -0.5 * 12**0.5 / 2**bits
    levels = jax.random.bits(key, data, jnp.uint8)
    return BlockedArray(
        data=levels if bits == 4 else jax.lax.bitcast_convert_type(levels, jnp.int8),
        scale=jnp.full(scale, deviation, jnp.float16 if group else jnp.float32),
        bits=bits,
        group=group,
        axis=axis,
        shape=tuple(spec.shape),
    )
