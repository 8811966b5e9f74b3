"""Declares the parts of a manifest, and reads any of them from JSON: levels, tiny LM, adapters, stages.

A manifest may come from anywhere: every value is checked against its field's type and bounds.

Adapters are an input of programs: one array `adapter` `[N]` float32, zeros for no adapter. It has the
factors of all adapted parameters, in the order of their names: `left` `[r, *U]`, multiplied by the scaling,
then `right` `[r, D]`. Lower ranks are padded with zeros, so that every adapter, and none, is an array of the
same size, and all run on the same program. One array, because each argument costs as much as a layer of a
small model. A folder stores an adapter of the whole model as the bytes of that array; a level's is cut from
it.

A program of the tiny LM accepts `tokens` `[1, T]` int32 and `mask` `[1, T]` bool, True = a mark or a valid
token. It returns the logits `keep` `[1, T]` of keeping each token, and those of the decision, `model` `[1,
levels]` and `prompt` `[1, prompt ratios]`, all float32 (see `jaxllm.models.tiny_lm`).

Stages of prefill are programs of their own, for two processors (see `jaxllm.int8_prefill.schedule`):

    stages_integer.tflite    for the processor that computes in integers
    stages_float.tflite      for that of floats: the embedding, attention, and the shadow of outliers

Each is a stage of one layer and of one chunk length, `layer_0_attend_128`; `embed_128` makes the first
layer's input. Caches are of the whole context. `jaxllm.export.stages` has names and shapes.
"""

import dataclasses
import functools
import math
import re
import types
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Union, get_args, get_origin

import numpy as np

from jaxllm.config import FULL_LEVEL, MAX_DIMENSION, ModelConfig
from jaxllm.elastic.compression import MARKS
from jaxllm.elastic.slo import marks
from jaxllm.errors import ProgramError
from jaxllm.int8_prefill.schedule import Processor, Stage
from jaxllm.options import check_options, option

ADAPTER = "adapter"
# Suffixes of the names of an adapter's factors, after the parameter's name: merged, and of an input adapter.
LEFT, RIGHT = ".left", ".right"
INPUT_LEFT, INPUT_RIGHT = ".input_left", ".input_right"
KEEP, MODEL, PROMPT = "keep", "model", "prompt"
STAGE_FILES: Mapping[Processor, str] = MappingProxyType(
    {"integer": "stages_integer.tflite", "float": "stages_float.tflite"}
)
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def read_part(kind: Any, value: Any) -> Any:
    """A value of a field of the type `kind` from JSON: dataclasses from objects, tuples from lists, keys of
    objects by their type.

    Raises:
      ConfigError, LookupError, TypeError, ValueError: it has another form.
    """
    if kind in (str, int):
        return value
    if get_origin(kind) in (Union, types.UnionType):
        return None if value is None else read_part(get_args(kind)[0], value)
    if get_origin(kind) is tuple:
        return tuple(read_part(get_args(kind)[0], each) for each in value)
    if get_origin(kind) is Mapping:
        key, own = get_args(kind)
        return {key(name): read_part(own, each) for name, each in value.items()}
    if kind is ModelConfig:
        return kind.from_json(value)
    if not dataclasses.is_dataclass(kind):
        return value
    of_field = _field_types(kind)
    return kind(**{name: read_part(of_field[name], each) for name, each in value.items()})  # pyright: ignore


