"""Defines the steps of exported programs: named flat arrays, new tokens as input, caches and logits as
output.

Names and shapes are those of the LiteRT-LM runtime: `tokens` `[1, T]` and `input_pos` `[T]` int32,
`kv_cache_k_i` and `kv_cache_v_i` `[1, K, S, H]` of layer i; a decode step returns `logits` `[1, T, V]`
float32, a prefill step does not. A token is valid if its position is that of the first token plus its
index; any other number in `input_pos` after the prompt's end marks padding, which is not written to the
caches. Shapes are static, layers are unrolled, and there are no loops.

For an encoder-decoder an encode step accepts `tokens` `[1, T]` and `source_tokens` `[1]` int32, the number
of valid ones, and returns `source_k_i` and `source_v_i` `[1, K, T, H]` of each layer of the decoder. Its
other steps accept these, padded with zeros to R rows, and `source_tokens`, and only read them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.export.folder_format.adapters import INPUT_LEFT, INPUT_RIGHT
from jaxllm.export.folder_format.arrays import KEYS, SOURCE_KEYS, SOURCE_TOKENS, SOURCE_VALUES, VALUES
from jaxllm.export.folder_format.manifest import LEFT, RIGHT
from jaxllm.kv.cache import KVCache, TokenPositions, TreePositions
from jaxllm.kv.states import SourceLayers
from jaxllm.models.decoder import forward_at, logits
from jaxllm.models.encoder_decoder import encode, encoder_params, with_source
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import Adapted, Weight

Arrays = Mapping[str, jax.Array]
# The name of a mask of attention among a step's arrays.
ATTENTION_MASK = "mask"
ParamsOf = Callable[[Mapping[str, Weight], ModelConfig], Params]


def run_step(
    weights: Arrays,
    caches: Arrays,
    tokens: jax.Array,
    input_pos: jax.Array,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike,
    with_logits: bool,
    params_of: ParamsOf | None = None,
) -> dict[str, jax.Array]:
    """Runs consecutive tokens through the model.

    Args:
      weights: parameters by name, and the two factors of each adapter; for an encoder-decoder also the
        source's arrays; for `run_masked_step` also the mask.
      caches: `kv_cache_k_i`, `kv_cache_v_i` `[1, K, S, H]`.
      tokens: `[1, T]` int32.
      input_pos: `[T]` int32, their positions (see the module).
      cfg: config of the model, or of the sub-model with the weights' shapes.
      dtype: dtype of the activations.
      with_logits: whether to run the head.
      params_of: function that makes the model's parameters from the weights; None for `with_adapters`.

    Returns:
      The caches with the tokens' rows, and `logits` if `with_logits`.
    """
    axes = Axes("run_step")
    axes.check(jnp.int32, "1 T", tokens=tokens)
    axes.check(jnp.int32, "T", input_pos=input_pos)
    count = tokens.shape[1]
    start = input_pos[0]
    real = input_pos == start + jnp.arange(count, dtype=jnp.int32)
    at = TokenPositions.after(start, count, jnp.sum(real, dtype=jnp.int32))
    if ATTENTION_MASK in weights:
        at = dataclasses.replace(at, mask=weights[ATTENTION_MASK][0, 0])
    params = (params_of or with_adapters)(weights, cfg)
    return _step(params, caches, tokens, at, cfg, dtype, with_logits, _source(weights, cfg))


def run_masked_step(
    step: Callable[..., dict[str, jax.Array]],
    weights: Arrays,
    caches: Arrays,
    tokens: jax.Array,
    input_pos: jax.Array,
    mask: jax.Array,
    **options: Any,
) -> dict[str, jax.Array]:
    """Runs `run_step`, given as `step`, for runtimes that make the attention mask themselves: `[1, 1, T,
    S]` bool, the positions that each token attends to, instead of all up to its own."""
    return step({**weights, ATTENTION_MASK: mask}, caches, tokens, input_pos, **options)


def run_tree(
    weights: Arrays,
    caches: Arrays,
    tokens: jax.Array,
    input_pos: jax.Array,
    mask: jax.Array,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike,
    params_of: ParamsOf | None = None,
) -> dict[str, jax.Array]:
    """Runs a token tree after the sequence in the caches; returns logits after each node.

    Args:
      weights, caches, cfg, dtype, params_of: see `run_step`.
      tokens: `[1, M]` int32, the nodes from the root on, in consecutive rows of the cache.
      input_pos: `[M]` int32, their positions in a sequence; the root's is the length of the cached sequence.
      mask: `[M, M]` bool, the nodes that each node attends to, with itself; all False for padding.

    Returns:
      The caches with the nodes' rows, and `logits` `[1, M, V]`.
    """
    axes = Axes("run_tree")
    axes.check(jnp.int32, "1 M", tokens=tokens)
    axes.check(jnp.int32, "M", input_pos=input_pos)
    axes.check(jnp.bool_, "M M", mask=mask)
    base = input_pos[0]
    rows = base + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    real = jnp.sum(jnp.any(mask, axis=1), dtype=jnp.int32)
    at = TokenPositions(input_pos, real, TreePositions(base, rows, mask), consecutive=True)
    params = (params_of or with_adapters)(weights, cfg)
    return _step(params, caches, tokens, at, cfg, dtype, True, _source(weights, cfg))


def run_encode(
    weights: Arrays,
    caches: Arrays,
    tokens: jax.Array,
    source_tokens: jax.Array,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike,
    params_of: ParamsOf | None = None,
) -> dict[str, jax.Array]:
    """Encodes a source, and projects its hidden states for each layer of the decoder.

    Args:
      weights, cfg, dtype, params_of: see `run_step`.
      caches: empty, because a source has none.
      tokens: `[1, T]` int32.
      source_tokens: `[1]` int32, number of valid tokens.

    Returns:
      `source_k_i`, `source_v_i` `[1, K, T, H]`.
    """
    del caches
    axes = Axes("run_encode")
    axes.check(jnp.int32, "1 T", tokens=tokens)
    axes.check(jnp.int32, "1", source_tokens=source_tokens)
    assert cfg.encoder is not None
    params, valid = (params_of or with_adapters)(weights, cfg), source_tokens[0]
    # Programs have no loops.
    hidden = encode(encoder_params(params), tokens, valid, cfg=cfg.encoder, dtype=dtype, block_tokens=0)
    empty = (jnp.zeros(0, dtype),) * cfg.layers
    source = with_source(params, hidden, valid, SourceLayers(empty, empty, valid), cfg=cfg)
    out = {SOURCE_KEYS.format(layer): each for layer, each in enumerate(source.keys)}
    return out | {SOURCE_VALUES.format(layer): each for layer, each in enumerate(source.values)}


def _source(weights: Arrays, cfg: ModelConfig) -> SourceLayers | None:
    """Returns the source's arrays among the weights."""
    if cfg.encoder is None:
        return None
    keys, values = (
        tuple(weights[name.format(layer)] for layer in range(cfg.layers))
        for name in (SOURCE_KEYS, SOURCE_VALUES)
    )
    return SourceLayers(keys, values, weights[SOURCE_TOKENS][0])


