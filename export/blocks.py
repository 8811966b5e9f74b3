"""4-bit weights in blocks of 32 along the inputs of a product, as LiteRT's runtimes take them.

The converter does not write them: `placed.py` puts them into the converted model. Scales are float16
numbers with the 7 bits of mantissa that XNNPACK reads. The embedding, whose products choose tokens, and
matrices whose inputs are no multiple of 32 have 8 bits.
"""

import dataclasses

import ml_dtypes
import numpy as np

from jaxllm.config import ModelConfig
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

    @property
    def packed(self) -> np.ndarray:
        """The levels, two in a byte, the first in the lower bits: uint8."""
        pairs = self.levels.reshape(-1, 2).view(np.uint8) & 15
        return pairs[:, 0] | pairs[:, 1] << 4

    @property
    def values(self) -> np.ndarray:
        """The matrix, float32."""
        grouped = self.levels.reshape(*self.scales.shape, BLOCK) * self.scales.astype(np.float32)[..., None]
        return grouped.reshape(self.levels.shape).astype(np.float32)


def in_blocks(cfg: ModelConfig) -> set[str]:
    """Names of the parameters of a model that have 4 bits."""
    found = set()
    for name, spec in param_specs(cfg).items():
        inputs = spec.shape[-1] if spec.role == "to_units" else int(np.prod(spec.shape[:-1]))
        if spec.role in ("to_units", "from_units") and not inputs % BLOCK:
            found.add(name)
    return found
