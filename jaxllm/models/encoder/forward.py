"""The forward pass of an encoder: every token attends to every real token of its sequence.

MobileBERT (arXiv 2004.02984, section 3), as transformers computes it. Parameters are those of
`parameters.py`. Embedding and layers are separate functions, because encoders may share their lower layers,
as the two heads of the tiny LM (`models/tiny_lm.py`) do.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.axes import Axes
from jaxllm.errors import ConfigError
from jaxllm.models.encoder.config import EncoderConfig
from jaxllm.models.encoder.parameters import Params
from jaxllm.nn.layers import activate, attention, layer_norm
from jaxllm.nn.linear import embed, to_units

# torch's default, which transformers leaves to two norms; all others get `layer_norm_eps`.
_TORCH_EPS = 1e-5


def encode(
    params: Params,
    tokens: jax.Array,
    mask: jax.Array | None = None,
    *,
    cfg: EncoderConfig,
    types: jax.Array | None = None,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Hidden states of whole sequences.

    Args:
      params: see `parameters.py`; matrices may be quantized or adapted.
      tokens: `[B, T]` int32, ids in [0, V), T at most the window. Positions count from 0.
      mask: `[B, T]` bool, True for valid tokens. Padding is left out of attention and of the trigram input.
        (transformers has it in the trigram input, where its embedding is zero in a fresh MobileBERT.) None:
        all are valid.
      types: `[B, T]` int32 in [0, Y), None for zeros.

    Returns:
      `[B, T, D]`; values at padding are undefined.

    Raises:
      ConfigError: there are more tokens than positions, or mask or types are of another shape.
    """
    x = embed_tokens(params, tokens, mask, cfg=cfg, types=types, dtype=dtype)
    return encode_layers(params, x, mask, cfg=cfg, layers=range(cfg.layers))


def embed_tokens(
    params: Params,
    tokens: jax.Array,
    mask: jax.Array | None = None,
    *,
    cfg: EncoderConfig,
    types: jax.Array | None = None,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """The input of the first layer `[B, T, D]`; arguments and errors are those of `encode`."""
    axes = Axes("embed_tokens")
    axes.check(jnp.int32, "B T", tokens=tokens, types=types)
    axes.check(jnp.bool_, "B T", mask=mask)
    count = tokens.shape[1]
    if count > cfg.window_tokens:
        raise ConfigError(
            f"{count} tokens do not fit the encoder's window of {cfg.window_tokens}; shorten the text"
        )
    weights = _Weights(params, "", cfg)
    x = embed(tokens, params["embed.tokens"], dtype)
    if cfg.trigram_input:
        x = _with_neighbours(x if mask is None else jnp.where(mask[..., None], x, jnp.zeros((), dtype)))
    if cfg.projects_embeddings:
        x = weights.dense(x, "embed.projection")
    x = x + embed(jnp.arange(count, dtype=jnp.int32), params["embed.positions"], dtype)
    types = jnp.zeros((1, 1), jnp.int32) if types is None else types
    x = x + embed(types, params["embed.types"], dtype)
    return weights.norm(x, "embed.norm", _TORCH_EPS)


def encode_layers(
    params: Params,
    hidden: jax.Array,
    mask: jax.Array | None = None,
    *,
    cfg: EncoderConfig,
    layers: range,
    prefix: str = "",
    first: int | None = None,
) -> jax.Array:
    """Hidden states after some of the layers.

    Args:
      params: those of layer i are under `{prefix}layers.{i}.`.
      hidden: `[B, T, D]`, the input of the first of `layers`.
      mask: `[B, T]` bool, see `encode`.
      layers: indices of layers to run, in order.
      prefix: prefix of the parameters' names.
      first: the last layer computes only the outputs of this many first tokens; None: of all.

    Returns:
      `[B, T, D]`, or `[B, first, D]`, in hidden's dtype.
    """
    axes = Axes("encode_layers", D=cfg.hidden_size)
    axes.check(jnp.floating, "B T D", hidden=hidden)
    axes.check(jnp.bool_, "B T", mask=mask)
    mask = jnp.ones(hidden.shape[:2], bool) if mask is None else mask
    for layer in layers:
        count = first if layer == layers[-1] else None
        hidden = _layer(_Weights(params, f"{prefix}layers.{layer}.", cfg), hidden, mask, cfg, count)
    return hidden[:, :first]


class _Weights:
    """Applies the parameters under one prefix."""

    def __init__(self, params: Params, prefix: str, cfg: EncoderConfig) -> None:
        self._params, self._prefix, self._cfg = params, prefix, cfg

    def dense(self, x: jax.Array, name: str) -> jax.Array:
        """`x` `[..., in]` times a matrix, plus its bias: `[..., out]`."""
        return to_units(x, self._params[self._prefix + name], self._vector(f"{name}_bias"))

    def norm(self, x: jax.Array, name: str, eps: float | None = None) -> jax.Array:
        scale, bias = self._vector(f"{name}.scale"), self._vector(f"{name}.bias")
        if self._cfg.norm == "layer":
            return layer_norm(x, scale, bias, self._cfg.norm_eps if eps is None else eps)
        wide = x.astype(jnp.float32) * scale.astype(jnp.float32) + bias.astype(jnp.float32)
        return wide.astype(x.dtype)

    def _vector(self, name: str) -> jax.Array:
        found = self._params[self._prefix + name]
        assert isinstance(found, jax.Array | np.ndarray)
        return found


def _with_neighbours(x: jax.Array) -> jax.Array:
    """The next, this and the previous embedding of each token `[B, T, Z]` side by side: `[B, T, 3·Z]`."""
    following = jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)))
    previous = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return jnp.concatenate([following, x, previous], axis=-1)