def _step(
    params: Params,
    caches: Arrays,
    tokens: jax.Array,
    at: TokenPositions,
    cfg: ModelConfig,
    dtype: DTypeLike,
    with_logits: bool,
    source: SourceLayers | None,
) -> dict[str, jax.Array]:
    cache = KVCache(
        keys=tuple(caches[KEYS.format(layer)] for layer in range(cfg.layers)),
        values=tuple(caches[VALUES.format(layer)] for layer in range(cfg.layers)),
        length=at.positions[0],
        source=source,
    )
    hidden, cache = forward_at(params, tokens, cache, at, cfg=cfg, dtype=dtype)
    out = {KEYS.format(layer): each for layer, each in enumerate(cache.keys)}
    out |= {VALUES.format(layer): each for layer, each in enumerate(cache.values)}
    if with_logits:
        out["logits"] = logits(params, hidden, cfg=cfg)
    return out


def with_adapters(weights: Mapping[str, Weight], cfg: ModelConfig) -> dict[str, Weight]:
    """Returns the model's parameters: weights with an adapter become `Adapted`, and those with an
    additional adapter as an input (see `jaxllm.export.folder_format.adapters`) once more."""
    params: dict[str, Weight] = {}
    for name in param_specs(cfg):
        if name not in weights:
            # A stage has the parameters of its own.
            continue
        params[name] = weights[name]
        for sides in ((LEFT, RIGHT), (INPUT_LEFT, INPUT_RIGHT)):
            left, right = (weights.get(f"{name}{side}") for side in sides)
            if left is not None:
                params[name] = Adapted(params[name], left, right)  # pyright: ignore[reportArgumentType]: arrays
    return params
