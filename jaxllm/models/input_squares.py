"""Measures the mean squares of the inputs of a model's matrices over a text, while its parameters arrive.

A weight's rounding error changes an output by the error times the weight's input. So the mean square of an
input says how much an error counts there, and quantizers of 4 bits choose scales by it, as AWQ (arXiv
2306.00978) and llama.cpp's importance matrices do.

Parameters arrive in the order of a pass, and only those of one layer are in memory at a time: the text runs
through a layer as soon as it is complete, before the layer is passed on.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.kernels.native import without_native_kernels
from jaxllm.models.decoder import embed_tokens, layer_of_documents
from jaxllm.models.parameters import param_specs
from jaxllm.nn.linear import dense_product
from jaxllm.quant import OwnProduct, QArray, as_floats
from jaxllm.quant.weights import Measured, RowParts

# Longest document that a text is split into.
_ROW_TOKENS = 512


def unmeasured(cfg: ModelConfig) -> str | None:
    """Why inputs of a model's matrices cannot be measured; None if they can. Experts' never are."""
    for applies, what in (
        (cfg.encoder is not None, "an encoder"),
        (cfg.mixed is not None, "layers of two sizes"),
        (cfg.states is not None, "state layers"),
    ):
        if applies:
            return f"inputs are not measured in models with {what}, as {cfg.model_type} is"
    return None


def like_layer(cfg: ModelConfig, layer: int) -> object:
    """A key of a layer, the same for layers that compute the same with their own parameters."""
    return cfg.units(layer), cfg.attention_windows[layer], cfg.layer_rope(layer), cfg.is_sparse(layer)


def with_input_squares(
    params: Iterable[tuple[str, Any]], cfg: ModelConfig, tokens: Sequence[int]
) -> Iterator[tuple[str, Any]]:
    """The same parameters, with float matrices of layers as `Measured` ones, except those of experts.

    Args:
      params: (name, value) in the order of `param_specs(cfg)`: floats, quantized weights or `RowParts` of
        them.
      cfg: config of a model that `unmeasured` does not refuse.

    Raises:
      ConfigError: a token is outside of the vocabulary, there is none, or activations are not finite.
    """
    ids, places = np.unique(np.asarray(tokens, np.int32), return_inverse=True)
    if not ids.size or ids[0] < 0 or ids[-1] >= cfg.vocab_size:
        raise ConfigError(f"measure on tokens in [0, {cfg.vocab_size}); give another text (--text)")
    length = min(_ROW_TOKENS, cfg.window_tokens)
    rows = [places[at : at + length].astype(np.int32) for at in range(0, len(places), length)]
    run, outer = _Layers(cfg), dict[str, Any]()
    layer, own, x = -1, dict[str, Any](), list[jax.Array]()
    for name, value in params:
        number = int(name.split(".")[1]) if name.startswith("layers.") else -1
        if number != layer and layer >= 0:
            yield from run.measured(layer, own, x)
            own = {}
        if number >= 0 and not x:
            x += [_embedded(outer, row, cfg) for row in rows]
        layer = number
        if number >= 0:
            own[name] = value
        elif name == "embed.tokens":
            taken: list[np.ndarray] = []
            yield name, _tee_rows(value, ids, taken)
            outer[name] = np.concatenate(taken)
        else:
            outer[name] = value
            yield name, value
    if layer >= 0:
        yield from run.measured(layer, own, x)


def _tee_rows(value: Any, ids: np.ndarray, taken: list[np.ndarray]) -> Any:
    """The embedding unchanged; its rows of `ids` are added to `taken` when it is consumed."""
    first = 0

    def look(part: Any) -> Any:
        nonlocal first
        own = (
            ids[(ids >= first) & (ids < first + len(part.data if isinstance(part, QArray) else part))] - first
        )
        rows = jax.tree.map(lambda array: array[own], part)
        taken.append(as_floats(rows))
        first += len(part.data if isinstance(part, QArray) else part)
        return part

    return value.map(look) if isinstance(value, RowParts) else look(value)


def _embedded(outer: dict[str, Any], row: np.ndarray, cfg: ModelConfig) -> jax.Array:
    params = {name: jnp.asarray(as_floats(value)) for name, value in outer.items()}
    positions = jnp.arange(len(row), dtype=jnp.int32)[None]
    return embed_tokens(params, jnp.asarray(row)[None], positions, cfg=cfg)


class _Layers:
    """Runs layers over rows, and sums squares of the inputs of their matrices."""

    def __init__(self, cfg: ModelConfig) -> None:
        self._cfg = cfg
        # Equal layers share compiled code: their parameters have the names of the first of them.
        self._like: dict[object, int] = {}
        self._run = jax.jit(functools.partial(_run, cfg=cfg), static_argnames="like")

    def measured(self, layer: int, own: dict[str, Any], x: list[jax.Array]) -> Iterator[tuple[str, Any]]:
        """The layer's parameters; replaces its inputs `x` `[1, T, D]` by its outputs."""
        cfg, prefix = self._cfg, f"layers.{layer}."
        like = self._like.setdefault(like_layer(cfg, layer), layer)
        params = {
            f"layers.{like}.{name.removeprefix(prefix)}": jnp.asarray(as_floats(value))
            for name, value in own.items()
        }
        sums: dict[str, np.ndarray] = {}
        with without_native_kernels():
            for place, each in enumerate(x):
                x[place], squares = self._run(params, each, like=like)
                for name, found in squares.items():
                    sums[name] = sums.get(name, 0) + np.asarray(found)
        count = sum(each.shape[1] for each in x)
        for name, value in own.items():
            found = sums.get(f"layers.{like}.{name.removeprefix(prefix)}")
            if found is None or isinstance(value, QArray):
                yield name, value
                continue
            if not np.isfinite(found).all():
                raise ConfigError(
                    f"{name} has inputs that are not finite; take another copy of the weights, or another "
                    "text (--text)"
                )
            yield name, Measured(value, found / np.float32(count))


def _run(
    params: dict[str, Any], x: jax.Array, *, cfg: ModelConfig, like: int
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A layer's output, and the sums of squares of its matrices' inputs."""
    squares: dict[str, jax.Array] = {}

    def observed(name: str, x: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
        squares[name] = jnp.square(x.astype(jnp.float32)).sum(0)
        return dense_product(x, matrix.astype(x.dtype), axis + 2)

    specs, watched = param_specs(cfg), dict(params)
    for name, value in params.items():
        if specs[name].role in ("to_units", "from_units") and ".experts." not in name:
            watched[name] = OwnProduct(value, functools.partial(observed, name))
    return layer_of_documents(watched, x, cfg=cfg, layer=like), squares
