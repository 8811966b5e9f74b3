"""Marks products for a compiler to compute in integers, and computes the scales of weights.

`int8` has weights at 8 bits with one scale per output channel, and dynamic activations with one scale per
token. `w8a8` has the same weights, and in its prefill programs static steps of activations, with the shadow
of outliers in floats (mllm-NPU, arXiv 2407.05858, section 3.3). Marks are composites that `converter.py`
translates (`quant.fake_quant`); a runtime without support for them computes floats. The embedding matrix has
dynamic scales in both, because its products choose tokens.

At static steps an input beyond 127 steps is clipped, so that a product is one of int8 with int8. Its excess
is multiplied separately, in floats: channels with outliers are known from the bundle's calibration, and a
program gathers their excess into a compact tensor of this static size, `[T, R]`, and multiplies it with their
rows of weights in floats. (The live service also finds channels that had no outlier in the calibration; a
program clips them.) Layers without a shadow have steps that clip nothing of the calibration text.

A runtime's product gives int8, too. One step for all outputs would have to cover the largest, so weights
are divided by the largest magnitude of their output, measured on a text, and results multiplied by it: each
output has a step of its own. Levels of the weights are unchanged, so that all programs share them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.export.folder_format.manifest import Precision
from jaxllm.export.folder_format.parts import LEFT, RIGHT, Argument, ProgramLevel
from jaxllm.export.steps.exported import with_adapters
from jaxllm.export.subject import Subject
from jaxllm.int8_prefill.shadow import PRODUCTS, product_names
from jaxllm.kernels.native import without_native_kernels
from jaxllm.models.decoder import forward
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import OwnProduct, Prefix, Weight

FAKE_QUANT = "quant.fake_quant"
# Suffix of the names of a weight's float rows, `[outputs, R]` float16.
ROWS = ".shadow_rows"
# Integers of a runtime go from -128 to 127.
_LEAST, _TOP = -128, 127
# Tokens of the text per forward pass.
WINDOW_TOKENS = 256
_SMALLEST = 1e-6
# Maximum number of arrays that one of XNNPACK's operators concatenates.
_JOINED = 5
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


def channel_scales(matrix: np.ndarray, axis: int) -> np.ndarray:
    """The 8-bit scales of a float32 matrix whose `axis` is contracted, which stays with a length of 1."""
    return np.maximum(np.abs(matrix).max(axis=axis, keepdims=True), np.float32(1e-12)) / np.float32(_TOP)


def channel_levels(matrix: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The levels of a matrix, whole numbers from -127 to 127 in float32."""
    return np.clip(np.rint(matrix / scale), -_TOP, _TOP)


def quantized_subject(subject: Subject) -> tuple[Subject, dict[str, np.ndarray]]:
    """Returns the model with matrices that equal their 8-bit levels times scales, and scales of the layers'.

    There is one scale per output channel: per unit of `[U, D]` if its last axis is contracted, else per
    column. Adapters are those of `quantized_adapters`.
    """
    arrays, scales = dict(subject.arrays), {}
    for name, spec in param_specs(subject.cfg).items():
        if spec.role == "vector":
            continue
        matrix = np.asarray(arrays[name], np.float32).reshape(-1, spec.shape[-1])
        axis = 0 if spec.role == "from_units" else 1
        scale = channel_scales(matrix, axis)
        levels = channel_levels(matrix, scale)
        arrays[name] = (levels * scale).astype(np.float32).reshape(spec.shape)
        if spec.role != "embed":
            scales[name] = scale.reshape(-1).astype(np.float64)
    return dataclasses.replace(subject, arrays=arrays | quantized_adapters(subject)[0]), scales


