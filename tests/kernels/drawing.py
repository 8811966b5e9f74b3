"""Random weights in blocks, of any level and scale that a file may hold."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.quant import BlockedArray, QArray, pack_int2, pack_int4, to_blocks
from tests.kernels.switching import NATIVE, fall_back, kernels_of
from tests.quick_jit import jit

# bits, group. Fewer bits with one scale per output are nothing that `quantize` makes, but a bundle may.
WIDTHS = ((8, 0), (8, 32), (8, 64), (4, 0), (4, 32), (4, 64), (2, 0), (2, 32), (2, 64))


def weight_of(
    draw: np.random.Generator, shape: tuple[int, ...], width: tuple[int, int], axis: int
) -> BlockedArray:
    """Levels over the whole range, -128 and -8 too, and scales of either sign; placed on the device."""
    bits, group = width
    high = 1 << (bits - 1)
    levels = draw.integers(-high, high, shape, dtype=np.int8)
    if bits == 2:
        levels = 2 * levels + np.int8(1)
    scales = list(shape)
    scales[axis] = -(-shape[axis] // group) if group else 1
    scale = draw.normal(size=scales) / high
    weight = QArray(
        data={8: np.asarray, 4: pack_int4, 2: pack_int2}[bits](levels),
        scale=scale.astype(np.float16 if group else np.float32),
        bits=bits,
        group=group,
        axis=axis,
        columns=shape[-1],
    )
    return placed(to_blocks(weight))


def floats(draw: np.random.Generator, *shape: int) -> np.ndarray:
    """Activations whose rows and columns differ in size, as those of a model do."""
    spread = np.exp2(draw.integers(-3, 4, (*shape[:-1], 1))) * np.exp(draw.normal(size=shape[-1:]))
    return (draw.normal(size=shape) * spread).astype(np.float32)


def placed(weight: Any) -> Any:
    """A weight's arrays on the device."""
    return jax.tree.map(jnp.asarray, weight)


def answers(door: Callable[..., Any], *args: Any, xla: bool = False) -> dict[str, Any]:
    """What each set of native kernels gives, by name: one graph, run by all; and with `xla`, what a process
    without them gives."""
    found = {}
    if NATIVE:
        graph = jit(lambda *args: door(*args)).lower(*args).compile()
    for name in NATIVE:
        with kernels_of(name):
            found[name] = jax.tree.map(np.array, graph(*args))
    if xla:
        with pytest.MonkeyPatch.context() as patch:
            fall_back(patch)
            found["xla"] = jax.tree.map(np.array, jit(lambda *args: door(*args))(*args))
    return found
