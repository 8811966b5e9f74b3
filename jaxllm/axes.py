"""Asserts ranks, shapes and dtypes of a step's arguments where the step is traced.

Shapes are written with the letters of docs/glossary.md: "B T" is an array of rank 2 whose first axis is as
long as every other B of the same step. Shapes are known at trace time, so that a compiled step has no
additional operation.
"""

from typing import Any

import numpy as np

from jaxllm.errors import ConfigError


class Axes:
    """The lengths of a step's axes, each of the first array that has it.

    Args:
      step: the step's name, for errors.
      lengths: lengths of axes that are known before.
    """

    def __init__(self, step: str, **lengths: int) -> None:
        self._step = step
        self._lengths = dict(lengths)

    def check(self, dtype: Any, shape: str, /, **arrays: Any) -> None:
        """Asserts dtype and shape of some arrays.

        Args:
          dtype: the exact dtype, or `jnp.floating` for floats of any width.
          shape: a word per axis: a letter or name, a number, or "*" for any length; a leading "..." stands
            for any axes. "" is a scalar.
          arrays: arrays by the names of the step's arguments; None is skipped.

        Raises:
          ConfigError: an array differs, in one line that names the step, the argument and the axes.
        """
        axes = shape.split()
        for name, array in arrays.items():
            if array is None:
                continue
            lengths = dict(self._lengths)
            if not (_has_dtype(array, dtype) and _fits(np.shape(array), axes, lengths)):
                raise ConfigError(self._described(name, array, axes, dtype))
            self._lengths = lengths

    def _described(self, name: str, array: Any, axes: list[str], dtype: Any) -> str:
        known = [f"{axis} = {self._lengths[axis]}" for axis in axes if axis in self._lengths]
        where = f" with {', '.join(known)}" if known else ""
        kind = "float" if dtype is np.floating else np.dtype(dtype).name
        given = getattr(array, "dtype", type(array).__name__)
        return (
            f"{self._step} takes {name} as [{', '.join(axes)}] {kind}{where}, got {list(np.shape(array))} "
            f"{given}"
        )


def _has_dtype(array: Any, dtype: Any) -> bool:
    # Imported here, because modules without JAX import this one.
    import jax.numpy as jnp

    given = getattr(array, "dtype", None)
    given = np.asarray(array).dtype if given is None else given
    kind = dtype is np.floating or dtype is np.integer
    return jnp.issubdtype(given, dtype) if kind else given == np.dtype(dtype)


def _fits(sizes: tuple[int, ...], axes: list[str], lengths: dict[str, int]) -> bool:
    """Whether an array has the axes; adds the lengths of new ones."""
    if axes[:1] == ["..."]:
        axes = axes[1:]
        sizes = sizes[len(sizes) - len(axes) :] if len(sizes) >= len(axes) else ()
    return len(sizes) == len(axes) and all(
        axis == "*" or size == (int(axis) if axis.isdigit() else lengths.setdefault(axis, size))
        for axis, size in zip(axes, sizes, strict=True)
    )
