"""MobileBERT (arXiv 2004.02984, section 3): every token attends to every real token of its sequence.

It is computed as transformers computes it. Embedding and layers are separate functions, because encoders may
share their lower layers, as the two heads of the tiny LM (`models/tiny_lm.py`) do.

Parameters are a flat dict with stable string keys; every matrix is `[out, in]` and has a bias `{name}_bias`
`[out]`:

    embed.tokens [V, Z]        embed.positions [P, D]     embed.types [Y, D]       (these have no biases)
    embed.projection [D, Z], or [D, 3·Z] of the next, this and the previous token  (where one is needed)
    embed.norm.scale/bias [D]
    layers.{i}.narrow [W, D]   .narrow_norm.scale/bias [W]                         (with a bottleneck)
    layers.{i}.attn.narrow [W, D]  .attn.narrow_norm.scale/bias [W]                (with a shared one)
    layers.{i}.attn.q [W, W]   .k [W, W]  .v [W, W], or [W, D] beside a shared one .o [W, W]
    layers.{i}.attn_norm.scale/bias [W]
    layers.{i}.ffn.{j}.up [F, W]   .down [W, F]           layers.{i}.ffn.{j}.norm.scale/bias [W]
    layers.{i}.widen [D, W]    .widen_norm.scale/bias [D]                          (with a bottleneck)
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.axes import shaped
from jaxllm.errors import ConfigError
from jaxllm.models.encoder.config import EncoderConfig
from jaxllm.nn.layers import activate, attention, layer_norm
from jaxllm.nn.linear import embed, to_units
from jaxllm.quant import Weight

Params = Mapping[str, Weight]
Shape = tuple[int, ...]

# Standard deviation of BERT's and MobileBERT's initial matrices.
_DEVIATION = 0.02
# torch's default, which transformers leaves to two norms; all others get `layer_norm_eps`.
_TORCH_EPS = 1e-5


def encoder_shapes(cfg: EncoderConfig) -> dict[str, Shape]:
    """The shape of every parameter of the encoder by name, in the order of their use."""
    shapes = embedding_shapes(cfg)
    for layer in range(cfg.layers):
        shapes |= layer_shapes(cfg, f"layers.{layer}.")
    return shapes


def embedding_shapes(cfg: EncoderConfig) -> dict[str, Shape]:
    """Shapes of the embedding's parameters."""
    hidden = cfg.hidden_size
    shapes: dict[str, Shape] = {
        "embed.tokens": (cfg.vocab_size, cfg.embedding_size),
        "embed.positions": (cfg.window_tokens, hidden),
        "embed.types": (cfg.type_vocab_size, hidden),
    }
    if cfg.projects_embeddings:
        neighbours = 3 if cfg.trigram_input else 1
        shapes |= _dense("embed.projection", hidden, neighbours * cfg.embedding_size)
    return shapes | _norm("embed.norm", hidden)


def layer_shapes(cfg: EncoderConfig, prefix: str) -> dict[str, Shape]:
    """Shapes of the parameters of one layer, their names prefixed by `prefix`."""
    hidden, width = cfg.hidden_size, cfg.width
    shapes: dict[str, Shape] = {}
    if cfg.bottleneck_size:
        shapes |= _dense("narrow", width, hidden) | _norm("narrow_norm", width)
    if cfg.share_bottleneck:
        shapes |= _dense("attn.narrow", width, hidden) | _norm("attn.narrow_norm", width)
    inputs = {"q": width, "k": width, "v": hidden if cfg.share_bottleneck else width, "o": width}
    for name, size in inputs.items():
        shapes |= _dense(f"attn.{name}", width, size)
    shapes |= _norm("attn_norm", width)
    for block in range(cfg.ffn_blocks):
        shapes |= _dense(f"ffn.{block}.up", cfg.ffn_size, width)
        shapes |= _dense(f"ffn.{block}.down", width, cfg.ffn_size) | _norm(f"ffn.{block}.norm", width)
    if cfg.bottleneck_size:
        shapes |= _dense("widen", hidden, width) | _norm("widen_norm", hidden)
    return {prefix + name: shape for name, shape in shapes.items()}


