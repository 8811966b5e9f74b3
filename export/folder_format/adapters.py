"""Defines low-rank adapters as an input of programs: one array `adapter` `[N]` float32, zeros for no adapter.

It has the factors of all adapted parameters, in the order of their names: `left` `[r, *U]`, multiplied by
the scaling, then `right` `[r, D]`. Lower ranks are padded with zeros, so that every adapter, and none, is
an array of the same size, and all run on the same program. One array, because each argument costs as much
as a layer of a small model. A folder stores an adapter of the whole model as the bytes of that array;
a level's is cut from it.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxllm.config import MAX_DIMENSION, WHOLE
from jaxllm.errors import ProgramError
from jaxllm.export.folder_format.files import require_ints, require_text

ADAPTER = "adapter"
# Suffixes of the names of an input adapter's factors, after the parameter's name.
INPUT_LEFT, INPUT_RIGHT = ".input_left", ".input_right"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterInputs:
    """Adapters that programs accept.

    Attributes:
      rank: r, the maximum rank.
      shapes: shape of each adapted parameter, by level: `[*U, D]`.
      names: names of the adapters in the folder.
    """

    rank: int
    shapes: Mapping[int, Mapping[str, tuple[int, ...]]]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_ints("the rank of adapters", (self.rank,), 1, MAX_DIMENSION)
        for name in self.names:
            require_text("an adapter's name", name)
            if not _NAME.fullmatch(name):
                raise ValueError(f"an adapter's name {name!r:.80}")
        whole = self.shapes[WHOLE]
        for shapes in self.shapes.values():
            if shapes.keys() != whole.keys() or not shapes:
                raise ValueError("a level has other adapted parameters than the whole model")
            for name, shape in shapes.items():
                require_ints(f"the shape of {name!r:.80}", shape, 1, MAX_DIMENSION)
                fits = len(shape) == len(whole[name]) > 1 and shape[-1] == whole[name][-1]
                if not fits or any(few > all_ for few, all_ in zip(shape, whole[name], strict=True)):
                    raise ValueError(f"a level's {name!r:.80} is larger than the whole model's")

    @classmethod
    def from_json(cls, data: Any) -> "AdapterInputs | None":
        """The inputs as the manifest's JSON has them; None for none."""
        if data is None:
            return None
        shapes = {
            int(level): {name: tuple(shape) for name, shape in each.items()}
            for level, each in data["shapes"].items()
        }
        return cls(**{**data, "shapes": shapes, "names": tuple(data["names"])})

    def size(self, level: int) -> int:
        """Numbers of a level's adapter (N)."""
        return sum(math.prod(shape) for _, shape in self._factors(level))

    def split(self, level: int, flat: Any) -> dict[str, Any]:
        """The factors of a level's adapter `[N]` by name, of NumPy or of JAX."""
        found, at = {}, 0
        for name, shape in self._factors(level):
            count = math.prod(shape)
            found[name] = flat[at : at + count].reshape(shape)
            at += count
        return found

    def joined(self, factors: Mapping[str, np.ndarray]) -> np.ndarray:
        """The whole model's adapter `[N]`, of its factors of any rank up to `rank`; a parameter without any
        stays unchanged."""
        parts = []
        for name, shape in self._factors(WHOLE):
            part = np.zeros(shape, np.float32)
            if name in factors:
                part[: len(factors[name])] = factors[name]
            parts.append(part.reshape(-1))
        return np.concatenate(parts)

    def of_level(self, level: int, flat: np.ndarray) -> np.ndarray:
        """A level's adapter `[N]`, of the whole model's."""
        whole = self.split(WHOLE, flat)
        parts = [whole[name][tuple(map(slice, shape))] for name, shape in self._factors(level)]
        return np.concatenate([part.reshape(-1) for part in parts])

    def parsed(self, name: str, raw: bytes) -> np.ndarray:
        """The whole model's adapter of a file's bytes.

        Raises:
          ProgramError: it is of another size.
        """
        if len(raw) != self.file_bytes:
            raise ProgramError(
                f"{adapter_file(name)} has {len(raw)} bytes, not {self.file_bytes}; export the model again"
            )
        return np.frombuffer(raw, np.dtype("<f4"))

    @property
    def file_bytes(self) -> int:
        """Bytes of an adapter's file."""
        return 4 * self.size(WHOLE)

    def _factors(self, level: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The names and shapes of a level's factors, in the order of the array."""
        for name, shape in sorted(self.shapes[level].items()):
            yield f"{name}{INPUT_LEFT}", (self.rank, *shape[:-1])
            yield f"{name}{INPUT_RIGHT}", (self.rank, shape[-1])


def adapter_file(name: str) -> str:
    """The file of an adapter in a folder of programs."""
    return f"adapter_{name}.f32"
