"""Parts of elastic bundles: the ladder, the order of units, and each level's recovery adapter."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxllm.bundle.layout import Part
from jaxllm.bundle.reader import Bundle, Fields, PartFormat
from jaxllm.config import ModelConfig
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.errors import ConfigError
from jaxllm.models.lora import TARGETS, adapter_shapes, parameters_of, target_of
from jaxllm.models.parameters import param_specs

if TYPE_CHECKING:
    from jaxllm.elastic.units import UnitOrder

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
    order: "UnitOrder | None" = None,
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
    from jaxllm.elastic.units import order_arrays

    arrays = {} if order is None else order_arrays(order)
    parts = {_LADDER.name: Part({**(facts or {}), "ladder": ladder.to_json()}, arrays)}
    for level, each in (recoveries or {}).items():
        halved = {}
        for name, value in each.adapter.items():
            with np.errstate(over="ignore"):
                half = np.asarray(value).astype(np.float16)
            halved[name] = half if value.dtype.kind == "f" and np.isfinite(half).all() else value
        parts[_recovery(level).name] = Part({"scaling": each.scaling}, halved)
    return parts


def read_recovery(bundle: Bundle, level: int) -> Recovery | None:
    """The adapter of a level in its stored precision; None if the level has none.

    Raises:
      BundleError: the adapter is corrupt or malformed.
    """
    return _recovery(level).read(bundle)


def release_recovery(bundle: Bundle, level: int) -> None:
    """Releases the memory of a level's adapter (see `Bundle.release_part`)."""
    _recovery(level).release(bundle)


def require_level(bundle: Bundle, level: int) -> ModelConfig:
    """The sub-model of a level.

    Raises:
      ConfigError: the bundle has no such level.
      BundleError: see `PartFormat.read`.
    """
    ladder = read_ladder(bundle)
    if ladder is None:
        raise ConfigError(
            f"{bundle.path} has no levels, only the whole model; make an elastic bundle with "
            "`jaxllm elasticize`"
        )
    return sub_config(bundle.cfg, ladder, level)


def _read_ladder(bundle: Bundle, fields: Fields) -> Ladder:
    ladder = Ladder.from_json(fields.facts["ladder"])
    sub_config(bundle.cfg, ladder, ladder.levels[0])
    return ladder


def _read_order(bundle: Bundle, fields: Fields) -> "UnitOrder | None":
    if not (arrays := fields.rest()):
        return None
    from jaxllm.elastic.units import check_order, order_of_arrays

    order = order_of_arrays(bundle.cfg, arrays)
    check_order(bundle.cfg, order)
    return order


# Two readers of one part: an engine that opens a level needs no order, and does not read its bytes.
_LADDER = PartFormat("elastic", "list of levels", "prepare it again", _read_ladder, reads_arrays=False)
_ORDER = PartFormat("elastic", "order of units", "prepare it again", _read_order)
read_ladder, read_order = _LADDER.read, _ORDER.read


def _recovery(level: int) -> PartFormat[Recovery]:
    def read(bundle: Bundle, fields: Fields) -> Recovery:
        scaling = fields.facts.get("scaling")
        number = isinstance(scaling, int | float) and not isinstance(scaling, bool)
        if not number or not abs(scaling) <= _LARGEST_SCALING:  # pyright: ignore[reportArgumentType]
            raise ConfigError(f"its scaling is {scaling!r:.80}")
        adapter = fields.rest()
        _check_adapter(require_level(bundle, level), adapter)
        return Recovery(adapter, float(scaling))  # pyright: ignore[reportArgumentType]

    return PartFormat(f"recovery.{level}", f"adapter of level {level}", "prepare it again", read)


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
