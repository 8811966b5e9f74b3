"""Asserts ranks, shapes and dtypes of a step's arguments where the step is traced.

Shapes are written with the letters of docs/glossary.md: "B T" is an array of rank 2 whose first axis is as
long as every other B of the same step. Shapes are known at trace time, so that a compiled step has no
additional operation.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from jaxllm.errors import ConfigError

# Axes of a mesh that may divide the batch, and units such as kv heads.
BATCH_AXES, UNIT_AXES = ("data", "fsdp"), ("tensor",)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_DTYPES = {"float": np.floating, "bool": np.bool_, "float32": np.float32, "int32": np.int32}
# Axes whose lengths a config has.
_CONFIG_AXES = {"D": "hidden_size", "H": "head_dim", "V": "vocab_size", "k": "experts_per_token"}


class Axes:
    """The lengths of a step's axes, each of the first array that has it.

    Args:
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
            lengths, sizes, ends = dict(self._lengths), np.shape(array), axes
            if axes[:1] == ["..."]:
                ends = axes[1:]
                sizes = sizes[len(sizes) - len(ends) :] if len(sizes) >= len(ends) else ()
            fits = len(sizes) == len(ends) and all(
                axis == "*" or size == (int(axis) if axis.isdigit() else lengths.setdefault(axis, size))
                for axis, size in zip(ends, sizes, strict=True)
            )
            if not fits or not _has_dtype(array, dtype):
                known = [f"{axis} = {self._lengths[axis]}" for axis in axes if axis in self._lengths]
                where = f" with {', '.join(known)}" if known else ""
                kind = "float" if dtype is np.floating else np.dtype(dtype).name
                raise ConfigError(
                    f"{self._step} takes {name} as [{', '.join(axes)}] {kind}{where}, got "
                    f"{list(np.shape(array))} {getattr(array, 'dtype', type(array).__name__)}"
                )
            self._lengths = lengths


def shaped(
    **arguments: str | int,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Asserts dtypes and shapes of a step's arguments where it is traced.

    Arguments that have a method `check` assert their own. The lengths of D, H, V and k are those of the
    argument `cfg`, or of the argument `of` or of `self`, which has one.

    Args:
      arguments: by name of the argument, "int32", "bool", "float32" or "float" (of any width), and the shape
        as in `Axes.check`; or by name of an axis, its length.
    """

    def decorated(step: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        signature = inspect.signature(step)
        shapes = {name: each.split(" ", 1) for name, each in arguments.items() if isinstance(each, str)}
        lengths = {name: each for name, each in arguments.items() if isinstance(each, int)}

        @functools.wraps(step)
        def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            given = signature.bind(*args, **kwargs).arguments
            cfg = given.get("cfg", getattr(given.get("of", given.get("self")), "cfg", None))
            known = {axis: getattr(cfg, name, None) for axis, name in _CONFIG_AXES.items()}
            axes = Axes(step.__name__, **{axis: each for axis, each in known.items() if each}, **lengths)
            for name, value in given.items():
                if name in shapes:
                    dtype, *shape = shapes[name]
                    axes.check(_DTYPES[dtype], *shape or [""], **{name: value})
                elif hasattr(value, "check"):
                    value.check(axes)
            return step(*args, **kwargs)

        return checked

    return decorated


def _has_dtype(array: Any, dtype: Any) -> bool:
    # Imported here, because modules without JAX import this one.
    import jax.numpy as jnp

    given = getattr(array, "dtype", None)
    given = np.asarray(array).dtype if given is None else given
    kind = dtype is np.floating or dtype is np.integer
    return jnp.issubdtype(given, dtype) if kind else given == np.dtype(dtype)
