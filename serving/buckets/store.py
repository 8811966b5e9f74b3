"""Finds compiled buckets on disk by a key of all of their inputs, without tracing them.

Tracing and lowering a bucket takes as long as hundreds of tokens, so buckets on disk must be found without
it. The key therefore digests every input of compilation: the bucket's family and fields, the model's
config, the engine's options, the names, shapes and structure of the parameters, the source of the package,
the versions of JAX and XLA and their settings, and the machine. It is deliberately too fine: an unnecessary
difference costs one compilation, a wrong match a wrong answer.
"""

import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jaxlib
import ml_dtypes
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.compiled_folder import CompiledBucketFolder
from jaxllm.serving.host.machine import cpu_features, usable_cores
from jaxllm.version import __version__

if TYPE_CHECKING:
    from jaxllm.models.encoder.siglip import ImageEncoderConfig
    from jaxllm.models.tiny_lm import TlmConfig
    from jaxllm.serving.ground.options import EngineOptions

_ENVIRONMENT = ("XLA_", "TF_XLA_", "LIBTPU_", "JAXLLM_KERNELS", "JAXLLM_THREADS")
# Settings of JAX for logs and caches; any other setting may change a bucket.
_HARMLESS_SETTINGS = (
    "jax_compilation_cache_", "jax_persistent_cache_", "jax_log", "jax_debug_log_", "jax_dump_ir_",
    "jax_explain_cache_misses", "jax_traceback_filtering",
)  # fmt: skip
_MODULE_SUFFIXES = (".py", ".pyc", ".so", ".pyd")
# Options that change no bucket: its folder on disk, the location of weights, the levels, the batch sizes.
_OUTSIDE_BUCKETS = (
    "buckets_bytes", "levels", "memory_bytes", "storage", "read_ahead", "experts", "prefill", "batch_rows",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class BucketStore:
    """The buckets of one model in a `CompiledBucketFolder`.

    Attributes:
      folder: folder of the buckets.
      facts: all inputs besides family and fields, as plain data by name.
    """

    folder: CompiledBucketFolder
    facts: Mapping[str, Any]

    @classmethod
    def of_model(
        cls,
        folder: CompiledBucketFolder,
        *,
        cfg: ModelConfig,
        options: "EngineOptions",
        params: Any,
        kernels: str = "xla",
    ) -> "BucketStore":
        """The store of a model's buckets.

        Args:
          folder: folder of the buckets.
          cfg: config of the model.
          options: resolved options of the engine.
          params: parameters of the model.
          kernels: name of the kernels that buckets call. The targets of their custom calls must be
            registered with JAX before a bucket is loaded.
        """
        environment = digest_of([kernels, environment_facts()])
        return cls(folder, {"environment": environment}).of(cfg, params, options)

    @classmethod
    def of_programs(cls, folder: CompiledBucketFolder) -> "BucketStore":
        """The store of buckets whose fields name their program."""
        return cls(folder, {"environment": digest_of(environment_facts())})

    def of(
        self,
        cfg: "ModelConfig | TlmConfig | ImageEncoderConfig",
        params: Any,
        options: "EngineOptions | None" = None,
    ) -> "BucketStore":
        """The store of another model, such as a sub-model, in the same folder; `options` are those of its
        engine if it has another."""
        model: dict[str, Any] = {"cfg": cfg.to_json(), "params": params_digest(params)}
        if options is not None:
            model["options"] = compiled_options(options)
            # The fields of tree buckets contain all of these.
            del model["options"]["trees"]
        return dataclasses.replace(self, facts={**self.facts, **model})

    def key(self, bucket: Bucket) -> str:
        """The key of a bucket: 64 hexadecimal digits."""
        where = bucket.placement
        placed = None if where is None else where.facts()
        return digest_of([dict(self.facts), type(bucket).__name__, dataclasses.asdict(bucket), placed])

    def load(self, bucket: Bucket) -> jax.stages.Compiled | None:
        """A compiled bucket from disk; None if it is missing."""
        unpack = self.read(bucket)
        return None if unpack is None else unpack()

    def read(self, bucket: Bucket) -> Callable[[], jax.stages.Compiled | None] | None:
        """Reads a compiled bucket's file: returns a function that unpacks it, which is slower and may run in
        another thread; None if it is missing."""
        key, where = self.key(bucket), bucket.placement
        payload = self.folder.payload(key)
        if payload is None:
            return None
        device = None if where is None else where.device
        return functools.partial(self.folder.unpacked, key, payload, device)

    def store(self, bucket: Bucket, compiled: jax.stages.Compiled) -> None:
        """Writes a compiled bucket to disk."""
        self.folder.store(self.key(bucket), compiled)


def compiled_options(options: "EngineOptions") -> dict[str, Any]:
    """The resolved options of an engine that its buckets depend on, by name."""
    names = (field.name for field in dataclasses.fields(options) if field.name not in _OUTSIDE_BUCKETS)
    values = {name: getattr(options, name) for name in names}
    return {
        name: dataclasses.asdict(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type)
        else value
        for name, value in values.items()
    }


def params_digest(params: Any) -> str:
    """Names, shapes and dtypes of all parameters, and their structure with its static fields."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    named = [
        (jax.tree_util.keystr(path), np.shape(leaf), str(leaf.dtype), bool(getattr(leaf, "weak_type", False)))
        for path, leaf in leaves
    ]
    return digest_of([str(structure), named])


def environment_facts() -> dict[str, Any]:
    """All inputs of a bucket outside a model and its engine, by name."""
    device = jax.devices()[0]
    settings = {
        name: repr(value)
        for name, value in sorted(jax.config.values.items())
        if not name.startswith(_HARMLESS_SETTINGS)
    }
    return {
        "package": __version__,
        "source": _SOURCE_DIGEST,
        "python": [sys.implementation.cache_tag, *sys.version_info],
        "versions": [each.__version__ for each in (jax, jaxlib, np, ml_dtypes)],
        "settings": settings,
        "environment": sorted(item for item in os.environ.items() if item[0].startswith(_ENVIRONMENT)),
        "device": [device.platform, device.device_kind, device.id, device.client.platform_version],
        "devices": jax.device_count(),
        # XLA:CPU splits the work of a bucket among the cores found at compile time.
        "cores": usable_cores(),
        "cpu": cpu_features(),
    }


def source_digest(*packages: str) -> str:
    """Digest of all modules in the given folders: paths and contents, source or compiled."""
    digest = hashlib.sha256()
    for package in packages:
        for path in _modules(package):
            with open(path, "rb", buffering=0) as file:
                raw = file.read()
            digest.update(f"{path.removeprefix(package)}\0{len(raw)}\0".encode())
            digest.update(raw)
    return digest.hexdigest()


def _modules(package: str) -> Iterator[str]:
    # In a checkout, the folders of other floors are links.
    for folder, folders, names in os.walk(package, followlinks=True):
        folders[:] = sorted(set(folders) - {"__pycache__"})
        yield from (os.path.join(folder, name) for name in sorted(names) if name.endswith(_MODULE_SUFFIXES))


# Computed at import, right after the modules that it describes: later, files may have been edited and differ
# from the code that this process runs.
_SOURCE_DIGEST = source_digest(os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")))


def digest_of(parts: Any) -> str:
    """Digest of plain data, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
