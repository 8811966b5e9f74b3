"""Estimates memory per device and time per step of a run on a mesh, before any data is read.

The step is compiled for this process's devices, which may be CPU devices in place of others (`--cpu-devices
8 --mesh fsdp=8`). XLA lays out temporaries for each platform differently, so figures compiled on a CPU are
estimates for a GPU or TPU; those of parameters and optimizer are exact.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import param_specs
from jaxllm.models.scanned_layers import Remat, stacked
from jaxllm.training.data.rows import Batch
from jaxllm.training.loop.hardware import DEVICES, Device, known_device, what_to_change
from jaxllm.training.loop.parallel import ROWS, shardings_of
from jaxllm.training.loop.trainer import Job, Trainer
from jaxllm.training.settings import TrainSettings

# Assumed utilization of a device's peak by large steps.
ASSUMED_UTILIZATION = 0.4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimated cost of a run.

    Attributes:
      device: name of the device that time and memory are estimated for.
      state_bytes: bytes of parameters, optimizer and frozen weights, per device.
      temporary_bytes: peak bytes of activations, gradients and gathered weights, per device.
      memory_bytes: sum of both and of the step's newly allocated results.
      step_s: seconds per step.
    """

    device: str
    devices: int
    state_bytes: int
    temporary_bytes: int
    memory_bytes: int
    device_memory_bytes: int
    step_s: float
    device_hours: float

    def facts(self, settings: TrainSettings | None = None) -> dict[str, Any]:
        """The fields, and the advice for the settings, for people and programs."""
        return {**dataclasses.asdict(self), "advice": self.advice(settings)}

    def advice(self, settings: TrainSettings | None = None) -> str:
        """Suggests changes, also of the settings, if the memory is too small; otherwise empty."""
        if self.memory_bytes <= self.device_memory_bytes:
            return ""
        needed, there = (each / 2**30 for each in (self.memory_bytes, self.device_memory_bytes))
        change = what_to_change(self.state_bytes, self.temporary_bytes, settings)
        return f"a step needs {needed:.1f} GiB per device and {self.device} has {there:.1f}: take {change}"


def estimate(job: Job, settings: TrainSettings, mesh: Mesh, *, frozen: Any, device: str) -> Estimate:
    """Compiles a job's step from shapes only, and reads XLA's analysis.

    Args:
      job: job with initial parameters from a key, and `cfg`; its frozen arrays are not read.
      frozen: shapes of the frozen arrays, or None.
      device: part of a device's name in `DEVICES`, or "" for this process's own.

    Raises:
      ConfigError: the device is unknown.
    """
    # Unknown devices are rejected before anything is compiled.
    known_figures(device)
    trainer = Trainer(
        dataclasses.replace(job, frozen=None, frozen_cfg=None), settings, mesh, stack=job.cfg is not None
    )
    parts = settings.accumulate
    batch = batch_shapes(parts, settings.batch // parts, settings.row_tokens, mesh)
    compiled = trainer.lower(placed_shapes(frozen, mesh), batch).compile()
    flops = (job.flops_per_token or 0.0) * settings.batch * settings.row_tokens
    # The forward pass is a third of a step's cost, half over frozen weights.
    forward = 1 / 3 if frozen is None else 1 / 2
    flops *= 1 + recomputed_share(settings.remat, forward)
    return estimate_of(compiled, mesh, device=device, step_flops=flops, steps=settings.steps)


def estimate_of(
    compiled: jax.stages.Compiled, mesh: Mesh, *, device: str, step_flops: float, steps: int
) -> Estimate:
    """Reads the analysis of a compiled step.

    Args:
      device: see `estimate`.
      step_flops: operations of a step on all devices, with recomputation.
      steps: number of steps of the run.

    Raises:
      ConfigError: the device is unknown.
    """
    name, figures = known_figures(device)
    memory: Any = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes
    returned = memory.output_size_in_bytes - memory.alias_size_in_bytes
    step_s = step_flops / (figures.flops * ASSUMED_UTILIZATION * mesh.size)
    return Estimate(
        device=name,
        devices=mesh.size,
        state_bytes=kept,
        temporary_bytes=memory.temp_size_in_bytes,
        memory_bytes=kept + memory.temp_size_in_bytes + max(returned, 0),
        device_memory_bytes=int(figures.memory_bytes),
        step_s=step_s,
        device_hours=step_s * steps * mesh.size / 3600,
    )


def recomputed_share(remat: Remat, forward: float) -> float:
    """Returns the share of a step that the backward pass recomputes, if the forward pass is the share
    `forward`."""
    return {"none": 0.0, "dots": 0.3 * forward, "full": forward}[remat]


def batch_shapes(parts: int, rows: int, row_tokens: int, mesh: Mesh) -> Batch:
    """Shapes `[parts, B / parts, T]` of a batch on a mesh."""
    sharding = NamedSharding(mesh, PartitionSpec(None, *ROWS))
    kinds = (jnp.int32, jnp.int32, jnp.int32, jnp.float32, jnp.int32)
    shapes: Any = (jax.ShapeDtypeStruct((parts, rows, row_tokens), kind, sharding=sharding) for kind in kinds)
    return Batch(*shapes)


def rows_shapes(rows: int, row_tokens: int, mesh: Mesh) -> Batch:
    """Returns the shapes `[B, T]` of a batch on a mesh, for steps that accept it undivided."""
    sharding = NamedSharding(mesh, ROWS)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding),
        batch_shapes(1, rows, row_tokens, mesh),
    )


def placed_shapes(shapes: Any, mesh: Mesh) -> Any:
    """Shapes of parameters with their shardings on a mesh."""
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        shardings_of(shapes, mesh),
    )


def frozen_shapes(cfg: ModelConfig, weights: str, *, stack: bool = True) -> Mapping[str, Any]:
    """Shapes of a model's parameters, with `stack` equal layers in stacks.

    Raises:
      ConfigError: the weights are quantized.
    """
    types = {"f32": jnp.float32, "bf16": jnp.bfloat16}
    if weights not in types:
        raise ConfigError(f"a dry run knows frozen weights of {' and '.join(types)}, not {weights}")
    specs = param_specs(cfg)

    def params() -> dict[str, Any]:
        own = {name: jnp.zeros(spec.shape, types[weights]) for name, spec in specs.items()}
        return stacked(own, cfg) if stack else own

    return jax.eval_shape(params)


def known_figures(name: str) -> tuple[str, Device]:
    """The name and the figures of a device of `DEVICES` by a part of its name, or of this process's
    own.

    Raises:
      ConfigError: the device is not known.
    """
    kind = name or jax.devices()[0].device_kind
    found = next((each for each in DEVICES if name and name.lower() in each.lower()), "")
    figures = DEVICES.get(found) or known_device(kind)
    if figures is None:
        raise ConfigError(
            f"the figures of {kind!r} are not known: say with --dry-run which device to estimate for, of "
            f"{', '.join(DEVICES)}"
        )
    return found or kind, figures
