"""4-bit weights in blocks of 32 along the inputs of a product, as LiteRT's runtimes take them.

A program is traced with matrices that equal their levels times scales. In the converted model the constants
of these values become 4-bit tensors with their blocks' scales, which the converter itself does not write.
Scales are float16 numbers with the 7 bits of mantissa that XNNPACK reads. The embedding, whose products
choose tokens, and matrices whose inputs are no multiple of 32 have 8 bits (see `quantized.py`).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

from jaxllm.errors import ConfigError
from jaxllm.export.lookups import Subgraph, content_of
from jaxllm.export.subject import Subject
from jaxllm.models.parameters import param_specs

BLOCK = 32
# Levels are symmetric.
_TOP = 7
# Shares of a block's largest magnitude to try as the top level: the one of the least squared error is taken.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """A matrix `[outputs, inputs]`: levels int8 in -7 to 7, and scales `[outputs, inputs / 32]` float16."""

    levels: np.ndarray
    scales: np.ndarray

    @classmethod
    def of(cls, matrix: np.ndarray) -> "Blocks":
        """Rounds a float matrix."""
        grouped = matrix.reshape(len(matrix), -1, BLOCK)
        most = np.abs(grouped).max(-1, keepdims=True)
        best = np.full(most.shape, np.inf)
        levels, scales = np.zeros(grouped.shape, np.int8), np.ones(most.shape, np.float32)
        for share in _SHARES:
            scale = (most * np.float32(share) / _TOP).astype(ml_dtypes.bfloat16).astype(np.float16)
            scale = np.where(scale > 0, scale, np.finfo(np.float16).smallest_normal).astype(np.float32)
            found = np.clip(np.rint(grouped / scale), -_TOP, _TOP)
            error = np.square(found * scale - grouped).sum(-1, keepdims=True)
            better = error < best
            levels, scales = np.where(better, found, levels).astype(np.int8), np.where(better, scale, scales)
            best = np.where(better, error, best)
        return cls(levels.reshape(matrix.shape), scales[..., 0].astype(np.float16))

    @functools.cached_property
    def values(self) -> np.ndarray:
        """The matrix, float32."""
        grouped = self.levels.reshape(*self.scales.shape, BLOCK) * self.scales.astype(np.float32)[..., None]
        return grouped.reshape(self.levels.shape).astype(np.float32)


def in_blocks(subject: Subject) -> tuple[Subject, dict[str, Blocks]]:
    """Returns the model with matrices that equal their 4-bit levels times scales, and these by name."""
    arrays, blocks = dict(subject.arrays), {}
    for name, spec in param_specs(subject.cfg).items():
        if spec.role not in ("to_units", "from_units"):
            continue
        matrix = np.asarray(arrays[name], np.float32).reshape(-1, spec.shape[-1])
        turned = spec.role == "from_units"
        matrix = matrix.T if turned else matrix
        if matrix.shape[1] % BLOCK:
            continue
        blocks[name] = found = Blocks.of(np.ascontiguousarray(matrix))
        arrays[name] = (found.values.T if turned else found.values).reshape(spec.shape)
    return dataclasses.replace(subject, arrays=arrays), blocks


def put_blocks(schema: Any, model: Any, data: bytes, blocks: Mapping[str, Blocks]) -> None:
    """Stores the constants of a converted model that are matrices of `blocks`, or their first rows, at 4
    bits.

    Args:
      schema: the module of LiteRT's schema.
      model: the unpacked model, which is changed.
      data: its bytes, for constants.
      blocks: matrices by name.

    Raises:
      ConfigError: the converter gave one of them another form.
    """
    of_first = {xxhash.xxh3_128_digest(each.values[0].tobytes()): each for each in blocks.values()}
    # By buffer: its 4-bit buffer and that of its scales.
    stored: dict[int, tuple[int, int]] = {}

    seen = set()
    for subgraph in model.subgraphs:
        own = Subgraph(schema, model, subgraph, data)
        for operator in subgraph.operators:
            if own.kind(operator) != schema.BuiltinOperator.FULLY_CONNECTED:
                continue
            tensor = subgraph.tensors[int(operator.inputs[1])]
            if tensor.type != schema.TensorType.FLOAT32 or not tensor.buffer:
                continue
            content = content_of(model.buffers[tensor.buffer], data)
            rows, inputs = map(int, tensor.shape)
            found = of_first.get(xxhash.xxh3_128_digest(content[: 4 * inputs]))
            if found is None:
                continue
            if found.values[:rows].tobytes() != content.tobytes():
                raise ConfigError("a matrix of 4 bits has other values in the converted model; export int8")
            if tensor.buffer not in stored:
                levels = found.levels[:rows].reshape(-1, 2).view(np.uint8) & 15
                packed = levels[:, 0] | levels[:, 1] << 4
                stored[tensor.buffer] = own.buffer(packed), own.buffer(found.scales[:rows])
            tensor.buffer, scales = stored[tensor.buffer]
            facts = schema.BlockwiseQuantizationT()
            facts.scales = own.tensor([rows, inputs // BLOCK], schema.TensorType.FLOAT16, scales)
            facts.zeroPoints, facts.blockSize = -1, BLOCK
            tensor.type, tensor.quantization = schema.TensorType.INT4, schema.QuantizationParametersT()
            tensor.quantization.detailsType = schema.QuantizationDetails.BlockwiseQuantization
            tensor.quantization.details = facts
            seen.add(id(found))
    if missing := sorted(name for name, each in blocks.items() if id(each) not in seen):
        raise ConfigError(f"the converted model has no 4-bit product with {missing[0]}; export int8")
    used = {each.buffer for subgraph in model.subgraphs for each in subgraph.tensors}
    for place in stored.keys() - used:
        model.buffers[place] = schema.BufferT()
