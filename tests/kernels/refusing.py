"""Calls of native kernels past the Python door, and what they are asked with."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

F32, F16, I32, I8 = np.float32, np.float16, np.int32, np.int8


def zeros(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.zeros(shape, dtype)


# No weight table: a handle and a row that are not there.
NO_CHUNKS = (np.zeros(0, np.uint32), np.zeros(0, I32))


def ask(
    name: str,
    results: Any,
    buffers: Sequence[Any],
    operands: Sequence[Any] | None = None,
    *,
    table: tuple[Any, Any] = NO_CHUNKS,
    **attributes: Any,
) -> Any:
    """Calls a handler as XLA does, past the Python door.

    Args:
      name: of the handler.
      results: arrays of the shapes of its results.
      buffers: its first operands.
      operands: the others, each an array or an index of a column of the weight table; None for a handler
        that reads no tables.
      table: the handle and the row of a weight table.
      attributes: static arguments.
    """
    shaped = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), results)
    arrays = [*buffers]
    if operands is not None:
        arrays += [*table, *(each for each in operands if not isinstance(each, int))]
        columns = [each if isinstance(each, int) else -1 for each in operands]
        attributes = {"columns": np.array(columns, np.int64)} | attributes
    return jax.ffi.ffi_call(f"jaxllm_{name}", shaped)(*map(jnp.asarray, arrays), **attributes)


def refuse(part: str, *call: Any, **attributes: Any) -> None:
    # Of a graph that has run before XLA's error is a ValueError.
    errors = jax.errors.JaxRuntimeError, ValueError
    with pytest.raises(errors, match=rf"jaxllm kernels: .*{re.escape(part)}"):
        jax.block_until_ready(ask(*call, **attributes))


NOTHING = zeros(0)


def formats(bits: int = 8, group: int = 0) -> dict[str, Any]:
    return {"bits": np.int64(bits), "group": np.int64(group), "widen": True}


# 20 outputs × 70 inputs: 2 panels, 3 blocks.
DATA, SCALE = zeros(2, 3, 512, dtype=I8), zeros(32)
X, Y = zeros(4, 70), zeros(4, 20)

# No counts: all units and ranks are used, and all rows.
COUNTS = LIVE = zeros(0, dtype=I32)
# No steps: activations have scales of their own.
STEPS = zeros(0)
UNITS = dict(eps=F32(0), units=np.int64(1), units_at=np.int64(-1), shadowed=False)
