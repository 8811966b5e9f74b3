"""Reads and writes the calibration of integer prefill in a bundle: steps, and float rows of channels with
outliers."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.bundle.calibrated import read_calibration
from jaxllm.bundle.layout import Part
from jaxllm.bundle.reader import Bundle
from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.calibration import PrefillCalibration
from jaxllm.int8_prefill.products import PRODUCTS, product_sizes

_PART = "prefill"
_LEAST_STEP, _LARGEST_STEP = 1e-30, 1e30


def prefill_parts(calibration: PrefillCalibration, facts: Mapping[str, Any] | None = None) -> dict[str, Part]:
    """The part of a bundle with a calibration, for `write_bundle`; `facts` are for people."""
    arrays: dict[str, np.ndarray] = {"steps": calibration.steps}
    for (layer, product), channels in calibration.channels.items():
        arrays[f"channels.{layer}.{product}"] = channels
        for number, rows in enumerate(calibration.rows[layer, product]):
            arrays[_rows(layer, product, number)] = rows
    told = {
        **(facts or {}),
        "levels": list(calibration.levels),
        "shadowed": list(calibration.shadowed),
        "losses": {str(level): list(each) for level, each in calibration.losses.items()},
    }
    return {_PART: Part(told, arrays)}


def has_channel_scales(bundle: Bundle) -> bool:
    """Whether all matrices of layers are of 8 bits with one scale per channel, which integer prefill
    multiplies; those of GGUF files and quantized folders have groups."""
    matrices = [
        each for name, each in bundle.layout.tensors.items() if name.startswith("layers.") and each.bits
    ]
    return bool(matrices) and not any(each.group for each in matrices)


def prefill_facts(bundle: Bundle) -> dict[str, Any]:
    """Facts about a bundle's integer prefill; empty if it has none."""
    part = bundle.layout.parts.get(_PART)
    return {} if part is None else dict(part.facts)


def release_prefill(bundle: Bundle) -> None:
    """Releases the memory of a checked calibration (see `Bundle.release_part`)."""
    bundle.release_part(_PART)


def read_prefill(bundle: Bundle) -> PrefillCalibration | None:
    """The calibration of a bundle, its arrays views of the file; None if it has none.

    Raises:
      BundleError: the calibration is corrupt, malformed, or belongs to another model.
    """
    return read_calibration(bundle, _PART, "integer prefill", _checked)


def _checked(bundle: Bundle, part: Part) -> PrefillCalibration:
    cfg, facts, arrays = bundle.cfg, part.facts, dict(part.arrays)
    levels, shadowed = tuple(facts["levels"]), tuple(facts["shadowed"])
    if not levels or any(type(each) is not int for each in levels) or list(levels) != sorted(set(levels)):
        raise ConfigError(f"its levels are {levels!s:.80}")
    if len(shadowed) != cfg.layers or any(type(each) is not bool for each in shadowed):
        raise ConfigError(f"it does not say of {cfg.layers} layers whether they have a shadow")
    losses = {int(level): tuple(map(float, each)) for level, each in facts["losses"].items()}
    if any(len(each) != 2 or any(math.isnan(loss) for loss in each) for each in losses.values()):
        raise ConfigError("its losses are no pairs of numbers")
    steps = _array(arrays, "steps", (len(levels), cfg.layers, len(PRODUCTS)), np.float32)
    # The comparison is false for NaN.
    if not ((steps >= _LEAST_STEP) & (steps <= _LARGEST_STEP)).all():
        raise ConfigError(f"its steps are not all in [{_LEAST_STEP:g}, {_LARGEST_STEP:g}]")
    # Older versions stored here how many rows stay in memory.
    arrays.pop("hot", None)
    channels, rows = {}, {}
    for layer in (layer for layer, with_shadow in enumerate(shadowed) if with_shadow):
        for product in range(len(PRODUCTS)):
            inputs, outputs = product_sizes(cfg, layer, product)
            own = arrays.pop(f"channels.{layer}.{product}")
            if own.ndim != 1 or own.dtype != np.int32 or len(own) > inputs:
                raise ConfigError(f"the channels of layer {layer} are {own.dtype.name} {list(own.shape)}")
            real = own[own >= 0]
            if (own < -1).any() or (real >= inputs).any() or len(np.unique(real)) != len(real):
                raise ConfigError(f"the channels of layer {layer} are not different ones of {inputs}")
            channels[layer, product] = own
            rows[layer, product] = tuple(
                _finite(arrays, _rows(layer, product, number), (len(own), each))
                for number, each in enumerate(outputs)
            )
    if len({len(own) for own in channels.values()}) > 1:
        raise ConfigError("its products have different numbers of rows")
    if arrays:
        raise ConfigError(f"it holds {min(arrays)}, which nothing takes")
    return PrefillCalibration(
        levels=levels,
        steps=steps,
        shadowed=shadowed,
        channels=channels,
        rows=rows,
        losses=losses,  # pyright: ignore[reportArgumentType]: pairs
    )


def _rows(layer: int, product: int, number: int) -> str:
    return f"rows.{layer}.{product}.{number}"


def _array(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    found = arrays.pop(name)
    if found.shape != shape or found.dtype != dtype:
        raise ConfigError(f"{name} must be {np.dtype(dtype).name} {list(shape)}, got {found.dtype.name} "
                          f"{list(found.shape)}")  # fmt: skip
    return found


def _finite(arrays: dict[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
    found = _array(arrays, name, shape, np.float16)
    if not np.isfinite(found).all():
        raise ConfigError(f"{name} holds NaN or infinity")
    return found
