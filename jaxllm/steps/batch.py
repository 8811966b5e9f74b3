"""Defines the step of batched decoding: products of all rows, everything else row by row.

Each sequence is a row of the batch, with its own cache, sampler and end. Weights are read once for all
rows. A row is bitwise equal to `decode_tokens`: native products are batch-invariant (`batch_invariant`, see
`jaxllm.nn.linear`), and XLA computes its parts row by row in the same shapes.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.axes import Axes
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.kernels.native_call import PARAMETER, UsedUnits, of_rows, only_of_rows
from jaxllm.kv.cache import KVCache, Past, TokenPositions
from jaxllm.models.decoder import embed_tokens, final_normed, logits
from jaxllm.models.layer import Rows, attend_cache, attend_rows, rotary_by_rope, run_layer
from jaxllm.models.layer_stack import STACK, LayerStack, layer_of
from jaxllm.models.parameters import Params, head_name
from jaxllm.models.scanned_layers import over_layers
from jaxllm.nn.layers import Heads
from jaxllm.nn.linear import in_blocks
from jaxllm.quant import Adapted
from jaxllm.sampling import NO_TOKEN, SamplerState, choose, chosen

Caches = tuple[KVCache, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowLimits:
    """Limits of each row of a batch, and its used units.

    Attributes:
      stop_ids: `[B, n]` int32, token ids that end the row; pad with -1.
      tokens: `[B]` int32, maximum number of tokens; 0 for padding rows, which are last.
      units: `[B, L, 2]` int32, numbers of kv groups and neurons of each layer that the row uses, at least
        1: for rows of different levels (see `can_mix_levels`); None for those of the parameters.
    """

    stop_ids: jax.Array | np.ndarray
    tokens: jax.Array | np.ndarray
    units: jax.Array | np.ndarray | None = None

    def check(self, axes: Axes) -> None:
        """Asserts the shapes above at trace time."""
        axes.check(jnp.int32, "B n", stop_ids=self.stop_ids)
        axes.check(jnp.int32, "B", tokens=self.tokens)
        axes.check(jnp.int32, "B L 2", units=self.units)


def can_decode_rows(params: Params, cache_dtype: DTypeLike) -> bool:
    """Whether batched rows equal unbatched ones bitwise: if native kernels read the layers' weights by
    address, and attend to caches of this dtype. XLA's products of several rows round differently."""
    return isinstance(params.get(STACK), LayerStack) and jnp.dtype(cache_dtype) in (jnp.float32, jnp.float16)


def can_mix_levels(params: Params) -> bool:
    """Whether rows of different levels can be decoded together, besides `can_decode_rows`: the levels are
    counts of units of the same weights. Adapters of a level are its own: then rows of other levels would not
    share the products."""
    stack: Any = params.get(STACK)
    handle, row = jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((), jnp.int32)
    if not isinstance(stack, LayerStack):
        return False
    layers: list[Any] = [form.at(handle, row) for form in stack.forms]  # pyright: ignore[reportArgumentType]
    return all(
        PARAMETER in layer and not any(isinstance(each, Adapted) for each in layer.values())
        for layer in layers
    )


def decode_rows(
    params: Params,
    tokens: jax.Array,
    caches: Caches,
    samplers: tuple[SamplerState, ...],
    limits: RowLimits,
    *,
    cfg: ModelConfig,
    block: int,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array, Caches, tuple[SamplerState, ...]]:
    """Decodes tokens of each row up to its limit in one dispatch; a row that has ended waits for the
    others, without changes of its cache and sampler.

    Rows of different levels share each product: it computes the units of the largest, and units that a
    row's level lacks count as zeros, which change no sum and no quantization scale.

    Args:
      params: the model's parameters, its layers by address (see `can_decode_rows`).
      tokens: `[B]` int32, each row's last token, not yet in its cache.
      caches: cache of each row, of batch 1 and any length; donated. Each has room for its row's limit.
      samplers: sampler of each row, of batch 1; donated.
      limits: limits of the rows, at most `block` tokens.
      block: maximum number of tokens per dispatch.

    Returns:
      Tokens `[B, block]` int32 (-1 beyond a row's count), their counts `[B]` int32 (less than the limit if
      the row has reached a stop token or `NO_TOKEN`), the caches with all but each row's last token, and the
      samplers.

    Raises:
      ConfigError: results of rows would depend on the others.
    """
    axes = Axes("decode_rows", H=cfg.head_dim, V=cfg.vocab_size)
    axes.check(jnp.int32, "B", tokens=tokens)
    limits.check(axes)
    for cache, sampler in zip(caches, samplers, strict=True):
        own = Axes("decode_rows", B=1, H=cfg.head_dim, V=cfg.vocab_size)
        cache.check(own)
        sampler.check(own)
        if not can_decode_rows(params, cache.keys[0].dtype):
            raise ConfigError("rows are decoded together by native kernels alone; decode them one by one")
    rows = jnp.full((len(caches), block), -1, jnp.int32)
    stop_ids, most = jnp.asarray(limits.stop_ids), jnp.asarray(limits.tokens)
    units = None if limits.units is None else jnp.asarray(limits.units)

    def more(carry: Any) -> jax.Array:
        return jnp.any(carry[2])

    def step(carry: Any) -> Any:
        counts, tokens, running, rows, caches, samplers = carry
        found, caches = _row_logits(params, tokens, running, caches, units, cfg=cfg, dtype=dtype)
        drawn, states = [], []
        for row, sampler in enumerate(samplers):
            token = jax.lax.cond(
                running[row], choose, lambda *_, row=row: tokens[row : row + 1], found[row], sampler
            )
            drawn.append(token)
            states.append(chosen(sampler, token, running[row].astype(jnp.int32)))
        tokens = jnp.concatenate(drawn)
        at = jnp.arange(len(caches), dtype=jnp.int32)
        rows = rows.at[at, jnp.where(running, counts, block)].set(tokens, mode="drop")
        counts = counts + running.astype(jnp.int32)
        stopped = (tokens == NO_TOKEN) | jnp.any(tokens[:, None] == stop_ids, axis=1)
        running = running & ~stopped & (counts < most)
        return counts, tokens, running, rows, caches, tuple(states)

    start = (jnp.zeros(len(caches), jnp.int32), tokens, most > 0, rows, caches, samplers)
    counts, _, _, rows, caches, samplers = jax.lax.while_loop(more, step, start)
    return rows, counts, caches, samplers


