"""Parts of elastic bundles: the ladder, the order of units, and each level's recovery adapter."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.bundle.layout import Part
from jaxllm.bundle.reader import Bundle
from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.elastic.units import UnitOrder, check_order, order_arrays, order_of_arrays
from jaxllm.errors import BundleError, ConfigError
from jaxllm.models.lora import TARGETS, adapter_shapes, parameters_of, target_of
from jaxllm.models.parameters import param_specs

_LADDER = "elastic"
_LARGEST_SCALING = 1e6


@dataclasses.dataclass(frozen=True)
class Recovery:
    """A low-rank adapter of a level, as `jaxllm.models.lora` has it, shaped as the sub-model is."""

    adapter: Mapping[str, np.ndarray]
    scaling: float


def elastic_parts(
    ladder: Ladder,
    recoveries: Mapping[int, Recovery] | None = None,
    *,
    order: UnitOrder | None = None,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Part]:
    """The parts of an elastic bundle, for `write_bundle`.

    Adapters are stored as float16, which is finer than the quantized weights that they correct; an array with
    numbers beyond float16's range keeps its dtype.

    Args:
      ladder: the levels; the units of the bundle's weights must be in order.
      recoveries: adapters by level.
      order: order of the weights' units in terms of the original model's units; None if they were not
        reordered.
      facts: further facts, for display.
    """
    arrays = {} if order is None else order_arrays(order)
    parts = {_LADDER: Part({**(facts or {}), "ladder": ladder.to_json()}, arrays)}
    for level, each in (recoveries or {}).items():
        halved = {name: _halved(value) for name, value in each.adapter.items()}
        parts[_recovery(level)] = Part({"scaling": each.scaling}, halved)
    return parts


def read_ladder(bundle: Bundle) -> Ladder | None:
    """The levels of a bundle; None if it has only the whole model.

    Raises:
      BundleError: the levels are malformed, or belong to another model.
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


def read_order(bundle: Bundle) -> UnitOrder | None:
    """The order in which units were put when the bundle was made; None if they were not reordered.

    Raises:
      BundleError: the order is corrupt, or belongs to another model.
    """
    part = bundle.load_part(_LADDER)
    if part is None or not part.arrays:
        return None
    try:
        order = order_of_arrays(bundle.cfg, part.arrays)
        check_order(bundle.cfg, order)
    except (KeyError, ConfigError) as error:
        raise BundleError(f"{bundle.path}: its order of units is malformed ({error})") from error
    return order


def read_recovery(bundle: Bundle, level: int) -> Recovery | None:
    """The adapter of a level in its stored precision; None if the level has none.

    Raises:
      BundleError: the adapter is corrupt or malformed.
    """
    part = bundle.load_part(_recovery(level))
    if part is None:
        return None
    scaling = part.facts.get("scaling")
    if (
        not isinstance(scaling, int | float)
        or isinstance(scaling, bool)
        or not abs(scaling) <= _LARGEST_SCALING
    ):
        raise BundleError(f"{bundle.path}: the adapter of level {level} has scaling {scaling!r:.80}")
    try:
        _check_adapter(require_level(bundle, level), part.arrays)
    except ConfigError as error:
        raise BundleError(f"{bundle.path}: the adapter of level {level} is malformed: {error}") from error
    return Recovery(part.arrays, float(scaling))


def release_recovery(bundle: Bundle, level: int) -> None:
    """Releases the memory of a level's adapter (see `Bundle.release_part`)."""
    bundle.release_part(_recovery(level))


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


def _check_adapter(cfg: ModelConfig, adapter: Mapping[str, np.ndarray]) -> None:
    """Raises ConfigError unless the arrays are an adapter of this sub-model."""
    for name in parameters_of(adapter):
        if name not in param_specs(cfg) or target_of(name) not in TARGETS:
            raise ConfigError(f"it changes {name}, which cannot be adapted here")
        left, right = adapter[f"{name}.left"], adapter[f"{name}.right"]
        shapes = adapter_shapes(cfg, name, right.shape[-2] if right.ndim > 1 else 0)
        if (left.shape, right.shape) != shapes:
            raise ConfigError(
                f"its change to {name} is {list(left.shape)} times {list(right.shape)}, which is of another "
                "model or level"
            )
        if not all(part.dtype.kind == "f" and np.isfinite(part).all() for part in (left, right)):
            raise ConfigError(f"its change to {name} is not made of finite floats")


def _halved(value: np.ndarray) -> np.ndarray:
    """An array as float16, unless that would overflow."""
    with np.errstate(over="ignore"):
        half = np.asarray(value).astype(np.float16)
    return half if value.dtype.kind == "f" and np.isfinite(half).all() else value


def _recovery(level: int) -> str:
    return f"recovery.{level}"
