"""Compiles the buckets of a model before the first request, and caches them on disk; nothing else compiles.

Each bucket is compiled ahead of time, or read from disk if an earlier process stored it. A missing bucket
raises `BucketMissing`: it is never compiled during a user's request.

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

import concurrent.futures
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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jaxlib
import ml_dtypes
import numpy as np
import xxhash
from jax.experimental import serialize_executable

from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import BucketMissing, ConfigError
from jaxllm.files.atomic import atomic_file, is_there, remove_abandoned
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.host.machine import Device, cpu_features, require_not_forked, usable_cores
from jaxllm.serving.host.progress import Progress
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
    "spare_memory",
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
        self.folder, self.limit_bytes = folder, limit_bytes
        self._warned = False
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
        if _jax_caches():
            # JAX may have loaded it from its own cache, and XLA:CPU serializes a loaded one without its code:
            # it would load, and fail when it runs.
            return
        try:
            payload = pickle.dumps(serialize_executable.serialize(compiled))
        except Exception as error:  # Some backends and buckets have no serialized form.
            _log.debug("%s: cannot be serialized (%s)", key, error)
            return
        if _HEADER.size + len(payload) > min(MAX_ENTRY_BYTES, self.limit_bytes):
            return
        checksum = xxhash.xxh3_128_digest(payload)
        header = _HEADER.pack(_MAGIC, _VERSION, bytes.fromhex(key), len(payload), checksum)
        try:
            make_private_folder(self.folder)
            with private_folder(self.folder) as folder:
                clear_entry(self._path(key))
                with atomic_file(self._path(key)) as file:
                    os.fchmod(file.fileno(), 0o600)
                    file.write(header)
                    file.write(payload)
                self._make_room(folder, newest=self._path(key).name)
        except (OSError, ValueError) as error:
            self._warn(error)

    def __contains__(self, key: str) -> bool:
        """Whether there is an entry of a key; `read` decides whether it can be used."""
        return is_there(self._path(key))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def _read(self, key: str) -> bytes:
        """The validated payload of an entry; OSError or ValueError if there is none that can be trusted."""
        try:
            with private_folder(self.folder):
                pass
        except ConfigError as error:
            self._warn(error)
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
        remove_abandoned(self.folder)
        entries = []
        with os.scandir(folder) as found:
            for each in found:
                with contextlib.suppress(FileNotFoundError):  # Another process makes room too.
                    facts = each.stat(follow_symlinks=False)
                    if each.name.endswith(SUFFIX):
                        entries.append((each.name == newest, facts.st_mtime_ns, each.name, facts.st_size))
        total = sum(size for *_, size in entries)
        for _, _, name, size in sorted(entries):
            if total <= self.limit_bytes:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            total -= size

    def _warn(self, error: Exception) -> None:
        """Warns once that buckets are not cached, and why: each later start compiles them again."""
        with self._lock:
            warned, self._warned = self._warned, True
        if not warned:
            _log.warning(
                "%s: compiled buckets are not kept there, so every start compiles them again (%s); set "
                "JAXLLM_CACHE to a folder that only you can write to, or JAXLLM_BUCKETS_BYTES=0",
                self.folder,
                error.strerror if isinstance(error, OSError) else error,
            )


@dataclasses.dataclass(frozen=True)
class BucketStore:
    """The buckets of one model in a `CompiledBucketFolder`.

    Attributes:
      facts: all inputs besides family and fields, as plain data by name.
      apart: whether buckets are compiled in another process, where that is possible.
    """

    folder: CompiledBucketFolder
    facts: Mapping[str, Any]
    apart: bool = False

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
        # Devices other than CPUs belong to one process, and what JAX has cached is not stored.
        apart = options.spare_memory and jax.default_backend() == "cpu" and not _jax_caches()
        return cls(folder, {"environment": environment}, apart).of(cfg, params, options)

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


_PROGRESS_S = 1.0


class BucketTable:
    """The compiled buckets of all levels of a model.

    Attributes:
      lock: reentrant lock of threads that run buckets or change their arguments.
      bucket_ms: time to trace and compile each bucket, or to load it (several are built in parallel).
      loaded: buckets that were loaded from disk, where an earlier process had stored them.
      build_ms: total time spent waiting for buckets.
    """

    def __init__(self, model: Any = None, store: BucketStore | None = None) -> None:
        """Makes an empty bucket table.

        Args:
          model: argument of `Bucket.lower` for buckets of the whole model.
          store: cache of compiled buckets for later processes; None for none.
        """
        self.lock = threading.RLock()
        self.bucket_ms: dict[Bucket, float] = {}
        self.loaded: set[Bucket] = set()
        self.build_ms = 0.0
        self._models: dict[int, tuple[Any, BucketStore | None]] = {FULL_LEVEL: (model, store)}
        self._compiled: dict[Bucket, Any] = {}
        self._pending: dict[Bucket, concurrent.futures.Future[Any]] = {}
        self._ahead: dict[Bucket, concurrent.futures.Future[Any]] = {}
        self._unusable: set[Bucket] = set()
        self._compiled_apart: set[Bucket] = set()
        self._keeping = threading.Lock()
        self._guards: list[Callable[[], None]] = []

    def add_level(self, level: int, model: Any, store: BucketStore | None = None) -> None:
        """Adds a level: the argument of `Bucket.lower` for its buckets, and their store."""
        self._models[level] = model, store

    def store(self, level: int = FULL_LEVEL) -> BucketStore | None:
        """The store of a level's buckets; None if they are not stored."""
        return self._models[level][1]

    def __contains__(self, bucket: Bucket) -> bool:
        """Whether a bucket is compiled, or being compiled."""
        return bucket in self._compiled or bucket in self._pending

    def is_ready(self, bucket: Bucket) -> bool:
        """Whether a bucket is compiled."""
        return bucket in self._compiled

    def read_ahead(self, buckets: Iterable[Bucket]) -> None:
        """Starts to load buckets that the next `fill` will probably request, and compiles none.

        Their files are read here, and unpacked in threads, which need no Python.
        """
        pool = concurrent.futures.ThreadPoolExecutor(usable_cores())
        for bucket in dict.fromkeys(buckets):
            store = self._models[bucket.level][1]
            unpack = None if store is None or bucket in self else store.read(bucket)
            if unpack is not None:
                self._ahead[bucket] = pool.submit(unpack)
        pool.shutdown(wait=False)

    def fill(
        self, buckets: Iterable[Bucket], progress: Progress | None = None, *, later: Iterable[Bucket] = ()
    ) -> None:
        """Loads missing buckets from disk, else compiles them, several in parallel.

        Args:
          buckets: buckets to wait for.
          progress: callback for ("compile", done, total) when a bucket is ready, and once per second.
          later: buckets to build in the background; `get` waits for a bucket that is not ready.
        """
        missing = [bucket for bucket in dict.fromkeys(buckets) if bucket not in self._compiled]
        began = time.perf_counter()
        self._compile_apart(missing, progress)
        for bucket, each in [*self._pending.items()]:
            # Those that failed are built again.
            if each.cancelled() or (each.done() and each.exception() is not None):
                self._pending.pop(bucket, None)
        new = [bucket for bucket in dict.fromkeys([*missing, *later]) if bucket not in self]
        if new:
            pool = concurrent.futures.ThreadPoolExecutor(usable_cores())
            self._pending.update({bucket: pool.submit(self._build, bucket) for bucket in new})
            # Its threads end when the queue is empty.
            pool.shutdown(wait=False)
        self._drop_ahead()
        waiting = {future: each for each in missing if (future := self._pending.get(each)) is not None}
        try:
            while waiting:
                ready, _ = concurrent.futures.wait(waiting, _PROGRESS_S, concurrent.futures.FIRST_COMPLETED)
                for future in ready:
                    self._finish(waiting.pop(future))
                if progress is not None:
                    progress("compile", len(missing) - len(waiting), len(missing))
        except BaseException:
            # After an interrupt, pending builds must not delay the end of the process.
            for future in self._pending.values():
                future.cancel()
            raise
        self.build_ms += 1000 * (time.perf_counter() - began)

    def keep(self, buckets: Iterable[Bucket], progress: Progress | None = None) -> None:
        """Compiles missing buckets to disk, for `begin_loading`; fills those that cannot be stored there.
        From any thread, in turns."""
        with self._keeping:
            buckets = [each for each in dict.fromkeys(buckets) if not self.is_ready(each)]
            self._compile_apart(buckets, progress)
            self.fill([each for each in buckets if not self._is_stored(each)], progress)

    def begin_loading(self, bucket: Bucket) -> bool:
        """Whether a bucket is ready; if not, loads it in the background, so that it is soon."""
        pending = self._pending.get(bucket)
        if pending is not None and pending.done():
            if (error := None if pending.cancelled() else pending.exception()) is None:
                self._finish(bucket)
            elif bucket not in self._unusable:
                self._unusable.add(bucket)
                _log.warning("%s cannot be loaded, so that answers go on without it: %s", bucket, error)
        elif pending is None and not self.is_ready(bucket):
            # Another thread may be about to compile it.
            self.fill([], later=[bucket] if self._is_stored(bucket) or not self._keeping.locked() else [])
        return self.is_ready(bucket)

    def fill_here(self, buckets: Iterable[Bucket]) -> None:
        """Builds missing buckets one after the other in this thread, under its thread-local JAX settings."""
        began = time.perf_counter()
        for bucket in buckets:
            if not self.is_ready(bucket):
                self._compiled[bucket], self.bucket_ms[bucket] = self._build(bucket)
        self.build_ms += 1000 * (time.perf_counter() - began)

    def get(self, bucket: Bucket) -> Any:
        """A compiled bucket; its arguments and results are those of its family's `lower`.

        Raises:
          BucketMissing: it was not passed to `fill` or `fill_here`.
          JaxllmError: see `require_usable`.
        """
        self.require_usable()
        compiled = self._compiled.get(bucket)
        if compiled is None and bucket in self._pending:
            compiled = self._finish(bucket)
        if compiled is None:
            raise BucketMissing(f"{bucket} was not compiled; compile it by `fill` before the first request")
        return compiled

    def get_filled(self, bucket: Bucket) -> Any:
        """`get`, after `fill` if the bucket is not ready."""
        if not self.is_ready(bucket):
            self.fill([bucket])
        return self.get(bucket)

    # -- guards -----------------------------------------------------------------------------------

    def guard(self, require: Callable[[], None]) -> None:
        """Adds a check that raises if buckets would compute wrong results; it is called before each bucket
        and after each answer's tokens."""
        self._guards.append(require)

    def require_usable(self) -> None:
        """Raises a JaxllmError in a forked process, or if a guard does."""
        require_not_forked()
        for require in self._guards:
            require()

    def close(self) -> None:
        """Releases all buckets now: garbage collection would free their memory later."""
        self.guard(_refuse)
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()
        self._drop_ahead()
        self._compiled.clear()

    # -- compiling ------------------------------------------------------------------------------

    def _is_stored(self, bucket: Bucket) -> bool:
        store = self._models[bucket.level][1]
        return store is not None and store.key(bucket) in store.folder

    def _compile_apart(self, buckets: Iterable[Bucket], progress: Progress | None) -> None:
        """Compiles buckets to disk in another process, if they are for it; those that it cannot compile are
        compiled here."""
        works, folder = [], None
        for bucket in dict.fromkeys(buckets):
            model, store = self._models[bucket.level]
            if store is not None and store.apart and bucket not in self and not self._is_stored(bucket):
                works.append((bucket, model, store.key(bucket)))
                folder = store.folder
        if folder is None:
            return
        from jaxllm.serving.buckets.compiler import compile_apart

        def report(done: int) -> None:
            if progress is not None:
                progress("compile", done, len(works))

        self._compiled_apart.update(bucket for bucket, *_ in works)
        if why := compile_apart(works, folder, environment_facts(), report):
            _log.warning("not all buckets were compiled in another process, so they are here: %s", why)

    def _finish(self, bucket: Bucket) -> Any:
        if (future := self._pending.get(bucket)) is not None:
            self._compiled[bucket], self.bucket_ms[bucket] = future.result()
            self._pending.pop(bucket, None)
        return self._compiled[bucket]

    def _drop_ahead(self) -> None:
        for bucket in self._ahead.keys() - self._pending.keys():
            future = self._ahead.pop(bucket, None)
            if future is not None:
                future.cancel()

    def _build(self, bucket: Bucket) -> tuple[Any, float]:
        began = time.perf_counter()
        model, store = self._models[bucket.level]
        ahead = self._ahead.pop(bucket, None)
        compiled = None if ahead is None else ahead.result()
        if compiled is None and store is not None and (unpack := store.read(bucket)) is not None:
            compiled = unpack()
        if compiled is not None:
            if bucket not in self._compiled_apart:
                self.loaded.add(bucket)
        else:
            compiled = bucket.compile(model)
            if store is not None:
                store.store(bucket, compiled)
        return compiled, 1000 * (time.perf_counter() - began)


def _jax_caches() -> bool:
    settings = jax.config.values
    return bool(settings["jax_compilation_cache_dir"] and settings["jax_enable_compilation_cache"])


def _refuse() -> None:
    raise ConfigError("this engine is closed; open the model again")