def _row_logits(
    params: Params,
    tokens: jax.Array,
    running: jax.Array,
    caches: Caches,
    units: jax.Array | None,
    *,
    cfg: ModelConfig,
    dtype: DTypeLike,
) -> tuple[list[jax.Array], Caches]:
    """Logits `[1, V]` of each row, undefined after the last running one, and the caches with the tokens of
    running rows."""
    count = len(caches)
    writes = running.astype(jnp.int32)
    at = [
        TokenPositions(cache.length[None], write, consecutive=True)
        for cache, write in zip(caches, writes, strict=True)
    ]
    positions = jnp.stack([cache.length for cache in caches])
    rotary = rotary_by_rope(positions, cfg)
    # Products compute no row after the last running one.
    valid_rows = jnp.max(jnp.where(running, jnp.arange(1, count + 1, dtype=jnp.int32), 1))
    x = jnp.concatenate(
        [
            embed_tokens(params, tokens[None, row : row + 1], each.positions, cfg=cfg, dtype=dtype)
            for row, each in enumerate(at)
        ]
    )

    def layer(
        carry: tuple[jax.Array, Caches], own: Params, like: int, number: jax.Array | int
    ) -> tuple[jax.Array, Caches]:
        x, caches = carry

        def attend(
            new: Heads, used: UsedUnits | None
        ) -> tuple[jax.Array, list[tuple[Past, jax.Array | None]]]:
            past = [cache.past(like, number) for cache in caches]
            if all(each.coded is None for each in past) and all(cache.mass is None for cache in caches):
                out, past = attend_rows(new, used, rotary, past, positions, writes, cfg=cfg, layer=like)
                return only_of_rows(out, used, 2), [(each, None) for each in past]
            outs, kept, order = [], [], rotary.get(cfg.layer_rope(like))
            for row, cache in enumerate(caches):
                out, changed = attend_cache(
                    new.of_sequence(row),
                    None if used is None else used.of(row),
                    cfg=cfg,
                    layer=like,
                    at=at[row],
                    past=past[row],
                    mass=cache.mass,
                    order=order and (order[0][row : row + 1], order[1][row : row + 1]),
                )
                outs.append(out)
                kept.append(changed)
            return only_of_rows(jnp.concatenate(outs), used, 2), kept

        weights = layer_of(own, like)
        if units is not None:
            weights = weights.using(of_rows(units[:, number]))
        x, kept, _ = run_layer(weights, x, cfg, like, attend, rows=Rows(valid_rows, batch_invariant=True))
        changed = (
            dataclasses.replace(cache.with_past(like, past), mass=mass)
            for cache, (past, mass) in zip(caches, kept, strict=True)
        )
        return x, tuple(changed)

    x, caches = over_layers(params, cfg, layer, (x, caches))
    hidden, each = final_normed(params, x, cfg=cfg, batch_invariant=True)[:, 0], range(count)
    if in_blocks(params[head_name(cfg)]):
        found = logits(params, hidden, cfg=cfg, batch_invariant=True, valid_rows=valid_rows)
        found = [found[row : row + 1] for row in each]
    else:
        found = [logits(params, hidden[row : row + 1], cfg=cfg) for row in each]
    grown = (
        dataclasses.replace(cache, length=cache.length + write)
        for cache, write in zip(caches, writes, strict=True)
    )
    return found, tuple(grown)
