"""A layer of integer prefill, in stages for two processors or whole for one (mllm-NPU, arXiv 2407.05858,
section 3.2).

Static stages depend only on the length of a chunk: one bucket serves all chunks of all prompts, and all
layers of one shape. Only attention depends on the cache, and has a bucket for each cache length. Weights,
steps and float rows are arguments. `schedule.py` lists the stages, their processors and order.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.axes import Axes, shaped
from jaxllm.config import ModelConfig
from jaxllm.int8_prefill import shadow
from jaxllm.int8_prefill.shadow import (
    NARROW,
    OUT,
    PRODUCTS,
    PROJECT,
    WIDEN,
    FloatRows,
    contracts_last_axis,
    matrices_of,
)
from jaxllm.kernels.native_call import value
from jaxllm.kv.cache import Past, TokenPositions
from jaxllm.models.layer import attend_cache, normed_heads
from jaxllm.models.layer_stack import LayerParams, layer_of
from jaxllm.models.parameters import Params
from jaxllm.nn.layers import activate, normalize
from jaxllm.nn.linear import FeedForward, add_normed, feed_forward, from_units, normed_to_units
from jaxllm.quant import Adapted, BlockedArray, Weight

# Product -> the norm of its input.
_NORMS = {PROJECT: "attn_norm", WIDEN: "ffn_norm"}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCalibration:
    """The calibration of one layer.

    Attributes:
      steps: `[4]` float32, per product of `PRODUCTS`.
      rows: per product of `PRODUCTS`, the float rows of channels with outliers; None if the layer has no
        shadow.
    """

    steps: jax.Array
    rows: tuple[FloatRows, ...] | None = None

    @property
    def shadowed(self) -> bool:
        """Whether the layer has a shadow."""
        return self.rows is not None


class IntegerLayer:
    """The stages of a layer as functions of a chunk (see `STAGE_VALUES`); `x` is the layer's input
    `[1, T, D]`.

    Args:
      params: the layer's, or those of the stages that are run.
      cfg, layer: see `decoder.forward_layer`.
    """

    def __init__(self, params: Params, calibration: LayerCalibration, cfg: ModelConfig, layer: int) -> None:
        self._weights, self._calibration = layer_of(params, layer), calibration
        self._steps, self.cfg, self._layer = calibration.steps, cfg, layer

    def check(self, axes: Axes) -> None:
        """Asserts the shapes of the calibration at trace time."""
        axes.check(jnp.float32, "4", steps=self._steps)

    @shaped(x="float 1 T D")
    def project(self, x: jax.Array) -> list[jax.Array]:
        """Queries `[1, T, K, G·H]`, keys and values `[1, T, K, H]`."""
        return self._products(PROJECT, x)

    @shaped(x="float 1 T D")
    def project_shadow(self, x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        """The shadow of the products of `project`, and the number of channels with an outlier."""
        return self._normed_shadow(PROJECT, x)

    @shaped(mass="float32 1 S")
    def attend(
        self,
        heads: Sequence[jax.Array],
        shadows: Sequence[jax.Array] | None,
        at: TokenPositions,
        past: Past,
        mass: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None, Past, jax.Array | None, jax.Array | None]:
        """Attention of a chunk over the cache, given the results of `project` and `project_shadow`, None
        without a shadow; past and mass are donated.

        Returns:
          Attention outputs `[1, T, K, G·H]`; the shadow of the output product `[1, T, D]`, or None without a
          shadow; the updated keys and values; the updated mass; and the number of channels with outliers, or
          None.
        """
        out, past, mass = self._attention(heads if shadows is None else _sums(heads, shadows), at, past, mass)
        if self._calibration.rows is None:
            return out, None, past, mass, None
        groups, _ = self._weights.used
        used = out if groups is None else groups.only(out, 2)
        (added,), count = self._shadow(OUT, used.reshape(*out.shape[:2], -1))
        return out, added, past, mass, count

    @shaped(x="float 1 T D", out="float 1 T K *")
    def finish(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """The next layer's input `[1, T, D]`, given the attention outputs."""
        x = self._added_output(x, out)
        norm, block = self._weights.norm("ffn_norm", self.cfg), block_weights(self._weights, self.cfg)
        steps, used = (self._steps[WIDEN], self._steps[NARROW]), self._weights.used[1]
        add_input = not self.cfg.post_norms
        mixed = feed_forward(x, norm, block, add_input=add_input, used=used, steps=steps)
        return self._post_normed(x, mixed, "ffn_post_norm")

    @shaped(x="float 1 T D", out="float 1 T K *", added="float 1 T D")
    def widen(self, x: jax.Array, out: jax.Array, added: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Input of the feed-forward block `[1, T, D]`, and its first products, each `[1, T, F]`; `added` is
        the shadow from `attend`."""
        x = self._added_output(x, out, added)
        return x, self._products(WIDEN, x)

    @shaped(x="float 1 T D")
    def widen_shadow(self, x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        """The shadow of the products of `widen`, from the block's input; and the number of channels with an
        outlier."""
        return self._normed_shadow(WIDEN, x)

    @shaped(x="float 1 T D")
    def narrow(
        self, x: jax.Array, products: Sequence[jax.Array], shadows: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Output of the feed-forward block `[1, T, D]` (with x added, unless a norm follows), and the input
        of its last product `[1, T, F]`."""
        first, *more = _sums(products, shadows)
        hidden = activate(first, self.cfg.activation)
        hidden = hidden * more[0] if more else hidden
        out = from_units(
            hidden,
            self._weights["ffn.down"],
            self._weights.vector("ffn.down_bias"),
            residual=None if self.cfg.post_norms else x,
            used=self._weights.used[1],
            step=self._steps[NARROW],
        )
        return out, hidden

    @shaped(x="float 1 T D", out="float 1 T D", hidden="float 1 T F")
    def narrow_shadow(self, x: jax.Array, out: jax.Array, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The next layer's input `[1, T, D]`, with the shadow of `hidden` `[1, T, F]` added; and the number
        of channels with an outlier."""
        _, neurons = self._weights.used
        used = hidden if neurons is None else neurons.only(hidden, 2)
        (added,), count = self._shadow(NARROW, used)
        return self._post_normed(x, out + added, "ffn_post_norm"), count

    @shaped(x="float 1 T D", mass="float32 1 S")
    def layer(
        self, x: jax.Array, at: TokenPositions, past: Past, mass: jax.Array | None
    ) -> tuple[jax.Array, Past, jax.Array | None, jax.Array | None]:
        """All stages as one step, for a processor that computes all of them: equal but for the order of sums,
        because the products add their shadow themselves; past and mass are donated.

        Returns:
          The next layer's input, the updated keys and values, the updated mass; and if the layer has a shadow
          the number of channels with outliers of each of `PRODUCTS`, `[4]` int32, else None.
        """
        rows, steps, weights, cfg = self._calibration.rows, self._steps, self._weights, self.cfg
        if rows is None:
            out, past, mass = self._attention(self.project(x), at, past, mass)
            return self.finish(x, out), past, mass, None
        groups, neurons = weights.used
        norm, matrices = weights.norm("attn_norm", cfg), matrices_of(weights, PROJECT, cfg)
        heads, projected = shadow.normed_to_units(
            x, norm, *matrices, steps[PROJECT], rows[PROJECT], used=groups, valid_rows=at.valid
        )
        out, past, mass = self._attention(heads, at, past, mass)
        outward, residual = self._outward(), None if cfg.post_norms else x
        mixed, attended = shadow.from_units(
            out, *outward, steps[OUT], rows[OUT], residual=residual, used=groups, valid_rows=at.valid
        )
        x = self._post_normed(x, mixed, "attn_post_norm", at.valid)
        norm, block = weights.norm("ffn_norm", cfg), block_weights(weights, cfg)
        pairs = (steps[WIDEN], steps[NARROW]), (rows[WIDEN], rows[NARROW])
        mixed, both = shadow.feed_forward(
            x, norm, block, *pairs, add_input=not cfg.post_norms, used=neurons, valid_rows=at.valid
        )
        x = self._post_normed(x, mixed, "ffn_post_norm", at.valid)
        return x, past, mass, jnp.concatenate([projected, attended, both])

    def _attention(
        self, heads: Sequence[jax.Array], at: TokenPositions, past: Past, mass: jax.Array | None
    ) -> tuple[jax.Array, Past, jax.Array | None]:
        """Attention outputs, the updated keys and values, and the updated mass."""
        q, k, v = heads
        new = normed_heads(self._weights, q, k, v, self.cfg)
        groups, _ = self._weights.used
        out, (past, mass) = attend_cache(
            new, groups, cfg=self.cfg, layer=self._layer, at=at, past=past, mass=mass
        )
        real = jnp.arange(out.shape[1], dtype=jnp.int32)[:, None, None] < at.valid
        # Outputs of padding are undefined, and outliers in them would be counted.
        out = jnp.where(real, out.reshape(*out.shape[:3], -1), jnp.zeros((), out.dtype))
        return out, past, mass

    def _added_output(self, x: jax.Array, out: jax.Array, added: jax.Array | None = None) -> jax.Array:
        """The layer's input with its output product and that product's shadow added."""
        residual, used = None if self.cfg.post_norms else x, self._weights.used[0]
        mixed = from_units(out, *self._outward(), residual=residual, used=used, step=self._steps[OUT])
        return self._post_normed(x, mixed if added is None else mixed + added, "attn_post_norm")

    def _outward(self) -> tuple[Weight, jax.Array | None]:
        """The weight and the bias of the output product of attention."""
        return self._weights["attn.o"], self._weights.vector("attn.o_bias")

    def _post_normed(
        self, x: jax.Array, mixed: jax.Array, norm: str, valid: jax.Array | None = None
    ) -> jax.Array:
        """A block's output, with x already added unless a norm follows, which adds it."""
        if not self.cfg.post_norms:
            return mixed
        return add_normed(x, mixed, self._weights.norm(norm, self.cfg), valid)

    def _products(self, product: int, x: jax.Array) -> list[jax.Array]:
        """Products of the normalized `x`: of heads, or the first of the feed-forward block."""
        matrices, biases = matrices_of(self._weights, product, self.cfg)
        groups, neurons = self._weights.used
        used = groups if product == PROJECT else neurons
        norm = self._weights.norm(_NORMS[product], self.cfg)
        return normed_to_units(x, norm, matrices, biases, used=used, step=self._steps[product])

    def _normed_shadow(self, product: int, x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        """The shadow of `_products`, and the number of channels with an outlier."""
        return self._shadow(product, normalize(x, self._weights.norm(_NORMS[product], self.cfg)))

    def _shadow(self, product: int, x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        """The shadow of a product's input `[1, T, inputs]` for each of its results."""
        assert self._calibration.rows is not None
        matrices, _ = matrices_of(self._weights, product, self.cfg)
        rows, last = self._calibration.rows[product], contracts_last_axis(product)
        return shadow.added_by_shadow(x, self._steps[product], matrices, rows, last=last)


def _sums(results: Sequence[jax.Array], shadows: Sequence[jax.Array]) -> list[jax.Array]:
    return [each + added.astype(each.dtype) for each, added in zip(results, shadows, strict=True)]


def block_weights(weights: LayerParams, cfg: ModelConfig) -> FeedForward:
    """The weights, biases and activation of a layer's feed-forward block."""
    first, biases = matrices_of(weights, WIDEN, cfg)
    return FeedForward(
        up=first[-1],
        down=weights["ffn.down"],
        gate=first[0] if cfg.gated_ffn else None,
        up_bias=biases[-1],
        down_bias=weights.vector("ffn.down_bias"),
        gate_bias=biases[0] if cfg.gated_ffn else None,
        activation=cfg.activation,
    )


# The calibration of integer prefill next to a layer's parameters, in their weight table.


_STEPS, _PLACE, _ROWS = "int8.steps", "int8.place", "int8.rows"


def can_be_addressed(weights: Params, cfg: ModelConfig) -> bool:
    """Whether native kernels compute all layers, shadows included, from addresses: 8-bit blocks with a scale
    per output, and norms without biases."""
    blocks = [each.base if isinstance(each, Adapted) else each for each in weights.values()]
    formats = {(each.bits, each.group) for each in blocks if isinstance(each, BlockedArray)}
    return cfg.norm == "rms" and formats == {(8, 0)}


def calibration_arrays(calibration: LayerCalibration) -> dict[str, Any]:
    """A layer's calibration as arrays by name."""
    found: dict[str, Any] = {_STEPS: np.asarray(calibration.steps)}
    for product, rows in enumerate(calibration.rows or ()):
        found[f"{_PLACE}.{product}"] = np.asarray(rows.place)
        for number, each in enumerate(rows.rows):
            found[f"{_ROWS}.{product}.{number}"] = np.asarray(each)
    return found


def calibration_of(weights: LayerParams) -> LayerCalibration:
    """The calibration from `calibration_arrays` among a layer's parameters."""
    steps, every = weights.operand(_STEPS), []
    assert steps is not None
    for product in range(len(PRODUCTS)):
        if (place := weights.operand(f"{_PLACE}.{product}")) is None:
            return LayerCalibration(value(steps))
        rows = []
        while (each := weights.operand(f"{_ROWS}.{product}.{len(rows)}")) is not None:
            rows.append(each)
        every.append(FloatRows(place, tuple(rows)))  # pyright: ignore[reportArgumentType]
    return LayerCalibration(value(steps), tuple(every))
