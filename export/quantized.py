"""Marks products for a compiler to compute in integers, and computes the scales of weights.

`int8` has weights at 8 bits with one scale per output channel, and dynamic activations with one scale per
token. `w8a8` has the same weights, and in its prefill programs static steps of activations (see
`static_products.py`). Marks are composites that `converter.py` translates (`quant.fake_quant`); a runtime
without support for them computes floats. The embedding matrix has dynamic scales in both, because its
products choose tokens.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.export.folder_format.manifest import Precision
from jaxllm.export.folder_format.parts import LEFT, RIGHT
from jaxllm.export.steps.exported import with_adapters
from jaxllm.export.subject import Subject
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import OwnProduct, Prefix, QArray, Weight

FAKE_QUANT = "quant.fake_quant"
# Suffixes of the names of the embedding's int8 levels and their scales among the weights.
LEVELS, SCALE = ".levels", ".scale"
_TOP = 127
# Product of activations `[M, N]` with a matrix whose axis -1 or -2 is contracted (see `OwnProduct`).
Product = Callable[[jax.Array, jax.Array, int], jax.Array]


def left_out(subject: Subject, precision: Precision, *, without_shadow: bool) -> tuple[str, ...]:
    """Lists features of a bundle that its programs do not have, for manifests and messages.

    Raises:
      ConfigError: the shadow of a calibrated bundle cannot be exported, and `without_shadow` is false.
    """
    if precision != "w8a8" or subject.calibration is None:
        return ()
    if without_shadow:
        return ("the calibration of integer prefill, and its shadow",)
    if subject.merged:
        raise ConfigError(
            f"{subject.name} was calibrated for integer prefill without the adapter, whose weights need "
            "other steps and rows; export it with --precision int8, or say --without-shadow and measure what "
            "it loses (jaxllm bench export)"
        )
    for level in subject.levels:
        if level not in subject.calibration.levels:
            known = ", ".join(map(str, subject.calibration.levels))
            raise ConfigError(
                f"level {level} of {subject.name} was not calibrated for integer prefill, levels {known} "
                "were; calibrate again with `jaxllm calibrate prefill`, or export with --precision int8"
            )
    return ()


def quantized_subject(subject: Subject) -> tuple[Subject, dict[str, np.ndarray]]:
    """Returns the model with matrices that equal their 8-bit levels times scales, and the scales by name.

    There is one scale per output channel: per unit of `[U, D]` if its last axis is contracted, else per
    column. The embedding matrix is also stored as levels, which serve both look-ups and products. An
    adapter's first factor has a scale per row; the second has one scale for all, and the scales of its rows
    are multiplied into the first, because the second has many channels and a scale per channel would need
    as much memory as its numbers.
    """
    arrays, scales = dict(subject.arrays), {}
    for name, spec in param_specs(subject.cfg).items():
        if spec.role == "vector":
            continue
        matrix = np.asarray(arrays[name], np.float32).reshape(-1, spec.shape[-1])
        axis = 0 if spec.role == "from_units" else 1
        scale = np.maximum(np.abs(matrix).max(axis=axis, keepdims=True), np.float32(1e-12)) / np.float32(_TOP)
        levels = np.clip(np.rint(matrix / scale), -_TOP, _TOP)
        arrays[name] = (levels * scale).astype(np.float32).reshape(spec.shape)
        scales[name] = scale.reshape(-1).astype(np.float64)
        if name == "embed.tokens":
            arrays[f"{name}{LEVELS}"] = levels.astype(np.int8)
            arrays[f"{name}{SCALE}"] = scale.astype(np.float32)
    for level in subject.levels.values():
        for name, spec in param_specs(level.cfg).items():
            if f"{name}{LEFT}" in level.weights:
                order = (LEFT, RIGHT) if spec.role == "from_units" else (RIGHT, LEFT)
                first, second = (level.weights[f"{name}{side}"].stored for side in order)
                sides = _quantized_sides(arrays[first], arrays[second])
                for stored, (side, scale) in zip((first, second), sides, strict=True):
                    arrays[stored], scales[stored] = side, scale
    return dataclasses.replace(subject, arrays=arrays), scales


def _quantized_sides(
    first: np.ndarray, second: np.ndarray
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The factors `[r, *]` of an adapter in the order of their use, as levels times scales, and the
    scales."""
    one, other = (side.astype(np.float32).reshape(len(side), -1) for side in (first, second))
    tops = _row_tops(other)
    one, other = one * tops, other / tops
    scale, step = _row_tops(one) / np.float32(_TOP), np.float32(1 / _TOP)
    return (
        ((np.rint(one / scale) * scale).reshape(first.shape), scale.reshape(-1).astype(np.float64)),
        ((np.rint(other / step) * step).reshape(second.shape), np.array([step], np.float64)),
    )


