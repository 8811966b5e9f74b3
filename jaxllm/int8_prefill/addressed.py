"""The calibration of integer prefill beside a layer's parameters, in their weight table."""

from typing import Any

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.int8_prefill.products import PRODUCTS
from jaxllm.int8_prefill.shadow import FloatRows
from jaxllm.int8_prefill.subgraphs import LayerCalibration
from jaxllm.kernels.native_call import value
from jaxllm.models.layer_params import LayerParams
from jaxllm.models.parameters import Params
from jaxllm.quant import Adapted, BlockedArray

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
    steps = weights.operand(_STEPS)
    assert steps is not None
    rows = tuple(_rows_of(weights, product) for product in range(len(PRODUCTS)))
    return LayerCalibration(value(steps), rows if all(each is not None for each in rows) else None)  # pyright: ignore


def _rows_of(weights: LayerParams, product: int) -> FloatRows | None:
    place, found = weights.operand(f"{_PLACE}.{product}"), []
    while (each := weights.operand(f"{_ROWS}.{product}.{len(found)}")) is not None:
        found.append(each)
    return None if place is None else FloatRows(place, tuple(found))  # pyright: ignore[reportArgumentType]
