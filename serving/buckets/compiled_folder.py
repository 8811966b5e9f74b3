"""Caches compiled buckets on disk, so that a process starts in the time of loading them.

XLA takes seconds to compile what it loads back in tens of milliseconds. An entry is one file,

    header   magic, version, key, length and xxh3_128 of the payload
    payload  the compiled bucket as `jax.experimental.serialize_executable` writes it

named by the key of its bucket (`store.py`). If anything is wrong with an entry or its folder, the bucket is
compiled instead: this cache never makes a request fail.

A compiled bucket is machine code: loading one runs code from its file. No checksum makes that safe: only
this user can have written the file (`user_cache.py`). The checksum detects damage.
"""

import contextlib
import logging
import os
import pickle
import struct
import threading
from pathlib import Path

import jax
import xxhash
from jax.experimental import serialize_executable

from jaxllm.errors import ConfigError
from jaxllm.files.atomic import atomic_file, remove_abandoned
from jaxllm.serving.host.machine import Device
from jaxllm.serving.host.user_cache import (
    cache_folder,
    clear_entry,
    make_private_folder,
    private_file,
    private_folder,
)

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

    def load(self, key: str, device: Device | None = None) -> jax.stages.Compiled | None:
        """The compiled bucket of a key for a device (the first one by default); None if no entry can be
        used."""
        payload = self.payload(key)
        return None if payload is None else self.unpacked(key, payload, device)

    def payload(self, key: str) -> bytes | None:
        """The payload of a key's entry, checked; None if no entry can be used."""
        try:
            return self._read(key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, struct.error) as error:
            _log.debug("%s: %s", self._path(key), error)
            return None

    def unpacked(self, key: str, payload: bytes, device: Device | None = None) -> jax.stages.Compiled | None:
        """The compiled bucket of a `payload` for a device (see `load`)."""
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
