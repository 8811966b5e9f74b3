"""Caches compiled buckets on disk, so that a process starts in the time of loading them.

XLA takes seconds to compile what it loads back in tens of milliseconds. Tracing and lowering a bucket takes
as long as hundreds of tokens, so buckets on disk are found without it, by a key that digests every input of
compilation: the bucket's family and fields, the model's config, the engine's options, the names, shapes and
structure of the parameters, the source of the package, the versions of JAX and XLA and their settings, and
the machine. It is deliberately too fine: an unnecessary difference costs one compilation, a wrong match a
wrong answer.

An entry is one file, named by the key of its bucket:

    header   magic, version, key, length and xxh3_128 of the payload
    payload  the compiled bucket as `jax.experimental.serialize_executable` writes it

If anything is wrong with an entry or its folder, the bucket is compiled instead: this cache never makes a
request fail. A compiled bucket is machine code: loading one runs code from its file. No checksum makes that
safe: only this user can have written the file (`user_cache.py`). The checksum detects damage.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import pickle
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jaxlib
import ml_dtypes
import numpy as np
import xxhash
from jax.experimental import serialize_executable

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.files.atomic import atomic_file, remove_abandoned
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.host.machine import Device, cpu_features, usable_cores
from jaxllm.serving.host.user_cache import (
    cache_folder,
    clear_entry,
    make_private_folder,
    private_file,
    private_folder,
)
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
# Of entries. It never changes: entries of another suffix would never be deleted.
SUFFIX = ".graph"
# Size limit of one entry: far above any bucket (code grows with layers, not with weights).
MAX_ENTRY_BYTES = 256 << 20
_HEADER = struct.Struct("<8sI32sQ16s")
_MAGIC, _VERSION = b"jaxllmGX", 1
_log = logging.getLogger(__name__)


class CompiledBucketFolder:
    """Compiled buckets by key, in one folder of this user. Threads and processes may share it.

    Args:
      folder: folder, created if missing, closed to others.
      limit_bytes: size limit of all entries; the least recently used are deleted.
    """

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._told = False
        self._lock = threading.Lock()

    @classmethod
    def of_user(cls, *, limit_bytes: int) -> "CompiledBucketFolder | None":
        """The folder in this user's cache; None if `limit_bytes` is 0."""
        return cls(cache_folder() / "executables", limit_bytes=limit_bytes) if limit_bytes else None

    def read(self, key: str, device: Device | None = None) -> Callable[[], jax.stages.Compiled | None] | None:
        """Reads the entry of a key: returns a function that unpacks its bucket for a device (the first one by
        default), which is slower and may run in another thread; None if no entry can be used."""
        try:
            payload = self._read(key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, struct.error) as error:
            _log.debug("%s: %s", self._path(key), error)
            return None
        return functools.partial(self._unpacked, key, payload, device)

    def _unpacked(self, key: str, payload: bytes, device: Device | None) -> jax.stages.Compiled | None:
        try:
            compiled, arguments, results = pickle.loads(payload)
            return serialize_executable.deserialize_and_load(
                compiled, arguments, results, execution_devices=[device or jax.devices()[0]]
            )
        except Exception as error:  # Any error of JAX and XLA for an unusable entry.
            _log.debug("%s: cannot be loaded (%s)", self._path(key), error)
            return None

    def store(self, key: str, compiled: jax.stages.Compiled) -> None:
        """Writes a newly compiled bucket, replacing the entry of its key."""
        settings = jax.config.values
        if settings["jax_compilation_cache_dir"] and settings["jax_enable_compilation_cache"]:
            # JAX may have loaded it from its own cache, and XLA:CPU serializes a loaded one without its code:
            # it would load, and fail when it runs.
            return
        try:
            payload = pickle.dumps(serialize_executable.serialize(compiled))
        except Exception as error:  # Some backends and buckets have no serialized form.
            _log.debug("%s: cannot be serialized (%s)", key, error)
            return
        if _HEADER.size + len(payload) > min(MAX_ENTRY_BYTES, self._limit_bytes):
            return
        checksum = xxhash.xxh3_128_digest(payload)
        header = _HEADER.pack(_MAGIC, _VERSION, bytes.fromhex(key), len(payload), checksum)
        try:
            make_private_folder(self._folder)
            with private_folder(self._folder) as folder:
                clear_entry(self._path(key))
                with atomic_file(self._path(key)) as file:
                    os.fchmod(file.fileno(), 0o600)
                    file.write(header)
                    file.write(payload)
                self._make_room(folder, newest=self._path(key).name)
        except (OSError, ValueError) as error:
            self._tell(error)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{SUFFIX}"

    def _read(self, key: str) -> bytes:
        """The validated payload of an entry.

        Raises:
          OSError: there is no entry, or it cannot be read.
          ValueError: the folder or the entry is accessible to others, or the entry is damaged.
        """
        try:
            with private_folder(self._folder):
                pass
        except ConfigError as error:
            self._tell(error)
            raise
        with private_file(self._path(key)) as number, open(number, "rb", closefd=False) as file:
            facts = os.fstat(number)
            if not _HEADER.size <= facts.st_size <= MAX_ENTRY_BYTES:
                raise ValueError(f"{facts.st_size} bytes are not the size of an entry")
            magic, version, named, size, checksum = _HEADER.unpack(file.read(_HEADER.size))
            if (magic, version, named.hex(), size) != (_MAGIC, _VERSION, key, facts.st_size - _HEADER.size):
                raise ValueError("not an entry of this key, or truncated")
            payload = file.read(size)
            if xxhash.xxh3_128_digest(payload) != checksum:
                raise ValueError("the checksum is wrong")
            with contextlib.suppress(OSError):  # On storage that is read-only now.
                # The time of its last use: `_make_room` deletes the oldest first.
                os.utime(number)
        return payload

    def _make_room(self, folder: int, *, newest: str) -> None:
        """Deletes leftovers of killed processes, then the least recently used entries, down to the limit."""
        remove_abandoned(self._folder)
        entries = []
        with os.scandir(folder) as found:
            for each in found:
                with contextlib.suppress(FileNotFoundError):  # Another process makes room too.
                    facts = each.stat(follow_symlinks=False)
                    if each.name.endswith(SUFFIX):
                        entries.append((each.name == newest, facts.st_mtime_ns, each.name, facts.st_size))
        total = sum(size for *_, size in entries)
        for _, _, name, size in sorted(entries):
            if total <= self._limit_bytes:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            total -= size

    def _tell(self, error: Exception) -> None:
        """Warns once that buckets are not cached, and why: each later start compiles them again."""
        with self._lock:
            told, self._told = self._told, True
        if not told:
            reason = error.strerror if isinstance(error, OSError) else error
            _log.warning(
                "%s: compiled buckets are not kept there, so every start compiles them again (%s); set "
                "JAXLLM_CACHE to a folder that only you can write to, or JAXLLM_BUCKETS_BYTES=0",
                self._folder,
                reason,
            )


@dataclasses.dataclass(frozen=True)
class BucketStore:
    """The buckets of one model in a `CompiledBucketFolder`.

    Attributes:
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
        """See `CompiledBucketFolder.read`."""
        where = bucket.placement
        return self.folder.read(self.key(bucket), None if where is None else where.device)

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


def digest_of(parts: Any) -> str:
    """Digest of plain data, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _modules(package: str) -> Iterator[str]:
    # In a checkout, the folders of other floors are links.
    for folder, folders, names in os.walk(package, followlinks=True):
        folders[:] = sorted(set(folders) - {"__pycache__"})
        yield from (os.path.join(folder, name) for name in sorted(names) if name.endswith(_MODULE_SUFFIXES))


# Computed at import, right after the modules that it describes: later, files may have been edited and differ
# from the code that this process runs.
_SOURCE_DIGEST = source_digest(os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")))
