"""Which executable on disk is which graph: a key of all that a graph depends on, known without tracing it.

Tracing and lowering a graph takes as long as hundreds of tokens, so an executable on disk must be found
without them. The key therefore names everything that goes into them: the bucket, the model's config, the
engine's options, the names, shapes and structure of the parameters, the source of the package, the
versions of what compiles, JAX's and XLA's settings, and the machine. It is meant to be too fine: a key
that differs for no reason costs one compilation, one that agrees wrongly costs a wrong answer.
"""

import copy
import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jaxlib
import ml_dtypes
import numpy as np

import jaxllm
from jaxllm.config import Bucket, ModelConfig
from serving.executables import ExecutableFolder
from serving.machine import cpu_features, usable_cores

if TYPE_CHECKING:
    from jaxllm.models.tlm import TlmConfig
    from serving.options import EngineOptions

_ENVIRONMENT = ("XLA_", "TF_XLA_", "LIBTPU_", "JAXLLM_KERNELS", "JAXLLM_THREADS")
# Settings of JAX about logs and caches; every other one may change a graph.
_HARMLESS_SETTINGS = (
    "jax_compilation_cache_", "jax_persistent_cache_", "jax_log", "jax_debug_log_", "jax_dump_ir_",
    "jax_explain_cache_misses", "jax_traceback_filtering",
)  # fmt: skip
_MODULE_SUFFIXES = (".py", ".pyc", ".so", ".pyd")
# Options that change no graph: where executables are kept, where weights are, which levels there are.
_OUTSIDE_GRAPHS = (
    "executables_bytes", "levels", "memory_bytes", "storage", "read_ahead", "experts", "prefill",
)  # fmt: skip


class GraphStore:
    """The graphs of one model in a folder of executables.

    Args:
      folder: where they are kept.
      cfg: the model.
      options: resolved options of the engine.
      params: the model's parameters.
      kernels: names the kernels that graphs call, and what else distinguishes them. Whatever these need
        of JAX (the targets of custom calls) must be registered before a graph is loaded.
    """

    def __init__(
        self,
        folder: ExecutableFolder,
        *,
        cfg: ModelConfig,
        options: "EngineOptions",
        params: Any,
        kernels: str = "xla",
    ) -> None:
        self._folder = folder
        environment = digest_of([kernels, environment_facts()])
        self._key = functools.partial(
            graph_key, cfg=cfg, options=options, params=params_signature(params), environment=environment
        )

    def of(self, cfg: "ModelConfig | TlmConfig", params: Any) -> "GraphStore":
        """The graphs of another model (a sub-model, say) in the same folder, for the same engine."""
        other = copy.copy(self)
        other._key = functools.partial(self._key, cfg=cfg, params=params_signature(params))
        return other

    def load(self, bucket: Bucket, where: "Placement | None" = None) -> jax.stages.Compiled | None:
        """The executable of a bucket's graph, or None where none is kept."""
        device = None if where is None else where.device
        return self._folder.load(self._key(bucket, where=where), device)

    def store(self, bucket: Bucket, compiled: jax.stages.Compiled, where: "Placement | None" = None) -> None:
        """Keeps the executable of a bucket's graph."""
        self._folder.store(self._key(bucket, where=where), compiled)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a graph is compiled that is not for the first device, or not as graphs are by default.

    Attributes:
      device: that it is for.
      blocks: whether its weights are in blocks, as native kernels take them.
      compiler_options: for XLA.
    """

    device: jax.Device
    blocks: bool = True
    compiler_options: tuple[tuple[str, str | bool], ...] = ()

    def facts(self) -> list[Any]:
        """What tells it from others, as plain data."""
        device = self.device
        known = [device.platform, device.device_kind, device.id, device.client.platform_version]
        return [known, self.blocks, self.compiler_options]


def graph_key(
    bucket: Bucket,
    *,
    cfg: "ModelConfig | TlmConfig",
    options: "EngineOptions",
    params: str,
    environment: str,
    where: Placement | None = None,
) -> str:
    """The key of one graph, 64 hexadecimal digits.

    Args:
      bucket: which graph.
      cfg: the model.
      options: resolved options of the engine.
      params: see `params_signature`.
      environment: digest of the kernels' name and of `environment_facts`.
      where: see `Placement`; None for a graph of the first device.
    """
    shapes = graph_options(options)
    if bucket.kind != "draft":
        # All else of trees is in the bucket.
        del shapes["trees"]
    placed = None if where is None else where.facts()
    return digest_of([environment, cfg.to_json(), shapes, params, dataclasses.asdict(bucket), placed])


def graph_options(options: "EngineOptions") -> dict[str, Any]:
    """Those of an engine's resolved options that its graphs depend on, by name."""
    names = (field.name for field in dataclasses.fields(options) if field.name not in _OUTSIDE_GRAPHS)
    values = {name: getattr(options, name) for name in names}
    return {
        name: dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
        for name, value in values.items()
    }


def params_signature(params: Any) -> str:
    """Names, shapes and dtypes of all parameters, and their structure with its static fields."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    named = [
        (jax.tree_util.keystr(path), np.shape(leaf), str(leaf.dtype), bool(getattr(leaf, "weak_type", False)))
        for path, leaf in leaves
    ]
    return digest_of([str(structure), named])


def environment_facts() -> dict[str, Any]:
    """Everything outside a model and its engine that a graph depends on, by name."""
    device = jax.devices()[0]
    settings = {
        name: repr(value)
        for name, value in sorted(jax.config.values.items())
        if not name.startswith(_HARMLESS_SETTINGS)
    }
    return {
        "package": jaxllm.__version__,
        "source": _SOURCE_DIGEST,
        "python": [sys.implementation.cache_tag, *sys.version_info],
        "versions": [each.__version__ for each in (jax, jaxlib, np, ml_dtypes)],
        "settings": settings,
        "environment": sorted(item for item in os.environ.items() if item[0].startswith(_ENVIRONMENT)),
        "device": [device.platform, device.device_kind, device.id, device.client.platform_version],
        "devices": jax.device_count(),
        # XLA:CPU divides the work of a graph by the cores that it finds when it compiles.
        "cores": usable_cores(),
        "cpu": cpu_features(),
    }


def source_digest(*packages: str) -> str:
    """Digest of all modules in the given folders: their places and contents, source or compiled."""
    digest = hashlib.sha256()
    for package in packages:
        for path in _modules(package):
            with open(path, "rb", buffering=0) as file:
                raw = file.read()
            digest.update(f"{path.removeprefix(package)}\0{len(raw)}\0".encode())
            digest.update(raw)
    return digest.hexdigest()


def _modules(package: str) -> Iterator[str]:
    for folder, folders, names in os.walk(package):
        folders[:] = sorted(set(folders) - {"__pycache__"})
        yield from (os.path.join(folder, name) for name in sorted(names) if name.endswith(_MODULE_SUFFIXES))


# Taken when this module is imported, right after those that it describes: later, it could name code that
# was edited meanwhile, and not what this process runs.
_SOURCE_DIGEST = source_digest(*jaxllm.__path__, os.path.dirname(__file__))


def digest_of(parts: Any) -> str:
    """Digest of plain data, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
