"""The factors of adapters in the form that native kernels read by address."""

from collections.abc import Sequence

import numpy as np

from jaxllm.models.lora import Adapter


def factors_of(
    name: str, shape: tuple[int, ...], adapters: Sequence[tuple[Adapter, float]]
) -> tuple[np.ndarray, np.ndarray]:
    """The factors of the sum of some adapters for one matrix.

    Args:
      name: of the parameter.
      shape: of the whole model's weight, `[*U, D]`.
      adapters: (adapter, scaling) pairs, of the whole model or of a sub-model, as in `jaxllm.models.lora`.

    Returns:
      `left` `[r, *U]` float32, the scaling included and zero for units that a sub-model lacks, and `right`
      `[r, D]` float32; r is the sum of the adapters' ranks, 0 without any. Zeros take no memory until they
      are read.
    """
    own = [
        (np.moveaxis(np.asarray(adapter[f"{name}.left"]), -1, 0), adapter[f"{name}.right"], scaling)
        for adapter, scaling in adapters
        if f"{name}.left" in adapter
    ]
    rank = sum(len(right) for _, right, _ in own)
    left, right = np.zeros((rank, *shape[:-1]), np.float32), np.zeros((rank, shape[-1]), np.float32)
    filled = 0
    for given, other, scaling in own:
        ranks = slice(filled, filled + len(other))
        left[(ranks, *map(slice, given.shape[1:]))] = given * np.float32(scaling)
        right[ranks] = other
        filled = ranks.stop
    return left, right
