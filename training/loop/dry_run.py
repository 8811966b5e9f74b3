"""Says what a run would take on a mesh before anything is read or run: memory per device, time per step.

The step is compiled for this process's devices, which may be CPU devices that stand for others
(`--cpu-devices 8 --mesh fsdp=8`). XLA lays out temporaries for each platform differently, so that figures
compiled on a CPU are estimates for a GPU or TPU; parameters and optimizer are exact.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import param_specs
from jaxllm.models.scanned_layers import stacked
from training.data.packing import Batch
from training.loop.hardware import DEVICES, Device, known_device
from training.loop.parallel import ROWS, shardings_of
from training.loop.trainer import Job, Trainer
from training.settings import TrainSettings

# Of a device's peak that large steps are assumed to reach.
ASSUMED_UTILIZATION = 0.4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run would take.

    Attributes:
      device: for which time and memory are estimated.
      devices: how many.
      state_bytes: of parameters, optimizer and frozen weights, per device.
      temporary_bytes: of activations, gradients and gathered weights at their peak, per device.
      memory_bytes: both, and what the step returns in new memory.
      device_memory_bytes: of one device.
      step_s: seconds of a step.
      device_hours: of the whole run.
    """

    device: str
    devices: int
    state_bytes: int
    temporary_bytes: int
    memory_bytes: int
    device_memory_bytes: int
    step_s: float
    device_hours: float

    def advice(self) -> str:
        """What to change where the memory is too small; empty if it is enough."""
        if self.memory_bytes <= self.device_memory_bytes:
            return ""
        needed, there = (each / 2**30 for each in (self.memory_bytes, self.device_memory_bytes))
        if self.temporary_bytes > self.state_bytes:
            change = "more --accumulate parts, --remat full, shorter rows, or more devices along fsdp"
        else:
            change = "more devices along fsdp or tensor, or frozen weights of fewer bits"
        return f"a step needs {needed:.1f} GiB per device and {self.device} has {there:.1f}: take {change}"


def estimate(
    job: Job, settings: TrainSettings, mesh: jax.sharding.Mesh, *, frozen: Any, device: str
) -> Estimate:
    """Compiles a job's step by shapes alone, and reads its analysis.

    Args:
      job: with its initial parameters from a key, and `cfg`; its frozen arrays are not looked at.
      settings: of the run.
      mesh: the devices.
      frozen: shapes of the frozen arrays, or None.
      device: the beginning of a device's name in `DEVICES`, or "" for this process's own.

    Raises:
      ConfigError: the device is not known.
    """
    name, figures = _device(device)
    trainer = Trainer(
        dataclasses.replace(job, frozen=None, frozen_cfg=None), settings, mesh, stack=job.cfg is not None
    )
    placed = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        frozen,
        shardings_of(frozen, mesh),
    )
    rows = NamedSharding(mesh, PartitionSpec(None, *ROWS))
    shape = (settings.accumulate, settings.batch // settings.accumulate, settings.row_tokens)
    kinds = (jnp.int32, jnp.int32, jnp.int32, jnp.float32, jnp.int32)
    shapes: Any = (jax.ShapeDtypeStruct(shape, kind, sharding=rows) for kind in kinds)
    memory: Any = trainer.lower(placed, Batch(*shapes)).compile().memory_analysis()
    kept = memory.argument_size_in_bytes
    returned = memory.output_size_in_bytes - memory.alias_size_in_bytes
    flops = (job.flops_per_token or 0.0) * settings.batch * settings.row_tokens
    # What is computed again takes time: a forward pass of the three that a step costs, of two over frozen
    # weights.
    again = {"none": 0.0, "dots": 0.1, "full": 1 / 3 if frozen is None else 1 / 2}[settings.remat]
    step_s = flops * (1 + again) / (figures.flops * ASSUMED_UTILIZATION * mesh.size)
    return Estimate(
        device=name,
        devices=mesh.size,
        state_bytes=kept,
        temporary_bytes=memory.temp_size_in_bytes,
        memory_bytes=kept + memory.temp_size_in_bytes + max(returned, 0),
        device_memory_bytes=int(figures.memory_bytes),
        step_s=step_s,
        device_hours=step_s * settings.steps * mesh.size / 3600,
    )


def frozen_shapes(cfg: ModelConfig, weights: str) -> Mapping[str, Any]:
    """Shapes of a model's frozen parameters, equal layers in stacks.

    Raises:
      ConfigError: the weights are quantized.
    """
    types = {"f32": jnp.float32, "bf16": jnp.bfloat16}
    if weights not in types:
        raise ConfigError(f"a dry run knows frozen weights of {' and '.join(types)}, not {weights}")
    specs = param_specs(cfg)
    return jax.eval_shape(
        lambda: stacked({name: jnp.zeros(spec.shape, types[weights]) for name, spec in specs.items()}, cfg)
    )


def _device(name: str) -> tuple[str, Device]:
    kind = name or jax.devices()[0].device_kind
    found = next((each for each in DEVICES if name and name.lower() in each.lower()), "")
    figures = DEVICES.get(found) or known_device(kind)
    if figures is None:
        raise ConfigError(
            f"the figures of {kind!r} are not known: say with --dry-run which device to estimate for, of "
            f"{', '.join(DEVICES)}"
        )
    return found or kind, figures
