"""Isolates our computations from a host program's settings of JAX, and refuses unsupported ones.

A program that uses JAX itself may have set 64-bit types, rank promotion or strict dtypes for its whole
process. Steps of engines and of training are traced under their own settings, independent of all of these.
Strict dtypes need no action: no type here is promoted.
"""

import contextlib
from collections.abc import Iterator

import jax

from jaxllm.errors import ConfigError


@contextlib.contextmanager
def own_jax_settings() -> Iterator[None]:
    """Within this context, and in decorated functions, this thread has JAX's default types and ranks."""
    with jax.enable_x64(False), jax.numpy_rank_promotion("allow"):
        yield


def require_usable_jax() -> None:
    """Checks that JAX has a device and compiles jitted functions. Initializes a device.

    Raises:
      ConfigError: no platform of JAX_PLATFORMS is usable in this process, or jitting is switched off.
    """
    # In this thread or in all.
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise ConfigError(
            "jax_disable_jit is set, and only compiled steps run here: leave it off "
            "(JAX_DISABLE_JIT, jax.config.update), or say `with jax.disable_jit():` around your own code"
        )
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:
        platforms = jax.config.values["jax_platforms"]
        reason = f": {error}" if str(error) else ""
        raise ConfigError(
            f"JAX finds no device of JAX_PLATFORMS={platforms}{reason}; say JAX_PLATFORMS=cpu, leave it out, "
            "or install JAX for that device (the extras `cuda` and `tpu`)"
        ) from error
