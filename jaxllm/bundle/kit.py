"""A kit: what makes a published checkpoint elastic without training it again, and without its weights.

It holds the order of units, the levels, each level's adapter and the tiny LM, as the parts of an elastic
bundle, in one safetensors file of a few megabytes. Adapters have 8 bits, with a scale for each rank: they
correct quantized weights, and their own rounding is far below that. The tiny LM's weights have 16. A sample
of the checkpoint's numbers shows whether a kit is for it: other widths of the same weights, and weights
trained a little further, fit.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.bundle.layout import Part
from jaxllm.config import ModelConfig
from jaxllm.elastic.units import UnitOrder, check_order, order_of_arrays, reorder
from jaxllm.errors import CheckpointError, ConfigError
from jaxllm.files.atomic import atomic_file
from jaxllm.files.input_files import open_regular

SUFFIX = ".kit"
_FORMAT = "jaxllm kit 1"
_MAX_BYTES = 256 << 20
# Numbers sampled from each parameter.
_SAMPLES = 64
# Largest distance of the samples, relative to their size: rounding to 4 bits moves them by 0.1 or less, and
# other weights of the same shapes by more than 1.
_MOST_DISTANCE = 0.25
_SAMPLE, _LEVELS = "sample", "levels"
_ADAPTERS = "recovery."
_TINY_LM = "tiny-lm"


@dataclasses.dataclass(frozen=True, eq=False)
class Kit:
    """What makes a checkpoint elastic.

    Attributes:
      path: the file, for messages.
      parts: the parts of the elastic bundle, by name.
      sample: numbers of each parameter, by its name `[n]` float32, at evenly spaced places.
    """

    path: Path
    cfg: ModelConfig
    parts: Mapping[str, Part]
    sample: Mapping[str, np.ndarray]

    @property
    def order(self) -> UnitOrder:
        """Order of units.

        Raises:
          CheckpointError: it is missing, or not of this model.
        """
        try:
            order = order_of_arrays(self.cfg, self.parts["elastic"].arrays)
            check_order(self.cfg, order)
        except (KeyError, ConfigError) as error:
            raise CheckpointError(f"{self.path}: its order of units is malformed ({error})") from error
        return order

    def ordered(
        self, cfg: ModelConfig, params: Iterable[tuple[str, Any]]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yields a checkpoint's float arrays with their units in order.

        Raises:
          CheckpointError: the checkpoint is another model; that its numbers differ is known after the last.
        """
        if cfg != self.cfg:
            named = [each.name for each in dataclasses.fields(cfg)]
            other = next(name for name in named if getattr(cfg, name) != getattr(self.cfg, name))
            raise CheckpointError(
                f"{self.path} is for another model: its {other} is {getattr(self.cfg, other)!r:.80}, and the "
                f"checkpoint's {getattr(cfg, other)!r:.80}"
            )
        distance = size = 0.0

        def compared() -> Iterator[tuple[str, np.ndarray]]:
            nonlocal distance, size
            for name, value in params:
                value, wanted = np.asarray(value), self.sample[name]
                distance += float(np.square(_sampled(value) - wanted).sum())
                size += float(np.square(wanted).sum())
                yield name, value

        yield from reorder(cfg, compared(), self.order)
        if not distance <= _MOST_DISTANCE**2 * size:
            raise CheckpointError(
                f"{self.path} is for other weights of this shape: a sample of them differs by "
                f"{np.sqrt(distance / max(size, 1e-30)):.0%}; take the checkpoint that it was made of"
            )


def find_kit(kit: str | os.PathLike[str]) -> Path:
    """The path of a kit: a packaged one by its name, unless a file has that name.

    Raises:
      CheckpointError: there is no such file, and no such packaged kit.
    """
    assets = Path(__file__).parents[1] / "assets"
    path = Path(kit) if Path(kit).is_file() else assets / f"{Path(kit).name}{SUFFIX}"
    if not path.is_file():
        names = ", ".join(sorted(each.stem for each in assets.glob(f"*{SUFFIX}"))) or "none"
        raise CheckpointError(f"there is no kit {kit}; give a file, or a packaged kit's name: {names}")
    return path


