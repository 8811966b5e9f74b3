"""The levels of an elastic bundle: its ladder, and the recovery adapter of each level."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.bundle.layout import Part
from jaxllm.bundle.reader import Bundle
from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.errors import BundleError, ConfigError

_LADDER = "elastic"


@dataclasses.dataclass(frozen=True)
class Recovery:
    """A low-rank adapter that goes with a level: as `jaxllm.lora` has it, shaped as the sub-model is."""

    adapter: Mapping[str, np.ndarray]
    scaling: float


def elastic_parts(
    ladder: Ladder, recoveries: Mapping[int, Recovery] | None = None, facts: Mapping[str, Any] | None = None
) -> dict[str, Part]:
    """What makes a bundle elastic, for `write_bundle`.

    Args:
      ladder: the levels; the units of the bundle's weights must be in order.
      recoveries: adapters by level.
      facts: further facts, for people.
    """
    parts = {_LADDER: Part({**(facts or {}), "ladder": ladder.to_json()})}
    for level, each in (recoveries or {}).items():
        parts[_recovery(level)] = Part({"scaling": each.scaling}, each.adapter)
    return parts


def read_ladder(bundle: Bundle) -> Ladder | None:
    """The levels of a bundle; None if it has but the whole model.

    Raises:
      BundleError: they are malformed or of another model.
    """
    part = bundle.layout.parts.get(_LADDER)
    if part is None:
        return None
    try:
        ladder = Ladder.from_json(part.facts["ladder"])
        sub_config(bundle.cfg, ladder, ladder.levels[0])
    except (KeyError, ConfigError) as error:
        raise BundleError(f"{bundle.path}: its levels are malformed ({error}); prepare it again") from error
    return ladder


def read_recovery(bundle: Bundle, level: int) -> Recovery | None:
    """The adapter of a level; None where it has none.

    Raises:
      BundleError: it is corrupt or malformed.
    """
    part = bundle.load_part(_recovery(level))
    if part is None:
        return None
    scaling = part.facts.get("scaling")
    if not isinstance(scaling, int | float) or not math.isfinite(scaling):
        raise BundleError(f"{bundle.path}: the adapter of level {level} has scaling {scaling!r:.80}")
    return Recovery(part.arrays, float(scaling))


def require_level(bundle: Bundle, level: int) -> ModelConfig:
    """The sub-model of a level.

    Raises:
      ConfigError: the bundle has no such level.
      BundleError: see `read_ladder`.
    """
    ladder = read_ladder(bundle)
    if ladder is None:
        raise ConfigError(
            f"{bundle.path} has no levels, only the whole model; make an elastic bundle with "
            "`jaxllm elasticize`"
        )
    return sub_config(bundle.cfg, ladder, level)


def _recovery(level: int) -> str:
    return f"recovery.{level}"
