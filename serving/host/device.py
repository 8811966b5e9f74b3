"""Types the devices of JAX."""

from typing import Any, Protocol


class Device(Protocol):
    """A device of `jax.devices()`. Type checkers cannot take `jax.Device`: it comes from an extension module
    without stubs.

    Attributes:
      platform: `cpu`, `gpu` or `tpu`.
      device_kind: its model.
      id: tells it from others of its platform.
      client: the runtime that it belongs to.
    """

    platform: str
    device_kind: str
    id: int
    client: Any
