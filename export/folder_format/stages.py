"""Defines the stage programs of a folder: layers cut where processors alternate, in a model for each
processor.

    stages_integer.tflite     products of int8 with int8, with static steps
    stages_float.tflite       embedding, attention, and the shadow of outliers

A program is a stage of one layer and of one chunk length, `layer_0_attend_128`; `embed_128` makes the first
layer's input. Caches are of the whole context. `jaxllm.export.steps.exported_stages` has names and shapes.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jaxllm.config import MAX_DIMENSION
from jaxllm.export.folder_format.files import require_ints
from jaxllm.int8_prefill.schedule import Processor, Stage

STAGE_FILES: Mapping[Processor, str] = MappingProxyType(
    {"integer": "stages_integer.tflite", "float": "stages_float.tflite"}
)
EMBED = "embed"
_PLAIN: Mapping[Stage, tuple[str, ...]] = {
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
      chunk_tokens: lengths of chunks, ascending.
      shadowed: per layer, whether it has a shadow.
    """

    chunk_tokens: tuple[int, ...]
    shadowed: tuple[bool, ...]

    def __post_init__(self) -> None:
        require_ints("a chunk of stages", self.chunk_tokens, 1, MAX_DIMENSION)
        if not self.chunk_tokens or list(self.chunk_tokens) != sorted(set(self.chunk_tokens)):
            raise ValueError("the chunks of stages are not ascending")
        if not all(type(each) is bool for each in self.shadowed):
            raise ValueError("whether a layer has a shadow is yes or no")

    @classmethod
    def from_json(cls, data: Any) -> "StageFacts | None":
        """The facts as the manifest's JSON has them; None for no stages."""
        return None if data is None else cls(**{name: tuple(each) for name, each in data.items()})


def stage_name(stage: Stage, layer: int, tokens: int) -> str:
    """The name of a stage's program."""
    return f"layer_{layer}_{stage}_{tokens}"


def stage_inputs(stage: Stage, *, shadowed: bool, gated: bool) -> tuple[str, ...]:
    """Returns the names of a stage's inputs."""
    names = _PLAIN[stage]
    if stage == "attend" and shadowed:
        names = (*names, "q_shadow", "k_shadow", "v_shadow")
    return tuple(each for each in names if gated or not each.startswith("gate"))
