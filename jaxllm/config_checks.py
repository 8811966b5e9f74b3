"""Checks of the fields of configs, which raise ConfigError."""

from typing import Any

from jaxllm.errors import ConfigError

# Bound on sizes in a config file: far above any real model, and low enough that products of two of them stay
# far below an address space.
MAX_DIMENSION = 1 << 24
_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `condition`."""
    if not condition:
        raise ConfigError(message)


def require_int(name: str, value: Any, low: int, high: int) -> None:
    """Checks that a field is a whole number in [low, high]."""
    valid = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    require(valid, f"{name} must be a whole number in [{low}, {high}], got {value!r}")


def require_numbers(config: Any, *names: str) -> None:
    """Checks that fields are finite numbers within float32's range, and converts integers to floats."""
    for name in names:
        value = getattr(config, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Not `math.isfinite`: it raises for integers that no float64 can represent. The comparison is false
        # for NaN.
        valid = number and abs(value) <= _LARGEST_FLOAT32
        require(valid, f"{name} must be a finite number, got {value!r:.80}")
        object.__setattr__(config, name, float(value))


def require_flags(config: Any, *names: str) -> None:
    """Checks that fields are true or false."""
    for name in names:
        value = getattr(config, name)
        require(isinstance(value, bool), f"{name} must be true or false, got {value!r}")


def require_experts(cfg: Any) -> None:
    """Checks the fields of a mixture's config that are about its experts, and fills in defaults.

    Raises:
      ConfigError: they do not fit each other or the layers.
    """
    require_int("experts_per_token", cfg.experts_per_token, 1, cfg.experts)
    if not cfg.expert_ffn_size:
        object.__setattr__(cfg, "expert_ffn_size", cfg.ffn_size)
    require_int("expert_ffn_size", cfg.expert_ffn_size, 1, MAX_DIMENSION)
    require_int("shared_expert_size", cfg.shared_expert_size, 0, MAX_DIMENSION)
    require(
        cfg.gated_ffn == (not cfg.expert_capacity) and not cfg.ffn_bias,
        "experts have no biases, and are gated but for those with a capacity: set gated_ffn to "
        f"{not cfg.expert_capacity} and ffn_bias to false",
    )
    if not cfg.sparse_layers:
        object.__setattr__(cfg, "sparse_layers", (True,) * cfg.layers)
    require(
        len(cfg.sparse_layers) == cfg.layers and {type(each) for each in cfg.sparse_layers} == {bool},
        f"sparse_layers needs {cfg.layers} times true or false, one per layer, got {cfg.sparse_layers}",
    )
    require(any(cfg.sparse_layers), "sparse_layers marks no layer; set experts to 0 for a dense model")