def _row_tops(matrix: np.ndarray) -> np.ndarray:
    """The largest magnitude of each row `[R, 1]`, never zero."""
    return np.maximum(np.abs(matrix).max(axis=1, keepdims=True), np.float32(1e-12))


def annotated(
    weights: Mapping[str, Weight],
    cfg: ModelConfig,
    *,
    scales: Mapping[str, np.ndarray],
    static: Mapping[str, Callable[[Mapping[str, Weight]], Product]],
) -> Params:
    """The parameters with marks around their products: those of `static` make their own of the weights; the
    others, and those of adapters, have dynamic activations."""
    specs, marked = param_specs(cfg), dict(weights)
    for name, each in scales.items():
        if name not in weights:
            continue
        weight = weights[name]
        if name.endswith((LEFT, RIGHT)):
            side = jnp.reshape(weight, (weight.shape[0], -1))  # pyright: ignore[reportArgumentType]: arrays
            product = functools.partial(_product, channel_scales=each)
            marked[name] = OwnProduct(side, product)
            continue
        spec = specs[name]
        base = weight.base if isinstance(weight, Prefix) else weight
        outputs = int(np.prod(spec.shape[:-1])) if spec.role != "from_units" else spec.shape[-1]
        product: Product = functools.partial(_product, channel_scales=each[:outputs])
        if name in static:
            product = static[name](weights)
        own = OwnProduct(base, product)
        if f"{name}{LEVELS}" in weights:
            rows = QArray(
                weights[f"{name}{LEVELS}"],  # pyright: ignore[reportArgumentType]: arrays
                weights[f"{name}{SCALE}"],  # pyright: ignore[reportArgumentType]
                bits=8,
                group=0,
                axis=-1,
                columns=spec.shape[-1],
            )
            own = OwnProduct(base, product, rows)
        marked[name] = dataclasses.replace(weight, base=own) if isinstance(weight, Prefix) else own
    return with_adapters(marked, cfg)


def _product(rows: jax.Array, matrix: jax.Array, axis: int, *, channel_scales: np.ndarray) -> jax.Array:
    weight = quantized_matrix(matrix, axis, channel_scales)
    return plain_product(fake_quant(rows, np.zeros(0)), weight, -1)


def quantized_matrix(matrix: jax.Array, axis: int, channel_scales: np.ndarray) -> jax.Array:
    """Returns a weight `[outputs, inputs]`, marked, of a matrix whose `axis` is contracted."""
    turned = matrix if axis == -1 else matrix.T
    return fake_quant(turned, channel_scales, axis=0 if len(channel_scales) == len(turned) else None)


def plain_product(rows: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """Multiplies `rows` `[M, N]` by a matrix whose `axis` is contracted."""
    contracted = 1 if axis == -1 else 0
    return jax.lax.dot_general(rows, matrix, (((1,), (contracted,)), ((), ())))


def fake_quant(x: jax.Array, scales: np.ndarray, axis: int | None = None) -> jax.Array:
    """`x` rounded to 8 bits, as a mark for compilers: with no scales while it runs, with one per tensor, or
    with one for each index of `axis`."""

    def rounded(x: jax.Array, **_: Any) -> jax.Array:
        if not len(scales):
            return x
        shape = [1] * x.ndim
        shape[axis or 0] = len(scales)
        scale = jnp.asarray(scales.reshape(shape if axis is not None else [1] * x.ndim), x.dtype)
        return jnp.clip(jnp.round(x / scale), -_TOP - 1, _TOP) * scale

    marked = jax.lax.composite(rounded, FAKE_QUANT)
    facts: dict[str, Any] = {
        "dtype": "i8",
        "narrow_range": axis is not None,
        "scale": np.asarray(scales, np.float64),
        "zero_point": np.zeros(len(scales), np.int64),
    }
    if axis is not None:
        facts["quantization_dimension"] = np.int32(axis)
    return marked(x, **facts)
