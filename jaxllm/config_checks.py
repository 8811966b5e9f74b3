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
