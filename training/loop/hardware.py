"""Computes what devices offer and a step needs: operations, utilization, memory."""

import contextlib
import dataclasses
import re
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import active_parameter_count
from jaxllm.training.settings import TrainSettings


@dataclasses.dataclass(frozen=True)
class Device:
    """Published figures of one device.

    Attributes:
      flops: bfloat16 operations per second, dense.
    """

    flops: float
    memory_bytes: float


# By the beginning of JAX's `device_kind`; the first match counts.
DEVICES = {
    "NVIDIA H200": Device(989e12, 141e9),
    "NVIDIA H100": Device(989e12, 80e9),
    "NVIDIA A100": Device(312e12, 80e9),
    "NVIDIA A40": Device(149.7e12, 48e9),
    "TPU v6": Device(918e12, 32e9),
    "TPU v5 lite": Device(197e12, 16e9),
    "TPU v5": Device(459e12, 95e9),
    "TPU v4": Device(275e12, 32e9),
}


def known_device(kind: str) -> Device | None:
    """The figures of a device kind; None if they are not known, as of CPUs."""
    return next((device for name, device in DEVICES.items() if kind.startswith(name)), None)


def step_flops_per_token(cfg: ModelConfig, row_tokens: int, *, adapter: bool = False) -> float:
    """Returns the model operations of a training step per token (PaLM, arXiv 2204.02311, appendix B).

    Recomputation in the backward pass does not count. Attention counts as if each row were one document: a
    token attends to half of it on average.

    Args:
      adapter: whether weights are frozen, so that the backward pass computes no products for them.
    """
    looked_up = 0 if cfg.tied_head else cfg.vocab_size * cfg.hidden_size
    products = 2.0 * (active_parameter_count(cfg) - looked_up)
    attention = 2.0 * cfg.layers * cfg.heads * cfg.head_dim * row_tokens
    return (2 if adapter else 3) * products + 3 * attention


def utilization(tokens_per_s: float, flops_per_token: float | None, devices: int) -> float | None:
    """Returns the share of all devices' peak that model operations use (MFU); None if either is unknown."""
    device = known_device(jax.devices()[0].device_kind)
    if device is None or flops_per_token is None:
        return None
    return tokens_per_s * flops_per_token / (device.flops * devices)


def peak_memory_bytes() -> int:
    """Returns the peak memory of a device of this process; on devices without such statistics, as CPUs, the
    peak of the process."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(each and "peak_bytes_in_use" in each for each in stats):
        return max(int(each["peak_bytes_in_use"]) for each in stats if each)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


# Memory of a kernel, not of a program: shared memory of a GPU's block, and fast memories of a TPU core.
_OF_A_KERNEL = re.compile(r"shared memory|memory space (vmem|smem)|scoped", re.IGNORECASE)
_OF_A_DEVICE = re.compile(r"out of memory|allocat|memory space hbm|exceeds", re.IGNORECASE)


def what_to_change(state_bytes: int, temporary_bytes: int, settings: TrainSettings | None) -> str:
    """Suggests how to make a step smaller, by its largest part and its recipe's settings, if it has one."""
    if temporary_bytes <= state_bytes:
        fewer = "frozen weights of fewer bits (`jaxllm lora --weights`)"
        return f"more devices along fsdp or tensor (--mesh), or {fewer}"
    if settings is None:
        return "fewer rows, shorter ones, or more devices along fsdp (--mesh)"
    own = settings.accumulate
    ways = [f"a larger `accumulate` in the recipe, now {own}"] if own < settings.batch else []
    if settings.remat != "full":
        ways.append(f'`remat = "full"`, now "{settings.remat}"')
    ways.append(f"shorter `row_tokens`, now {settings.row_tokens}")
    return f"{'; '.join(ways)}; or more devices along fsdp (--mesh)"


@contextlib.contextmanager
def explain_memory_errors(
    step: Callable[[], jax.stages.Compiled | None], settings: TrainSettings
) -> Iterator[None]:
    """Reraises a lack of memory as a readable error, and other errors unchanged.

    Args:
      step: function that returns the compiled step, or None if compilation itself ran out of memory.

    Raises:
      ConfigError: a device or a block of a kernel has too little memory; the message has the compiler's
        figure and a suggestion.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text:
            raise
        if _OF_A_KERNEL.search(text):
            raise ConfigError(
                f"a kernel does not fit {jax.local_devices()[0].device_kind}, which is no lack of its "
                f"memory ({text.partition('RESOURCE_EXHAUSTED: ')[2]:.200}): set JAXLLM_KERNELS=xla, which "
                "computes attention without kernels, and report this as an error of jaxllm"
            ) from error
        if not _OF_A_DEVICE.search(text):
            raise
        compiled, device = step(), jax.local_devices()[0]
        limit, there = (device.memory_stats() or {}).get("bytes_limit"), device.device_kind
        if limit is not None:
            there = f"the {limit / 2**30:.1f} GiB of {there}"
        if compiled is None:
            change = what_to_change(0, 1, settings)
            raise ConfigError(f"a step does not fit {there}: take {change}") from error
        memory: Any = compiled.memory_analysis()
        state, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        raise ConfigError(
            f"a step needs {(state + temporary) / 2**30:.1f} GiB per device and does not fit {there}: take "
            f"{what_to_change(state, temporary, settings)}"
        ) from error
