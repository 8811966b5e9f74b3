"""Calls of native kernels past the Python door, and what they are asked with."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

F32, F16, I32, I8 = np.float32, np.float16, np.int32, np.int8


def zeros(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.zeros(shape, dtype)


def ask(name: str, results: Any, operands: list[Any], **attributes: Any) -> Any:
    """Calls a handler as XLA does, past the Python door."""
    shaped = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), results)
    return jax.ffi.ffi_call(f"jaxllm_{name}", shaped)(*map(jnp.asarray, operands), **attributes)


def refuse(part: str, *call: Any, **attributes: Any) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"jaxllm kernels: .*{re.escape(part)}"):
        jax.block_until_ready(ask(*call, **attributes))


NOTHING = zeros(0)
# What the messages say.
FIT, ROW = "a weight's shape does not fit", "at least one row"


def formats(bits: int = 8, group: int = 0) -> dict[str, Any]:
    return {"bits": np.int64(bits), "group": np.int64(group), "widen": True}


# 20 outputs × 70 inputs: 2 panels, 3 blocks.
DATA, SCALE = zeros(2, 3, 512, dtype=I8), zeros(32)
NARROW, GROUPED = zeros(2, 3, 256, dtype=np.uint8), zeros(2, 3, 16, dtype=F16)
X, Y = zeros(4, 70), zeros(4, 20)
UP = [DATA, SCALE]

# No counts: all units and ranks are used.
COUNTS = zeros(0, dtype=I32)
# No steps: activations have scales of their own.
STEPS = zeros(0)
USED = dict(units_at=np.int64(-1), rank_at=np.int64(-1))


def placed(*places: int) -> dict[str, Any]:
    """Of each weight's adapter, where its left and its right side begin, and its rank."""
    return {"adapters": np.array(places, np.int64)}


def unadapted(operands: list[Any], at: int = 2) -> list[Any]:
    """Operands with no counts from `at` on, and no adapter beside each weight's data and scales."""
    weights = [operands[i : i + 2] for i in range(at, len(operands), 2)]
    return [
        *operands[:at],
        COUNTS,
        STEPS,
        *(part for weight in weights for part in (*weight, NOTHING, NOTHING)),
    ]
