"""Computes products of integer prefill for programs: static steps, and the shadow of outliers in floats
(mllm-NPU, arXiv 2407.05858, section 3.3).

An input beyond 127 steps is clipped, so that a product is one of int8 with int8. Its excess is multiplied
separately, in floats: channels with outliers are known from the bundle's calibration, and a program gathers
their excess into a compact tensor of this static size, `[T, R]`, and multiplies it with their rows of
weights in floats. (The live service also finds channels that had no outlier in the calibration; a program
clips them.) Layers without a shadow have steps that clip nothing of the calibration text.

A runtime's product gives int8, too. One step for all outputs would have to cover the largest, so weights
are divided by the largest magnitude of their output, measured on a text, and results multiplied by it: each
output has a step of its own. Levels of the weights are unchanged, so that all programs share them.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.export.folder_format.parts import Argument, ProgramLevel
from jaxllm.export.quantized import Product, fake_quant, plain_product, quantized_matrix
from jaxllm.export.steps.exported import with_adapters
from jaxllm.export.subject import Subject
from jaxllm.int8_prefill.shadow import PRODUCTS, product_names
from jaxllm.kernels.native import without_native_kernels
from jaxllm.models.decoder import forward
from jaxllm.models.parameters import param_specs
from jaxllm.quant import OwnProduct, Weight

# Suffix of the names of a weight's float rows, `[outputs, R]` float16.
ROWS = ".shadow_rows"
# Integers of a runtime go from -128 to 127.
_LEAST, _TOP = -128, 127
# Tokens of the text per forward pass.
WINDOW_TOKENS = 256
_SMALLEST = 1e-6
# Maximum number of arrays that one of XNNPACK's operators concatenates.
_JOINED = 5


@dataclasses.dataclass(frozen=True, eq=False)
class Ranges:
    """The largest magnitudes of a product on a text: of all its inputs, and of each output `[outputs]`."""

    inputs: float
    outputs: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class StaticProduct:
    """Product with a weight at static steps.

    Attributes:
      step: step of its inputs.
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
            return plain_product(self._excess(_columns(x, self.channels)), rows.astype(jnp.float32), -1)

        return product

    def clipped(self, x: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
        """The product of int8 with int8, of clipped inputs."""
        weight = quantized_matrix(matrix, axis, self.scales)
        out = plain_product(fake_quant(x, np.array([self.step])), weight, -1)
        # Keeps the converter from propagating int8 into following operations, above all the cache.
        return jax.lax.optimization_barrier(fake_quant(out, np.array([1 / _TOP]))) * self.outputs

    def _excess(self, x: jax.Array) -> jax.Array:
        return x - jnp.clip(x, np.float32(_LEAST * self.step), np.float32(_TOP * self.step))


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
            if f"{name}{ROWS}" in arrays:
                rows = arrays[f"{name}{ROWS}"]
                weights[f"{name}{ROWS}"] = Argument(
                    stored=f"{name}{ROWS}", shape=(_outputs(spec.shape, spec.role), rows.shape[1])
                )
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
      level: level in percent.
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


def _columns(x: jax.Array, channels: np.ndarray) -> jax.Array:
    """Some columns `[T, R]` of `x` `[T, inputs]`, as slices, which XNNPACK computes. An index becomes a
    gather between two transpositions of all of `x`, which it does not compute."""
    taken = [x[:, at : at + 1] for at in channels.tolist()]
    while len(taken) > 1:
        taken = [jnp.concatenate(taken[at : at + _JOINED], 1) for at in range(0, len(taken), _JOINED)]
    return taken[0]


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


def _outputs(shape: tuple[int, ...], role: str) -> int:
    return shape[-1] if role == "from_units" else int(np.prod(shape[:-1]))
