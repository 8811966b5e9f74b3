"""The one place that compiles: buckets of one model, filled before the first request.

Every bucket is compiled ahead of time, or read from disk where an earlier process left it (`store.py`). One
that the table lacks raises `BucketMissing` instead of being compiled under a user's request.
"""

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxllm.config import WHOLE
from jaxllm.errors import BucketMissing, ConfigError
from serving.buckets.bucket import Bucket
from serving.buckets.store import BucketStore
from serving.host.forked import require_not_forked
from serving.host.machine import usable_cores
from serving.host.progress import Progress

_PROGRESS_S = 1.0


class BucketTable:
    """The compiled buckets of a model, of all of its levels.

    Attributes:
      lock: taken by whoever runs buckets, or changes what they take; a thread may take it again.
      bucket_ms: time to trace and compile each bucket, or to read it (several are built at a time).
      loaded: those buckets that were read from disk.
      build_ms: time spent waiting for buckets, in all.
    """

    def __init__(self, model: Any = None, store: BucketStore | None = None) -> None:
        """Makes an empty table.

        Args:
          model: what buckets of the whole model are lowered from (see `Bucket.lower`).
          store: keeps them for later processes; None keeps none.
        """
        self.lock = threading.RLock()
        self.bucket_ms: dict[Bucket, float] = {}
        self.loaded: set[Bucket] = set()
        self.build_ms = 0.0
        self._models: dict[int, tuple[Any, BucketStore | None]] = {WHOLE: (model, store)}
        self._compiled: dict[Bucket, Any] = {}
        self._pending: dict[Bucket, concurrent.futures.Future] = {}
        self._guards: list[Callable[[], None]] = []

    def add_level(self, level: int, model: Any, store: BucketStore | None = None) -> None:
        """Says what buckets of one more level are lowered from, and where they are kept."""
        self._models[level] = model, store

    def store(self, level: int = WHOLE) -> BucketStore | None:
        """Where a level's buckets are kept for later processes, if they are."""
        return self._models[level][1]

    def __contains__(self, bucket: Bucket) -> bool:
        """Whether a bucket is there, or about to be."""
        return bucket in self._compiled or bucket in self._pending

    def is_ready(self, bucket: Bucket) -> bool:
        """Whether a bucket can run at once."""
        return bucket in self._compiled

    def fill(
        self, buckets: Iterable[Bucket], progress: Progress | None = None, *, later: Iterable[Bucket] = ()
    ) -> None:
        """Gets buckets that the table lacks, several at a time: from disk, else by compiling them.

        Args:
          buckets: to wait for.
          progress: called with ("compile", done, total) as they get ready, and at times until then.
          later: to go on with in the background; a call that needs one waits for it.
        """
        missing = [bucket for bucket in dict.fromkeys(buckets) if bucket not in self._compiled]
        began = time.perf_counter()
        self._begin([*missing, *later])
        waiting = {self._pending[bucket]: bucket for bucket in missing}
        try:
            while waiting:
                ready, _ = concurrent.futures.wait(waiting, _PROGRESS_S, concurrent.futures.FIRST_COMPLETED)
                for future in ready:
                    self._finish(waiting.pop(future))
                if progress is not None:
                    progress("compile", len(missing) - len(waiting), len(missing))
        except BaseException:
            # Perhaps an interrupt: what no thread has begun must not hold up the end of the process.
            for future in self._pending.values():
                future.cancel()
            raise
        self.build_ms += 1000 * (time.perf_counter() - began)

    def fill_here(self, buckets: Iterable[Bucket]) -> None:
        """Gets buckets in this thread, one after the other: what is set for it alone holds for them."""
        began = time.perf_counter()
        for bucket in buckets:
            if not self.is_ready(bucket):
                self._compiled[bucket], self.bucket_ms[bucket] = self._build(bucket)
        self.build_ms += 1000 * (time.perf_counter() - began)

    def get(self, bucket: Bucket) -> Any:
        """A compiled bucket, which takes and gives what its family's `lower` says.

        Raises:
          BucketMissing: the table was not filled with it.
          JaxllmError: see `require_usable`.
        """
        self.require_usable()
        compiled = self._compiled.get(bucket)
        if compiled is None and bucket in self._pending:
            compiled = self._finish(bucket)
        if compiled is None:
            raise BucketMissing(f"{bucket} was not compiled; fill the table with it before the first request")
        return compiled

    # -- whether they may be used -----------------------------------------------------------------

    def guard(self, require: Callable[[], None]) -> None:
        """Has `require`, which raises where buckets would compute something else than they should, asked
        before each bucket and behind each answer's tokens."""
        self._guards.append(require)

    def require_usable(self) -> None:
        """Raises a JaxllmError in a forked process, and where a guard does."""
        require_not_forked()
        for require in self._guards:
            require()

    def close(self) -> None:
        """Lets go of all buckets, whose memory would else be free only when the collector comes by."""
        self.guard(_refuse)
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()
        self._compiled.clear()

    # -- compiling them -------------------------------------------------------------------------

    def _begin(self, buckets: Sequence[Bucket]) -> None:
        """Has threads build those buckets that nobody has asked for yet, or that failed, in this order."""
        for bucket in [bucket for bucket, future in self._pending.items() if _failed(future)]:
            del self._pending[bucket]
        new = [bucket for bucket in dict.fromkeys(buckets) if bucket not in self]
        if not new:
            return
        pool = concurrent.futures.ThreadPoolExecutor(usable_cores())
        self._pending.update({bucket: pool.submit(self._build, bucket) for bucket in new})
        # Its threads end when they have nothing left to do.
        pool.shutdown(wait=False)

    def _finish(self, bucket: Bucket) -> Any:
        """Waits for a bucket that is being built and puts it into the table."""
        compiled, self.bucket_ms[bucket] = self._pending.pop(bucket).result()
        self._compiled[bucket] = compiled
        return compiled

    def _build(self, bucket: Bucket) -> tuple[Any, float]:
        began = time.perf_counter()
        model, store = self._models[bucket.level]
        compiled = None if store is None else store.load(bucket)
        if compiled is not None:
            self.loaded.add(bucket)
        else:
            compiled = bucket.compile(model)
            if store is not None:
                store.store(bucket, compiled)
        return compiled, 1000 * (time.perf_counter() - began)


def _refuse() -> None:
    raise ConfigError("this engine is closed; open the model again")


def _failed(future: concurrent.futures.Future) -> bool:
    return future.cancelled() or (future.done() and future.exception() is not None)
