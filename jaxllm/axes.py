"""Asserts ranks, shapes and dtypes of a step's arguments where the step is traced.

Shapes are written with the letters of docs/glossary.md: "B T" is an array of rank 2 whose first axis is as
long as every other B of the same step. Shapes are known before anything runs, so that a compiled step has no
operation more.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.errors import ConfigError


class Axes:
    """The lengths of a step's axes, each learned from the first array that has it.

    Args:
      step: the step's name, for errors.
      lengths: of axes that are known before.
    """

    def __init__(self, step: str, **lengths: int) -> None:
        self._step = step
        self._lengths: dict[str, int | None] = {**lengths}

    def check(self, dtype: Any, shape: str, /, **arrays: Any) -> None:
        """Asserts dtype and shape of some arrays.

        Args:
          dtype: the very dtype, or `jnp.floating` for floats of any width.
          shape: an axis per word: a letter or name, a number, or "*" for an axis of any length; "..." in
            front stands for any axes. "" is a scalar.
          arrays: by the names of the step's arguments; None is not there.

        Raises:
          ConfigError: an array differs, in one line that names the step, the argument and the axes.
        """
        # A step that is read from disk is not traced, and need not wait for an import of 0.1 s.
        import chex

        axes = shape.split()
        named = {axis for axis in axes if axis.isalnum() and not axis.isdigit()}
        for name, array in arrays.items():
            if array is None:
                continue
            # From the end, because "..." stands in front only.
            found = dict(zip(reversed(axes), reversed(np.shape(array)), strict=False))
            lengths = {axis: found.get(axis) for axis in named} | self._lengths
            try:
                chex.assert_shape(array, tuple(_expected(axis, lengths) for axis in axes))
                # The dtype alone: chex 0.1.90 converts arrays to dtypes, which JAX deprecates.
                chex.assert_type(getattr(array, "dtype", array), dtype)
            except AssertionError:
                raise ConfigError(self._told(name, array, axes, dtype)) from None
            self._lengths = lengths

    def _told(self, name: str, array: Any, axes: list[str], dtype: Any) -> str:
        known = [f"{axis} = {self._lengths[axis]}" for axis in axes if axis in self._lengths]
        where = f" with {', '.join(known)}" if known else ""
        kind = "float" if dtype is np.floating else np.dtype(dtype).name
        given = getattr(array, "dtype", type(array).__name__)
        return (
            f"{self._step} takes {name} as [{', '.join(axes)}] {kind}{where}, got {list(np.shape(array))} "
            f"{given}"
        )


def _expected(axis: str, lengths: Mapping[str, int | None]) -> Any:
    """What `chex.assert_shape` takes for an axis: None for one of any length."""
    if axis == "...":
        return ...
    return int(axis) if axis.isdigit() else lengths.get(axis)
