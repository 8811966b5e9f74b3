"""Formats of the parts of a bundle: what later commands add to a model, as JSON facts and arrays.

A part is declared once, as a `PartFormat`: its name, the words of its messages, and the function that makes
its value from checked fields. A part with anything missing, malformed or unknown is refused.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np

from jaxllm.bundle.layout import Part
from jaxllm.bundle.reader import Bundle
from jaxllm.errors import BundleError, CheckpointError, ConfigError

FLOATS = ("float32", "bfloat16", "float16")
Value = TypeVar("Value")
# The largest number of an array that has bounds.
_HIGH = 1e30


class Fields:
    """The facts of a part and its arrays, which are checked as they are taken.

    Attributes:
      facts: JSON values, unchecked.
    """

    def __init__(self, part: Part) -> None:
        self.facts: Mapping[str, Any] = part.facts
        self._arrays = dict(part.arrays)

    def array(self, name: str, dtype: str, shape: tuple[int, ...], *, low: float | None = None) -> np.ndarray:
        """Takes the array `name` of a dtype and shape, whose numbers are finite, or in [low, 1e30].

        Raises:
          KeyError: there is no such array.
          ConfigError: it is another one.
        """
        found = self._arrays.pop(name)
        if found.shape != shape or found.dtype != dtype:
            raise ConfigError(
                f"{name} must be {dtype} {list(shape)}, got {found.dtype.name} {list(found.shape)}"
            )
        # The comparison is false for NaN.
        if low is not None and not ((found >= low) & (found <= _HIGH)).all():
            raise ConfigError(f"{name} are not all in [{low:g}, {_HIGH:g}]")
        if low is None and not np.isfinite(found).all():
            raise ConfigError(f"{name} holds NaN or infinity")
        return found

    def take(self, name: str) -> np.ndarray | None:
        """Takes the array `name`, unchecked; None if there is none."""
        return self._arrays.pop(name, None)

    def rest(self) -> dict[str, np.ndarray]:
        """Takes all other arrays, unchecked."""
        rest, self._arrays = self._arrays, {}
        return rest


@dataclasses.dataclass(frozen=True)
class PartFormat(Generic[Value]):
    """One kind of part.

    Attributes:
      name: name of the part.
      subject: its contents, for messages: "its SUBJECT is malformed".
      remedy: what makes it again, for messages.
      make: function of the bundle and the part's fields that returns its value; its errors mean that the part
        is malformed.
      reads_arrays: whether `make` uses arrays; without, the bytes of the part are not read.
    """

    name: str
    subject: str
    remedy: str
    make: Callable[[Bundle, Fields], Value]
    reads_arrays: bool = True

    def read(self, bundle: Bundle) -> Value | None:
        """The part's value, its arrays views of the file; None if the bundle has no such part.

        Raises:
          BundleError: the part is corrupt, malformed, or belongs to another model.
        """
        if not self.is_in(bundle):
            return None
        part = bundle.load_part(self.name) if self.reads_arrays else None
        fields = Fields(Part(self.facts(bundle)) if part is None else part)
        try:
            value = self.make(bundle, fields)
            if others := fields.rest():
                raise ConfigError(f"it holds {min(others)}, which nothing reads")
        except BundleError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, CheckpointError) as error:
            raise BundleError(
                f"{bundle.path}: its {self.subject} is malformed ({error!s:.300}); {self.remedy}"
            ) from error
        return value

    def is_in(self, bundle: Bundle) -> bool:
        """Whether a bundle has such a part."""
        return self.name in bundle.layout.parts

    def facts(self, bundle: Bundle) -> dict[str, Any]:
        """The part's facts, unchecked, for display; empty if the bundle has no such part."""
        part = bundle.layout.parts.get(self.name)
        return {} if part is None else dict(part.facts)

    def release(self, bundle: Bundle) -> None:
        """Releases the memory of the part's pages (see `Bundle.release_part`)."""
        bundle.release_part(self.name)


def require_parameters(shapes: Mapping[str, tuple[int, ...]], params: Mapping[str, np.ndarray]) -> None:
    """Raises ConfigError unless the parameters have exactly these names, these shapes, and are floats."""
    if wrong := params.keys() ^ shapes.keys():
        raise ConfigError(f"the parameters and the config disagree on {min(wrong)}")
    for name, shape in shapes.items():
        value = params[name]
        if tuple(value.shape) != shape or value.dtype.name not in FLOATS:
            raise ConfigError(
                f"parameter {name} must be floats of shape {list(shape)}, got {value.dtype.name} "
                f"{list(value.shape)}"
            )
