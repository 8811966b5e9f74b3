"""Translates the kinds of layers between Hugging Face configs and ours: windows of attention, states."""

from collections.abc import Iterable, Sequence

from jaxllm.errors import ConfigError
from jaxllm.models.config_reader import ConfigReader

SLIDING, FULL = "sliding_attention", "full_attention"


def read_windows(
    reader: ConfigReader, *, layers: int, window: int | None, slides: Sequence[bool]
) -> tuple[int, ...]:
    """`attention_windows` from `layer_types`, or from the architecture's usual pattern if the config has
    none.

    Args:
      reader: at the top level of the config.
      layers: L.
      window: window of sliding layers in tokens; None if the config switches it off.
      slides: the architecture's usual pattern, one entry per layer.

    Raises:
      ConfigError: `layer_types` has another length, an unknown type, or sliding layers and no window.
    """
    types = reader.texts("layer_types")
    if types is None:
        types = tuple(SLIDING if each else FULL for each in slides)
    if len(types) != layers:
        raise ConfigError(f"config key 'layer_types' has {len(types)} entries for {layers} layers; fix it")
    if unknown := sorted(set(types) - {SLIDING, FULL}):
        raise ConfigError(
            f"config key 'layer_types' names {', '.join(unknown)}; jaxllm supports {SLIDING} and {FULL}"
        )
    if SLIDING in types and (window is None or window < 1):
        raise ConfigError(
            f"config key 'layer_types' has sliding layers but the window is {window}; set sliding_window "
            "to a positive length (and use_sliding_window to true where the model has it)"
        )
    return tuple((window or 0) if each == SLIDING else 0 for each in types)


def write_layer_types(windows: Sequence[int]) -> list[str]:
    """`layer_types` of `attention_windows`."""
    return [SLIDING if each else FULL for each in windows]


def read_state_layers(reader: ConfigReader, state: str, usual: Sequence[bool]) -> tuple[bool, ...]:
    """`state_layers` from `layer_types`, or the architecture's usual ones if the config has none; empty where
    all layers attend.

    Args:
      reader: at the top level of the config.
      state: the type of a state layer.
      usual: per layer, whether it has a state where the config has no types.

    Raises:
      ConfigError: `layer_types` has another length or an unknown type.
    """
    types = reader.texts("layer_types")
    if types is None:
        return _marked(usual)
    if len(types) != len(usual):
        raise ConfigError(
            f"config key 'layer_types' has {len(types)} entries for {len(usual)} layers; fix it"
        )
    if unknown := sorted(set(types) - {state, FULL}):
        raise ConfigError(
            f"config key 'layer_types' names {', '.join(unknown)}; this model_type has {state} and {FULL}"
        )
    return _marked(each == state for each in types)


def write_state_types(state_layers: Sequence[bool], layers: int, state: str) -> list[str]:
    """`layer_types` of `state_layers`."""
    return [state if each else FULL for each in state_layers or (False,) * layers]


def _marked(flags: Iterable[bool]) -> tuple[bool, ...]:
    found = tuple(flags)
    return found if any(found) else ()
