"""Gives parameters the form in which a bundle stores them: quantized by their role, or as they are."""

import dataclasses

import jax
import ml_dtypes
import numpy as np

from jaxllm.bundle.layout import contracted_axis
from jaxllm.errors import ConfigError
from jaxllm.formats import WeightFormat
from jaxllm.models.parameters import ParamSpec
from jaxllm.quant import BlockedArray, QArray, nested_blocks, quantize, to_blocks
from jaxllm.quant.finite import all_finite
from jaxllm.quant.row_parts import RowParts, part_rows

# A parameter as it is stored.
Stored = np.ndarray | BlockedArray


@dataclasses.dataclass(frozen=True)
class Kept:
    """A parameter of floats that keeps its width, whatever the format: 16 bits if it is bfloat16, else 32."""

    value: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.value.shape


def stored_by_rows(value: RowParts, spec: ParamSpec, weights: WeightFormat, width: int = 0) -> RowParts:
    """`stored_form` of a matrix that comes in parts."""
    return value.map(lambda part: stored_form(part, spec, weights, width))


def stored_form(
    value: np.ndarray | QArray | Kept, spec: ParamSpec, weights: WeightFormat, width: int = 0
) -> Stored:
    """A parameter at the bits that `weights` gives its role, or at `width` bits if that is not 0."""
    if isinstance(value, QArray):
        return _blocks(value)
    if isinstance(value, Kept):
        value, width = value.value, 16 if value.value.dtype == ml_dtypes.bfloat16 else 32
    bits = 32 if spec.role == "vector" else width or _width(spec, weights)
    # Embedding and head stay int8: drafts by 4-bit ones are much worse.
    if weights == "int8-nested" and bits == 8 and spec.role != "embed":
        return nested_blocks(np.asarray(value, np.float32), contracted_axis(spec))
    if bits in (16, 32):
        stored = np.asarray(value).astype(np.float32 if bits == 32 else ml_dtypes.bfloat16, copy=False)
        if not all_finite(stored):
            raise ConfigError(
                "it holds NaN or infinite values, or larger ones than its width can store; take another copy "
                "of the weights, or wider ones"
            )
        return stored
    levels = quantize(
        np.asarray(value),
        bits=bits,  # pyright: ignore[reportArgumentType]: of `EXPERT_BITS`, and no float
        axis=contracted_axis(spec),
        minima=weights == "int4-min" and bits == 4 and not width,
    )
    return _blocks(levels)


def _blocks(weight: QArray) -> BlockedArray:
    """`to_blocks`; of a large one by parts of whole panels, because its levels are larger than all else."""
    if weight.axis != -1 or weight.ndim != 2:
        return to_blocks(weight)
    parts = []
    for first, last in part_rows(len(weight.data), weight.columns):
        part = jax.tree.map(lambda array, at=slice(first, last): array[at], weight)
        parts.append(dataclasses.replace(to_blocks(part), shape=weight.shape))
    return parts[0] if len(parts) == 1 else jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)


def _width(spec: ParamSpec, weights: WeightFormat) -> int:
    floats = {"f32": 32, "bf16": 16}
    if weights in floats:
        return floats[weights]
    wide = weights in ("int8", "int8-nested") or (weights in ("int4", "int4-min") and spec.role == "embed")
    return 8 if wide else 4