def quantized_adapters(subject: Subject) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The factors of the levels' adapters that equal their 8-bit levels times scales, and the scales.

    The first factor has a scale per row; the second has one scale for all, and the scales of its rows are
    multiplied into the first, because the second has many channels and a scale per channel would need as much
    memory as its numbers.
    """
    arrays, scales = {}, {}
    for level in subject.levels.values():
        for name, spec in param_specs(level.cfg).items():
            if f"{name}{LEFT}" in level.weights:
                order = (LEFT, RIGHT) if spec.role == "from_units" else (RIGHT, LEFT)
                # In the order of their use, `[r, *]`.
                stored = [level.weights[f"{name}{side}"].stored for side in order]
                sides = [subject.arrays[each] for each in stored]
                one, other = (side.astype(np.float32).reshape(len(side), -1) for side in sides)
                tops = _row_tops(other)
                one, other = one * tops, other / tops
                steps = _row_tops(one) / np.float32(_TOP), np.float32(1 / _TOP)
                for each, like, side, step in zip(stored, sides, (one, other), steps, strict=True):
                    arrays[each] = (np.rint(side / step) * step).reshape(like.shape)
                    scales[each] = np.asarray(step, np.float64).reshape(-1)
    return arrays, scales


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
    """The parameters with marks around the products of `scales`: those of `static` make their own of the
    weights, the others have dynamic activations."""
    specs, marked = param_specs(cfg), dict(weights)
    for name in scales.keys() & weights.keys():
        weight, spec = weights[name], specs[name]
        base = weight.base if isinstance(weight, Prefix) else weight
        outputs = int(np.prod(spec.shape[:-1])) if spec.role != "from_units" else spec.shape[-1]
        product: Product = functools.partial(_product, channel_scales=scales[name][:outputs])
        own = OwnProduct(base, static[name](weights) if name in static else product)
        marked[name] = dataclasses.replace(weight, base=own) if isinstance(weight, Prefix) else own
    return with_adapters(marked, cfg)


def _product(rows: jax.Array, matrix: jax.Array, axis: int, *, channel_scales: np.ndarray) -> jax.Array:
    weight = quantized_matrix(matrix, axis, channel_scales)
    # Of one sequence: LiteRT's accelerators take 8-bit products of three dimensions alone.
    return plain_product(fake_quant(rows[None], np.zeros(0)), weight, -1)[0]


def quantized_matrix(matrix: jax.Array, axis: int, channel_scales: np.ndarray) -> jax.Array:
    """Returns a weight `[outputs, inputs]`, marked, of a matrix whose `axis` is contracted."""
    turned = matrix if axis == -1 else matrix.T
    return fake_quant(turned, channel_scales, axis=0 if len(channel_scales) == len(turned) else None)


def sequence_product(rows: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """`plain_product` as one of one sequence, with a matrix `[outputs, inputs]`."""
    return plain_product(rows[None], matrix if axis == -1 else matrix.T, -1)[0]


def runtime_product(rows: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """`sequence_product` as XNNPACK computes it of weights of 8 or 4 bits: each row of inputs is rounded to 8
    bits, with a scale and a zero point for its own range."""
    least = jnp.minimum(rows.min(-1, keepdims=True), 0.0)
    step = jnp.maximum(jnp.maximum(rows.max(-1, keepdims=True), 0.0) - least, _SMALLEST) / (_TOP - _LEAST)
    zero = jnp.round(_LEAST - least / step)
    levels = jnp.clip(jnp.round(rows / step) + zero, _LEAST, _TOP)
    return sequence_product((levels - zero) * step, matrix, axis)


def plain_product(rows: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """Multiplies `rows` `[..., N]` by a matrix whose `axis` is contracted."""
    contracted = 1 if axis == -1 else 0
    return jax.lax.dot_general(rows, matrix, (((rows.ndim - 1,), (contracted,)), ((), ())))


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


@dataclasses.dataclass(frozen=True, eq=False)
class Ranges:
    """The largest magnitudes of a product on a text: of all its inputs, and of each output `[outputs]`."""

    inputs: float
    outputs: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class StaticProduct:
    """Product with a weight at static steps.

    Attributes:
      outputs: largest magnitude of each output, `[outputs]` float32.
      channels: inputs whose excess is multiplied in floats, `[R]` int32; empty for none.
      scales: scales of the weight's rows, divided by `outputs`.
    """

    step: float
    outputs: np.ndarray
    channels: np.ndarray
    scales: np.ndarray

    def of(self, name: str, weights: Mapping[str, Weight]) -> Product:
        """The product of the weight `name`, with its float rows if it has some."""
        if not len(self.channels):
            return self.clipped
        shadow = self.shadow(name, weights)
        return lambda x, matrix, axis: self.clipped(x, matrix, axis) + shadow(x, matrix, axis)

    def shadow(self, name: str, weights: Mapping[str, Weight]) -> Product:
        """Returns the shadow of the product of the weight `name`: the product with the clipped excess, in
        floats."""
        if not len(self.channels):
            return lambda x, matrix, axis: jnp.zeros((x.shape[0], len(self.outputs)), x.dtype)
        rows: Any = weights[f"{name}{ROWS}"]

        def product(x: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
            del matrix, axis
            # Columns `[T, R]` as slices, which XNNPACK computes. An index becomes a gather between two
            # transpositions of all of `x`, which it does not compute.
            taken = [x[:, at : at + 1] for at in self.channels.tolist()]
            while len(taken) > 1:
                taken = [jnp.concatenate(taken[at : at + _JOINED], 1) for at in range(0, len(taken), _JOINED)]
            known = taken[0]
            excess = known - jnp.clip(known, np.float32(_LEAST * self.step), np.float32(_TOP * self.step))
            return plain_product(excess, rows.astype(jnp.float32), -1)

        return product

    def clipped(self, x: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
        """The product of int8 with int8, of clipped inputs."""
        weight = quantized_matrix(matrix, axis, self.scales)
        out = plain_product(fake_quant(x, np.array([self.step])), weight, -1)
        # Keeps the converter from propagating int8 into following operations, above all the cache.
        return jax.lax.optimization_barrier(fake_quant(out, np.array([1 / _TOP]))) * self.outputs


def with_shadow(subject: Subject) -> Subject:
    """Returns a subject whose levels have the float rows of its calibration among their weights."""
    calibration, cfg = subject.calibration, subject.cfg
    if calibration is None:
        return subject
    arrays, levels = dict(subject.arrays), {}
    for (layer, product), channels in calibration.channels.items():
        real = channels >= 0
        for name, rows in zip(
            product_names(layer, product, cfg), calibration.rows[layer, product], strict=True
        ):
            if real.any():
                arrays[f"{name}{ROWS}"] = np.ascontiguousarray(rows[real].T)
    for level, entry in subject.levels.items():
        weights = dict(entry.weights)
        for name, spec in param_specs(entry.cfg).items():
            if (rows := arrays.get(f"{name}{ROWS}")) is not None:
                outputs = spec.shape[-1] if spec.role == "from_units" else int(np.prod(spec.shape[:-1]))
                shape = outputs, rows.shape[1]
                weights[f"{name}{ROWS}"] = Argument(stored=f"{name}{ROWS}", shape=shape)
        levels[level] = ProgramLevel(cfg=entry.cfg, weights=weights)
    return dataclasses.replace(subject, arrays=arrays, levels=levels)


def calibrate(subject: Subject, tokens: Sequence[int]) -> dict[int, dict[str, Ranges]]:
    """Measures the ranges of all products of the layers on a text, by level.

    Args:
      subject: the model as exported; calibrated inputs are clipped, as in programs.
      tokens: at least two tokens; windows of `WINDOW_TOKENS` are run separately.

    Raises:
      ConfigError: there is too little text.
    """
    if len(tokens) < 2:
        raise ConfigError(
            f"{len(tokens)} tokens are no text to calibrate on; give a longer text (--calibration-text)"
        )
    return {level: _ranges(subject, level, tokens) for level in subject.levels}


def static_level(
    subject: Subject, level: int, scales: Mapping[str, np.ndarray], ranges: Mapping[str, Ranges]
) -> tuple[Subject, dict[str, StaticProduct]]:
    """Returns a level's static products by weight, and the subject with the arrays that they multiply.

    Args:
      subject: result of `quantized_subject`, and of `with_shadow` if it is calibrated.
      scales: scales of weights, by name.
      ranges: ranges of the level's products.
    """
    cfg, calibrated = subject.levels[level].cfg, _calibrated(subject, level)
    arrays, products = dict(subject.arrays), {}
    for name, found in ranges.items():
        spec = param_specs(cfg)[name]
        outputs = np.maximum(found.outputs, _SMALLEST).astype(np.float32)
        step, channels = calibrated.get(name, (max(found.inputs, _SMALLEST) / _TOP, np.zeros(0, np.int32)))
        products[name] = StaticProduct(step, outputs, channels, scales[name][: len(outputs)] / outputs)
        # Units of other levels are divided by one: nothing reads them.
        whole = arrays[name]
        if spec.role == "from_units":
            arrays[name] = whole / outputs
        else:
            divided = np.ones(whole.shape[:-1], np.float32).reshape(-1)
            divided[: len(outputs)] = outputs
            arrays[name] = whole / divided.reshape(*whole.shape[:-1], 1)
    return dataclasses.replace(subject, arrays=arrays), products


def _calibrated(subject: Subject, level: int) -> dict[str, tuple[float, np.ndarray]]:
    """Returns step and channels of each weight that the bundle has a calibration of."""
    if subject.calibration is None:
        return {}
    found, calibration = {}, subject.calibration
    steps = calibration.steps[calibration.levels.index(level)]
    for layer in range(subject.cfg.layers):
        for product in range(len(PRODUCTS)):
            channels = calibration.channels.get((layer, product), np.zeros(0, np.int32))
            for name in product_names(layer, product, subject.cfg):
                found[name] = float(steps[layer, product]), channels[channels >= 0]
    return found


def _ranges(subject: Subject, level: int, tokens: Sequence[int]) -> dict[str, Ranges]:
    cfg, calibrated = subject.levels[level].cfg, _calibrated(subject, level)
    plain: dict[str, Any] = {
        name: jnp.asarray(array) for name, array in subject.weights(level).items() if not name.endswith(ROWS)
    }

    @jax.jit
    def seen(plain: dict[str, Any], row: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
        found = {}

        def observed(name: str, x: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
            clipped = x
            if name in calibrated:
                clipped = jnp.clip(x, _LEAST * calibrated[name][0], _TOP * calibrated[name][0])
            outputs = jnp.abs(plain_product(clipped, matrix, axis)).max(axis=0)
            found[name] = jnp.abs(x).max(), outputs
            return plain_product(x, matrix, axis)

        params = dict(plain)
        for name, spec in param_specs(cfg).items():
            if spec.role in ("to_units", "from_units"):
                params[name] = OwnProduct(params[name], functools.partial(observed, name))
        forward(with_adapters(params, cfg), row, cfg=cfg)
        return found

    window = min(WINDOW_TOKENS, cfg.window_tokens)
    # Rows of one length, so that one forward pass is compiled, and the rest.
    rows = [np.asarray(tokens[at : at + window], np.int32) for at in range(0, len(tokens), window)]
    with without_native_kernels():
        texts = [jax.device_get(seen(plain, jnp.asarray(row[None]))) for row in rows]
    return {
        name: Ranges(
            float(np.max([each[name][0] for each in texts])),
            np.max([each[name][1] for each in texts], axis=0),
        )
        for name in texts[0]
    }
