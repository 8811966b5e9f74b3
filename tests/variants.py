"""Runs pure functions twice, operation by operation and compiled, for laws that hold in both.

`chex.variants` needs a `chex.TestCase`; this is a parameter of pytest, which fixtures and hypothesis know.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick_jit import jit


def plain(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    """The function on device arrays, one operation after the other."""

    def placed(leaf: Any) -> Any:
        # Of host arrays some operations would be numpy's own.
        return jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf

    return lambda *args, **kwargs: function(*jax.tree.map(placed, args), **jax.tree.map(placed, kwargs))


def jitted(function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """The function compiled, with the static arguments of `jax.jit`; quickly, as it runs once."""
    return jit(function, **static)


# Compiled is how all of it serves; operation by operation is a campaign.
every_variant = pytest.mark.parametrize(
    "variant", [pytest.param(plain, marks=pytest.mark.campaign), jitted], ids=["plain", "jit"]
)
