"""Spreads training over devices and hosts: the mesh, the sharding of parameters and batches, process groups.

A mesh has three axes. Rows of a batch are divided over `data` and `fsdp`; parameters are replicated along
`data`, and sharded along `fsdp` (their model width) and `tensor` (their units: kv-groups, neurons, vocabulary
entries). XLA's partitioner inserts the transfers, so a step is written once, for one device (GSPMD, arXiv
2105.04663).
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import param_specs
from jaxllm.models.scanned_layers import STACKS, stack_name
from jaxllm.training.settings import TrainSettings

AXES = ("data", "fsdp", "tensor")
ROWS = PartitionSpec(("data", "fsdp"))
# Sharding of parameters, by the end of their names: mesh axes of the first axis, that of units, and of the
# last, the model's width. The first matching rule counts. Vectors are replicated.
RULES: tuple[tuple[str, tuple[str | None, str | None]], ...] = (
    (".scale", (None, None)),
    ("bias", (None, None)),
    (".left", ("tensor", None)),  # of an adapter [*U, r]
    (".right", (None, "fsdp")),  # [r, D]
    ("", ("tensor", "fsdp")),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Number of devices along each axis; 0 along `data` uses all remaining ones that divide the batch."""

    data: int = 0
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            value, least = getattr(self, axis), 0 if axis == "data" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"the mesh axis {axis} must be at least {least}, got {value!r}")

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Parses `data=2,fsdp=4`; axes that are not named have their defaults.

        Raises:
          ConfigError: the text has another form, or names an unknown axis.
        """
        sizes: dict[str, int] = {}
        for part in filter(None, text.split(",")):
            axis, _, size = part.partition("=")
            if axis.strip() not in AXES or not size.strip().isdecimal():
                raise ConfigError(f"a mesh is written like data=2,fsdp=2,tensor=1, got {text!r}")
            sizes[axis.strip()] = int(size)
        return cls(**sizes)


ALL_DEVICES = MeshShape()


def mesh_for(shape: MeshShape, settings: TrainSettings) -> Mesh:
    """Makes a mesh for steps of these settings; raises ConfigError, see `make_mesh`."""
    return make_mesh(shape, settings.batch // settings.accumulate)


def make_mesh(shape: MeshShape, rows: int) -> Mesh:
    """Makes a mesh over this run's devices, for batches that are computed `rows` rows at a time.

    Raises:
      ConfigError: there are too few devices, or the rows cannot be divided evenly.
    """
    devices = jax.devices()
    fixed = shape.fsdp * shape.tensor
    data = shape.data
    if not data:
        fitting = [n for n in range(1, len(devices) // fixed + 1) if rows % (n * shape.fsdp) == 0]
        # Every process of a group must have its devices in the mesh.
        data = max(fitting, default=1)
    count = data * fixed
    if count > len(devices) or (jax.process_count() > 1 and count != len(devices)):
        raise ConfigError(
            f"a mesh of data={data}, fsdp={shape.fsdp}, tensor={shape.tensor} is {count} devices, there are "
            f"{len(devices)}; on CPUs --cpu-devices makes more"
        )
    if rows % (data * shape.fsdp):
        raise ConfigError(
            f"{rows} rows cannot be divided over data={data} times fsdp={shape.fsdp}; choose another mesh, "
            "batch or accumulate"
        )
    grid = np.asarray(devices[:count]).reshape(data, shape.fsdp, shape.tensor)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def start_process_group(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Joins the processes of a run, before any device is used.

    Processes that SLURM or Open MPI starts as one of several tasks, or that run on a TPU host, find the
    others automatically.

    Args:
      coordinator: address and port of the first process; "none" for a run of a single process, however it
        was started; None to find the others, if there are any.
      processes: number of processes.
      process: number of this process, from 0. Both may be None if the cluster's environment has them.

    Raises:
      ConfigError: the group cannot be joined.
    """
    alone = coordinator == "none"
    if (alone or coordinator is None) and not (processes is None and process is None):
        raise ConfigError("give --coordinator HOST:PORT together with --processes and --process")
    if alone or (coordinator is None and not starts_group(os.environ)):
        return
    try:
        jax.distributed.initialize(coordinator, processes, process)
    except (RuntimeError, ValueError, OSError) as error:
        where = "that this cluster's environment names" if coordinator is None else f"at {coordinator}"
        raise ConfigError(
            f"cannot join the processes {where}: {error}; give --coordinator HOST:PORT, --processes and "
            "--process, or --coordinator none to train in this process alone"
        ) from error


