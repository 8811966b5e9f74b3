"""Compiles the buckets of a model before the first request; nothing else compiles.

Each bucket is compiled ahead of time, or read from disk if an earlier process stored it (`store.py`). A
missing bucket raises `BucketMissing`: it is never compiled during a user's request.
"""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxllm.config import WHOLE
from jaxllm.errors import BucketMissing, ConfigError
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.store import BucketStore
from jaxllm.serving.host.forked import require_not_forked
from jaxllm.serving.host.machine import usable_cores
from jaxllm.serving.host.progress import Progress

_PROGRESS_S = 1.0


class BucketTable:
    """The compiled buckets of all levels of a model.

    Attributes:
      lock: reentrant lock of threads that run buckets or change their arguments.
      bucket_ms: time to trace and compile each bucket, or to load it (several are built in parallel).
      loaded: buckets that were loaded from disk.
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
        self._models: dict[int, tuple[Any, BucketStore | None]] = {WHOLE: (model, store)}
        self._compiled: dict[Bucket, Any] = {}
        self._pending: dict[Bucket, concurrent.futures.Future] = {}
        self._ahead: dict[Bucket, concurrent.futures.Future] = {}
        self._guards: list[Callable[[], None]] = []

    def add_level(self, level: int, model: Any, store: BucketStore | None = None) -> None:
        """Adds a level: the argument of `Bucket.lower` for its buckets, and their store."""
        self._models[level] = model, store

    def store(self, level: int = WHOLE) -> BucketStore | None:
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
        found = {}
        for bucket in dict.fromkeys(buckets):
            store = self._models[bucket.level][1]
            unpack = None if store is None or bucket in self else store.read(bucket)
            if unpack is not None:
                found[bucket] = unpack
        if found:
            pool = concurrent.futures.ThreadPoolExecutor(usable_cores())
            self._ahead.update({bucket: pool.submit(unpack) for bucket, unpack in found.items()})
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
        self._begin([*missing, *later])
        self._drop_ahead()
        waiting = {self._pending[bucket]: bucket for bucket in missing}
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

    def _begin(self, buckets: Sequence[Bucket]) -> None:
        """Starts threads that build new buckets, and those that failed, in this order."""
        for bucket, future in [*self._pending.items()]:
            if future.cancelled() or (future.done() and future.exception() is not None):
                del self._pending[bucket]
        new = [bucket for bucket in dict.fromkeys(buckets) if bucket not in self]
        if not new:
            return
        pool = concurrent.futures.ThreadPoolExecutor(usable_cores())
        self._pending.update({bucket: pool.submit(self._build, bucket) for bucket in new})
        # Its threads end when the queue is empty.
        pool.shutdown(wait=False)

    def _finish(self, bucket: Bucket) -> Any:
        compiled, self.bucket_ms[bucket] = self._pending.pop(bucket).result()
        self._compiled[bucket] = compiled
        return compiled

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
        if compiled is None and store is not None:
            compiled = store.load(bucket)
        if compiled is not None:
            self.loaded.add(bucket)
        else:
            compiled = bucket.compile(model)
            if store is not None:
                store.store(bucket, compiled)
        return compiled, 1000 * (time.perf_counter() - began)


def _refuse() -> None:
    raise ConfigError("this engine is closed; open the model again")