def _layer(
    weights: _Weights, x: jax.Array, mask: jax.Array, cfg: EncoderConfig, first: int | None
) -> jax.Array:
    """One layer of `x` `[B, T, D]`, or its output for only the `first` tokens."""
    inner = x
    if cfg.bottleneck_size:
        # With a shared bottleneck, queries and keys have a separate input, so that this one is only needed
        # for the first tokens.
        read = x[:, :first] if cfg.share_bottleneck else x
        inner = weights.norm(weights.dense(read, "narrow"), "narrow_norm")
    asking, values = inner, inner
    if cfg.share_bottleneck:
        asking, values = weights.norm(weights.dense(x, "attn.narrow"), "attn.narrow_norm"), x
    mixed = weights.dense(_attend(weights, asking, values, mask, cfg, first), "attn.o")
    x, inner = x[:, :first], inner[:, :first]
    y = weights.norm(mixed + inner, "attn_norm")
    for block in range(cfg.ffn_blocks):
        up = activate(weights.dense(y, f"ffn.{block}.up"), cfg.activation)
        last = block == cfg.ffn_blocks - 1
        down = weights.dense(up, f"ffn.{block}.down")
        y = weights.norm(down + y, f"ffn.{block}.norm", _TORCH_EPS if last else None)
    if cfg.bottleneck_size:
        y = weights.norm(weights.dense(y, "widen") + x, "widen_norm")
    return y


def _attend(
    weights: _Weights,
    asking: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    cfg: EncoderConfig,
    first: int | None,
) -> jax.Array:
    """Attention outputs of all tokens, or of the `first` ones, over the valid tokens: `[B, T, W]`."""
    batch, _ = mask.shape
    heads = functools.partial(jnp.reshape, shape=(batch, -1, cfg.heads, cfg.head_dim))
    q, k = heads(weights.dense(asking[:, :first], "attn.q")), heads(weights.dense(asking, "attn.k"))
    v = heads(weights.dense(values, "attn.v"))
    out = attention(
        q[:, :, :, None],
        k.transpose(0, 2, 1, 3),
        v.transpose(0, 2, 1, 3),
        mask[:, None, :],
        scale=cfg.head_dim**-0.5,
    )
    return out.reshape(batch, -1, cfg.width)