def init_values(
    shapes: Mapping[str, Shape], key: jax.Array, dtype: DTypeLike = jnp.float32
) -> dict[str, jax.Array]:
    """BERT's initial values: matrices from a normal distribution of deviation 0.02 truncated at two
    deviations, norm scales one, biases zero."""
    keys = jax.random.split(key, len(shapes))

    def value(name: str, shape: Shape, key: jax.Array) -> jax.Array:
        if name.endswith("norm.scale"):
            return jnp.ones(shape, dtype)
        if name.endswith("bias"):
            return jnp.zeros(shape, dtype)
        return jax.random.truncated_normal(key, -2.0, 2.0, shape, dtype) * np.asarray(_DEVIATION, dtype)

    return {name: value(name, shape, each) for (name, shape), each in zip(shapes.items(), keys, strict=True)}


@shaped(tokens="int32 B T", mask="bool B T")
def embed_tokens(
    params: Params,
    tokens: jax.Array,
    mask: jax.Array,
    *,
    cfg: EncoderConfig,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """The input of the first layer `[B, T, D]`.

    Args:
      params: see the module docstring; matrices may be quantized or adapted.
      tokens: `[B, T]` int32, ids in [0, V), T at most the window. Positions count from 0, and all tokens are
        of the first type.
      mask: `[B, T]` bool, True for valid tokens. Padding is left out of attention and of the trigram input.
        (transformers has it in the trigram input, where its embedding is zero in a fresh MobileBERT.)

    Raises:
      ConfigError: there are more tokens than positions, or the mask is of another shape.
    """
    count = tokens.shape[1]
    if count > cfg.window_tokens:
        raise ConfigError(
            f"{count} tokens do not fit the encoder's window of {cfg.window_tokens}; shorten the text"
        )
    weights = _Weights(params, "", cfg)
    x = embed(tokens, params["embed.tokens"], dtype)
    if cfg.trigram_input:
        # The next, this and the previous embedding of each token side by side, `[B, T, 3·Z]`.
        x = jnp.where(mask[..., None], x, jnp.zeros((), dtype))
        following = jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)))
        previous = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
        x = jnp.concatenate([following, x, previous], axis=-1)
    if cfg.projects_embeddings:
        x = weights.dense(x, "embed.projection")
    x = x + embed(jnp.arange(count, dtype=jnp.int32), params["embed.positions"], dtype)
    x = x + embed(jnp.zeros((1, 1), jnp.int32), params["embed.types"], dtype)
    return weights.norm(x, "embed.norm", _TORCH_EPS)


@shaped(hidden="float B T D", mask="bool B T")
def encode_layers(
    params: Params,
    hidden: jax.Array,
    mask: jax.Array,
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
      mask: `[B, T]` bool, see `embed_tokens`.
      layers: indices of layers to run, in order.
      prefix: prefix of the parameters' names.
      first: the last layer computes only the outputs of this many first tokens; None: of all.

    Returns:
      `[B, T, D]`, or `[B, first, D]`, in hidden's dtype; values at padding are undefined.
    """
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
    heads = functools.partial(jnp.reshape, shape=(len(mask), -1, cfg.heads, cfg.head_dim))
    q, k = heads(weights.dense(asking[:, :first], "attn.q")), heads(weights.dense(asking, "attn.k"))
    k, v = (each.transpose(0, 2, 1, 3) for each in (k, heads(weights.dense(values, "attn.v"))))
    out = attention(q[:, :, :, None], k, v, mask[:, None, :], scale=cfg.head_dim**-0.5)
    mixed = weights.dense(out.reshape(len(mask), -1, cfg.width), "attn.o")
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


def _dense(name: str, outputs: int, inputs: int) -> dict[str, Shape]:
    return {name: (outputs, inputs), f"{name}_bias": (outputs,)}


def _norm(name: str, size: int) -> dict[str, Shape]:
    return {f"{name}.scale": (size,), f"{name}.bias": (size,)}