def starts_group(environment: Mapping[str, str]) -> bool:
    """Whether a process was started as one of several that train together, by its environment variables."""
    # An allocation's own shell has SLURM's number of tasks too, but no step.
    slurm = {"SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID"} <= environment.keys()
    tasks = environment.get("SLURM_NTASKS" if slurm else "OMPI_COMM_WORLD_SIZE", "1")
    if tasks.isdecimal() and int(tasks) > 1:
        return True
    if "TPU_ML_PLATFORM" not in environment:  # JAX sets it on import, if there are TPUs.
        return False
    if hosts := environment.get("TPU_PROCESS_ADDRESSES", environment.get("TPU_WORKER_HOSTNAMES")):
        return "," in hosts or "MEGASCALE_COORDINATOR_ADDRESS" in environment
    # Google's own machines are detected by their metadata, which JAX requests; a group of one does no harm.
    return "TPU_SKIP_MDS_QUERY" not in environment


def stacks_layers(mesh: Mesh) -> bool:
    """Whether equal layers are stacked on a mesh's devices: off CPUs, where a step of many layers is slow
    to compile. A CPU computes layers one by one faster."""
    return mesh.devices.flat[0].platform != "cpu"


def require_divisible(cfg: ModelConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raises ConfigError unless the mesh divides a decoder's parameters evenly: `fsdp` its model width,
    `tensor` its kv groups and neurons."""
    fsdp, tensor = mesh.shape["fsdp"], mesh.shape["tensor"]
    if cfg.hidden_size % fsdp:
        raise ConfigError(
            f"fsdp={fsdp} does not divide the model's width of {cfg.hidden_size}; choose an fsdp that does"
        )
    units = {"kv heads": cfg.kv_heads, "neurons of a layer": cfg.ffn_size}
    for name, count in units.items():
        if count % tensor:
            raise ConfigError(
                f"tensor={tensor} does not divide the model's {count} {name}; choose a tensor that does, and "
                "more devices along fsdp or data instead"
            )


def spec_of(name: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the sharding of a parameter by `RULES`; axes that the mesh does not divide evenly are
    replicated, and so is the leading axis of a stack of layers."""
    stack = int(name.startswith(STACKS))
    if len(shape) - stack < 2:
        return PartitionSpec()
    first, last = next(axes for suffix, axes in RULES if name.endswith(suffix))
    parts: list[str | None] = [None] * len(shape)
    for place, axis in ((stack, first), (len(shape) - 1, last)):
        if axis is not None and shape[place] % mesh.shape[axis] == 0:
            parts[place] = axis
    return PartitionSpec(*parts)


def shardings_of(tree: Any, mesh: Mesh) -> Any:
    """Returns the sharding of every leaf of `tree` (arrays or shapes); leaves with a parameter's name, such
    as an optimizer's moments, are sharded like the parameter."""

    def sharding(path: Sequence[Any], leaf: Any) -> NamedSharding:
        keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        return NamedSharding(mesh, spec_of(str(keys[-1]) if keys else "", leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding, tree)


def own_rows(mesh: Mesh, rows: int, parts: int) -> tuple[int, ...] | None:
    """Returns the rows of a batch that this process's devices compute, ascending; None for all.

    Args:
      rows: B, number of rows of the whole batch.
      parts: number of parts that it is placed in (see `place_rows`).
    """
    if jax.process_count() == 1:
        return None
    numbers = np.arange(rows).reshape(parts, -1)
    places = NamedSharding(mesh, PartitionSpec(None, *ROWS)).addressable_devices_indices_map(numbers.shape)
    own = {int(row) for place in places.values() for row in numbers[place].flat}
    return None if len(own) == rows else tuple(sorted(own))


def place_rows(batch: Any, mesh: Mesh, parts: int) -> Any:
    """Puts the arrays `[B, ...]` of a batch on the devices as `[parts, B/parts, ...]`, sharded by rows.

    Every process has arrays of the whole batch, and transfers only its devices' rows (`own_rows`).
    """
    sharding = NamedSharding(mesh, PartitionSpec(None, *ROWS))

    def place(array: np.ndarray) -> jax.Array:
        cut = array.reshape(parts, array.shape[0] // parts, *array.shape[1:])
        return jax.make_array_from_callback(cut.shape, sharding, lambda index: cut[index])

    return jax.tree.map(place, batch)


def gathered(params: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Gathers whole parameters into this process's memory."""
    whole = {}
    for name, value in params.items():
        if not value.is_fully_addressable:
            assert isinstance(value.sharding, NamedSharding)
            everywhere = NamedSharding(value.sharding.mesh, PartitionSpec())
            value = jax.jit(lambda each: each, out_shardings=everywhere)(value)
        whole[name] = np.asarray(value)
    return whole


def placed(
    tensors: Iterable[tuple[str, Any]], mesh: Mesh, dtype: DTypeLike | None = None
) -> dict[str, jax.Array]:
    """Puts tensors on the devices one after the other, each sharded by `spec_of`.

    The host holds one tensor at a time, and a device only its shards.

    Args:
      tensors: (name, tensor) pairs in the order of the file.
      dtype: dtype of all arrays; None for their own.
    """
    found = {}
    for name, value in tensors:
        own = value if dtype is None or value.dtype == dtype else np.asarray(value, dtype)
        found[name] = put(own, NamedSharding(mesh, spec_of(name, value.shape, mesh)))
    return found


def laid_out(
    tensors: Iterable[tuple[str, Any]], cfg: ModelConfig, mesh: Mesh, dtype: DTypeLike | None = None
) -> dict[str, jax.Array]:
    """`placed`; off CPUs equal layers of decoder-only models are then stacked."""
    found = placed(tensors, mesh, dtype)
    return stacked_on(found, cfg, mesh) if stacks_layers(mesh) and cfg.encoder is None else found


def one_by_one(params: Mapping[str, jax.Array], cfg: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a model's parameters with unstacked layers, gathered on the host one after the other.

    Every process of a group has to iterate over all of them together.
    """
    for name in param_specs(cfg):
        own, row = stack_name(cfg, name)
        value = params[own][row] if own in params and row >= 0 else params[name]
        yield name, gathered({name: value})[name]


def put(value: Any, sharding: NamedSharding) -> jax.Array:
    """Puts an array on the devices of a sharding; from the host each gets only its own shard."""
    if not isinstance(value, np.ndarray):
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def stacked_on(params: Mapping[str, Any], cfg: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Returns parameters with equal layers in stacks, sharded on the mesh by `spec_of`.

    Stacks are made one after the other, and the layers' own arrays are released as soon as the caller has
    no reference. Stacked layers stay unchanged.
    """
    columns: dict[str, list[Any]] = {}
    rest = dict(params)
    for name in params:
        own, row = stack_name(cfg, name)
        if row >= 0:
            # Layers ascend, and so do rows.
            columns.setdefault(own, []).append(name)
    for own, names in columns.items():
        layers = [rest.pop(name) for name in names]
        shardings = shardings_of({own: jax.eval_shape(_stack, *layers)}, mesh)[own]
        rest[own] = jax.jit(_stack, out_shardings=shardings)(*layers)
    return rest


def _stack(*layers: Any) -> Any:
    return jax.tree.map(lambda *row: jnp.stack(row), *layers)
