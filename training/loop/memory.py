"""Says what to change where a step does not fit a device's memory."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxllm.errors import ConfigError


def what_to_change(state_bytes: int, temporary_bytes: int) -> str:
    """What makes a step smaller, by what of it is large."""
    if temporary_bytes > state_bytes:
        return "more --accumulate parts, --remat full, shorter rows, or more devices along fsdp"
    return "more devices along fsdp or tensor, or frozen weights of fewer bits"


@contextlib.contextmanager
def memory_told(step: Callable[[], jax.stages.Compiled | None]) -> Iterator[None]:
    """Raises a device's lack of memory as an error for people.

    Args:
      step: gives the compiled step, or None where compiling itself took too much.

    Raises:
      ConfigError: a device has too little memory; the message has the compiler's figure and what to change.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        compiled, there = step(), _limit()
        if compiled is None:
            raise ConfigError(
                f"a step does not fit {there}: take more --accumulate parts, --remat full, shorter rows, or "
                "more devices along fsdp; --dry-run says what it takes"
            ) from error
        memory: Any = compiled.memory_analysis()
        state, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        raise ConfigError(
            f"a step needs {(state + temporary) / 2**30:.1f} GiB per device and does not fit {there}: take "
            f"{what_to_change(state, temporary)}; --dry-run says what other settings take"
        ) from error


def _limit() -> str:
    device = jax.local_devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return device.device_kind if limit is None else f"the {limit / 2**30:.1f} GiB of {device.device_kind}"
