"""Knows what devices can do, and what a step asks of them: operations, utilization, memory."""

import dataclasses
import resource
import sys

import jax

from jaxllm.config import ModelConfig
from jaxllm.models.parameters import active_parameter_count


@dataclasses.dataclass(frozen=True)
class Device:
    """Published figures of one device.

    Attributes:
      flops: bfloat16 operations per second, dense.
      bytes_per_s: bandwidth of its memory.
      memory_bytes: size of its memory.
    """

    flops: float
    bytes_per_s: float
    memory_bytes: float


# By the beginning of JAX's `device_kind`; the first that fits counts.
DEVICES = {
    "NVIDIA H200": Device(989e12, 4.8e12, 141e9),
    "NVIDIA H100": Device(989e12, 3.35e12, 80e9),
    "NVIDIA A100": Device(312e12, 2.0e12, 80e9),
    "NVIDIA A40": Device(149.7e12, 0.696e12, 48e9),
    "TPU v6": Device(918e12, 1.64e12, 32e9),
    "TPU v5 lite": Device(197e12, 0.82e12, 16e9),
    "TPU v5": Device(459e12, 2.77e12, 95e9),
    "TPU v4": Device(275e12, 1.23e12, 32e9),
}


def known_device(kind: str) -> Device | None:
    """The figures of a device kind; None if they are not known, as of CPUs."""
    return next((device for name, device in DEVICES.items() if kind.startswith(name)), None)


def step_flops_per_token(cfg: ModelConfig, row_tokens: int, *, adapter: bool = False) -> float:
    """Model operations that a training step needs per token (PaLM, arXiv 2204.02311, appendix B).

    What is computed again in the backward pass does not count. Attention counts as if rows were one document
    each, of which a token sees half on average.

    Args:
      cfg: the model.
      row_tokens: T.
      adapter: whether weights are frozen, so that the backward pass has no products for them.
    """
    looked_up = 0 if cfg.tied_head else cfg.vocab_size * cfg.hidden_size
    products = 2.0 * (active_parameter_count(cfg) - looked_up)
    attention = 2.0 * cfg.layers * cfg.heads * cfg.head_dim * row_tokens
    return (2 if adapter else 3) * products + 3 * attention


def utilization(tokens_per_s: float, flops_per_token: float | None, devices: int) -> float | None:
    """The share of all devices' peak that model operations use (MFU); None if either is not known."""
    device = known_device(jax.devices()[0].device_kind)
    if device is None or flops_per_token is None:
        return None
    return tokens_per_s * flops_per_token / (device.flops * devices)


def peak_memory_bytes() -> int:
    """The most memory that a device of this process has had in use; where devices do not tell, as CPUs, the
    most of this process."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(each and "peak_bytes_in_use" in each for each in stats):
        return max(int(each["peak_bytes_in_use"]) for each in stats if each)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
