"""Whether weights are numbers that can be computed with."""

import numpy as np

# By type: the bits of the exponent, which are all set in infinities and NaN alone.
_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00}


def all_finite(values: np.ndarray) -> bool:
    """Whether an array of floats holds neither NaN nor infinity; of other types, always."""
    if not values.size:
        return True
    exponent = _EXPONENTS.get(values.dtype.name)
    if exponent is not None:
        # As integers: numpy takes many times longer for floats of 16 bits.
        magnitudes = np.ascontiguousarray(values).view(np.uint16) & 0x7FFF
        return bool(magnitudes.max() < exponent)
    if values.dtype.kind != "f":
        return True
    # Both are NaN where any value is; nothing is allocated.
    return bool(np.isfinite(values.min()) and np.isfinite(values.max()))
