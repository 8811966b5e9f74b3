"""Types the devices of JAX."""

from typing import Any, Protocol


class Device(Protocol):
    """A device of `jax.devices()`. Type checkers do not support `jax.Device`: it comes from an extension
    module without stubs.

    Attributes:
      platform: `cpu`, `gpu` or `tpu`.
      device_kind: model of the device.
      id: number among devices of its platform.
      client: its runtime.
    """

    platform: str
    device_kind: str
    id: int
    client: Any