@functools.cache
def _field_types(kind: Any) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(kind)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """A weight argument of a level's programs: a stored array, and the shape of its leading units."""

    stored: str
    shape: tuple[int, ...] = option(low=1, high=MAX_DIMENSION, entries=1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldenAnswer:
    """What a level answered greedily where its programs were made (see `jaxllm.export.programs.golden`)."""

    level: int
    prompt: tuple[int, ...] = option(low=0, high=MAX_DIMENSION, entries=1)
    tokens: tuple[int, ...] = option(low=0, high=MAX_DIMENSION, entries=1)

    def __post_init__(self) -> None:
        check_options(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramLevel:
    """A level: the sub-model, and by name the weight arguments of its programs (none if weights are constants
    in them)."""

    cfg: ModelConfig
    weights: Mapping[str, Argument]

    def views(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The weight arguments of the level's programs by name, as views of the stored arrays.

        Raises:
          ProgramError: an array is missing, or has another shape.
        """
        found = {}
        for name, each in self.weights.items():
            whole = arrays.get(each.stored, np.zeros(0))
            if whole.shape[1:] != each.shape[1:] or len(whole) < each.shape[0]:
                raise ProgramError(
                    f"{name} must be the beginning {list(each.shape)} of {each.stored}, which is missing or "
                    f"another ({list(whole.shape)}); export the model again"
                )
            found[name] = whole[: each.shape[0]]
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterInputs:
    """Adapters that programs accept.

    Attributes:
      shapes: shape of each adapted parameter, by level: `[*U, D]`.
    """

    rank: int = option(low=1, high=MAX_DIMENSION)
    shapes: Mapping[int, Mapping[str, tuple[int, ...]]]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_options(self)
        if unusable := [name for name in self.names if not _ADAPTER_NAME.fullmatch(name)]:
            raise ValueError(f"an adapter's name {unusable[0]!r:.80}")
        whole = self.shapes[FULL_LEVEL]
        for shapes in self.shapes.values():
            if shapes.keys() != whole.keys() or not shapes:
                raise ValueError("a level has other adapted parameters than the whole model")
            for name, shape in shapes.items():
                Argument(stored=name, shape=shape)
                fits = len(shape) == len(whole[name]) > 1 and shape[-1] == whole[name][-1]
                if not fits or any(few > all_ for few, all_ in zip(shape, whole[name], strict=True)):
                    raise ValueError(f"a level's {name!r:.80} is larger than the whole model's")

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
        for name, shape in self._factors(FULL_LEVEL):
            part = np.zeros(shape, np.float32)
            if name in factors:
                part[: len(factors[name])] = factors[name]
            parts.append(part.reshape(-1))
        return np.concatenate(parts)

    def of_level(self, level: int, flat: np.ndarray) -> np.ndarray:
        """A level's adapter `[N]`, of the whole model's."""
        whole = self.split(FULL_LEVEL, flat)
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
        return 4 * self.size(FULL_LEVEL)

    def _factors(self, level: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The names and shapes of a level's factors, in the order of the array."""
        for name, shape in sorted(self.shapes[level].items()):
            yield f"{name}{INPUT_LEFT}", (self.rank, *shape[:-1])
            yield f"{name}{INPUT_RIGHT}", (self.rank, shape[-1])


def adapter_file(name: str) -> str:
    """The file of an adapter in a folder of programs."""
    return f"adapter_{name}.f32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyLmFacts:
    """Facts about a tiny LM for a loop.

    Attributes:
      levels: per class of the model, its level in percent, ascending.
      prompt_ratios: per class of the prompt, its share in (0, 1], ascending.
      mark_ids: token ids of `jaxllm.elastic.slo.marks()`.
      row_tokens: tokens of a row in training and in use.
      own_tokenizer: whether it has a tokenizer of its own, `TINY_TOKENIZER`.
    """

    levels: tuple[int, ...] = option(low=1, high=FULL_LEVEL, entries=1, ascending=True)
    prompt_ratios: tuple[float, ...] = option(above=0, high=1, entries=1, ascending=True)
    mark_ids: tuple[int, ...] = option(low=0, high=MAX_DIMENSION)
    row_tokens: int = option(low=MARKS + 1, high=MAX_DIMENSION)
    own_tokenizer: bool = False

    def __post_init__(self) -> None:
        check_options(self)
        if not len(self.mark_ids) == len(set(self.mark_ids)) == len(marks()):
            raise ValueError(f"the tiny LM has not {len(marks())} different marks")


EMBED = "embed"
_STAGE_INPUTS: Mapping[Stage, tuple[str, ...]] = {
    "project": ("x",),
    "project_shadow": ("x",),
    "attend": ("q", "k", "v", "input_pos", "keys", "values"),
    "finish": ("x", "out"),
    "widen": ("x", "out", "added"),
    "widen_shadow": ("x",),
    "narrow": ("x", "gate", "up", "gate_shadow", "up_shadow"),
    "narrow_shadow": ("x", "mixed", "hidden"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageFacts:
    """Facts about stage programs for a loop; they are of the whole model.

    Attributes:
      shadowed: per layer, whether it has a shadow.
    """

    chunk_tokens: tuple[int, ...] = option(low=1, high=MAX_DIMENSION, entries=1, ascending=True)
    shadowed: tuple[bool, ...]

    def __post_init__(self) -> None:
        check_options(self)


def stage_name(stage: Stage, layer: int, tokens: int) -> str:
    """The name of a stage's program."""
    return f"layer_{layer}_{stage}_{tokens}"


def stage_inputs(stage: Stage, *, shadowed: bool, gated: bool) -> tuple[str, ...]:
    """Returns the names of a stage's inputs."""
    names = _STAGE_INPUTS[stage]
    if stage == "attend" and shadowed:
        names = (*names, "q_shadow", "k_shadow", "v_shadow")
    return tuple(each for each in names if gated or not each.startswith("gate"))