def write_kit(
    path: str | os.PathLike[str],
    cfg: ModelConfig,
    params: Iterable[tuple[str, np.ndarray]],
    parts: Mapping[str, Part],
) -> None:
    """Writes a kit, atomically.

    Args:
      params: the original checkpoint's float parameters, in their own order of units.
      parts: parts of the elastic bundle that was made of it.
    """
    from safetensors.numpy import save

    arrays = {f"{_SAMPLE}/{name}": _sampled(np.asarray(value)) for name, value in params}
    for part, each in parts.items():
        for name, value in each.arrays.items():
            if part.startswith(_ADAPTERS):
                wide = np.asarray(value, np.float32)
                # A rank is the last axis of the left factor, and the last but one of the right.
                axes = tuple(range(wide.ndim - 1)) if name.endswith(".left") else (wide.ndim - 1,)
                scale = np.maximum(np.abs(wide).max(axes, keepdims=True), 1e-30) / np.float32(127)
                arrays[f"{part}/{name}/{_LEVELS}"] = np.rint(wide / scale).astype(np.int8)
                arrays[f"{part}/{name}/scale"] = scale.astype(np.float32)
            else:
                half = part == _TINY_LM and value.dtype == np.float32
                arrays[f"{part}/{name}"] = np.ascontiguousarray(value, np.float16 if half else value.dtype)
    facts = {part: each.facts for part, each in parts.items()}
    metadata = {"format": _FORMAT, "model": json.dumps(cfg.to_json()), "facts": json.dumps(facts)}
    with atomic_file(Path(path)) as file:
        file.write(save(arrays, metadata))


def read_kit(path: str | os.PathLike[str]) -> Kit:
    """Reads a kit.

    Raises:
      CheckpointError: the file is missing, too large, or no kit.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    path = Path(path)
    try:
        with open_regular(path) as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); check the path") from error
    try:
        if len(raw) > _MAX_BYTES:
            raise ConfigError(f"it is larger than {_MAX_BYTES >> 20} MiB")
        arrays = load(raw)
        length = int.from_bytes(raw[:8], "little")
        metadata = json.loads(raw[8 : 8 + length])["__metadata__"]
        if metadata["format"] != _FORMAT:
            raise ConfigError(f"its format is {metadata['format']!r:.80}")
        cfg = ModelConfig.from_json(json.loads(metadata["model"]))
        parts = {part: Part(facts, {}) for part, facts in json.loads(metadata["facts"]).items()}
        own: dict[str, dict[str, np.ndarray]] = {part: {} for part in (*parts, _SAMPLE)}
        for name, value in arrays.items():
            part, _, rest = name.partition("/")
            if rest.endswith(f"/{_LEVELS}"):
                rest = rest.removesuffix(f"/{_LEVELS}")
                value = (value * arrays[f"{part}/{rest}/scale"]).astype(np.float16)
            elif part.startswith(_ADAPTERS):
                continue
            elif part == _TINY_LM and value.dtype == np.float16:
                value = value.astype(np.float32)
            own[part][rest] = value
        sample = own.pop(_SAMPLE)
        return Kit(path, cfg, {part: Part(parts[part].facts, own[part]) for part in parts}, sample)
    except (ConfigError, SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no kit ({error!s:.200}); `jaxllm elasticize --kit` makes one"
        ) from error


def _sampled(value: np.ndarray) -> np.ndarray:
    """Numbers of a parameter at evenly spaced places, float32."""
    flat = value.reshape(-1)
    return flat[np.linspace(0, flat.size - 1, min(flat.size, _SAMPLES)).astype(np.int64)].astype(np.float32)
