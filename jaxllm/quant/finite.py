"""Checks weights for NaN and infinity without allocating copies."""

import numpy as np

# Exponent bits by dtype: all of them are set in infinities and NaN, and in no other value.
_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00}


def all_finite(values: np.ndarray) -> bool:
    """Whether an array has neither NaN nor infinity. True for every array that is not of floats."""
    if not values.size:
        return True
    exponent = _EXPONENTS.get(values.dtype.name)
    if exponent is not None:
        # As integers: numpy's 16-bit floats are many times slower.
        magnitudes = np.ascontiguousarray(values).view(np.uint16) & 0x7FFF
        return bool(magnitudes.max() < exponent)
    if values.dtype.kind != "f":
        return True
    # Minimum and maximum are NaN if any value is, and need no temporary array.
    return bool(np.isfinite(values.min()) and np.isfinite(values.max()))
