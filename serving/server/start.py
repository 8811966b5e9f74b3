"""Follows the start of a service: what it is doing, how long that will take, and what is compiled after it.

A service answers as soon as the buckets of a single answer are compiled. The others, without which answers
are only slower or requests wait, are compiled afterwards.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.errors import ConfigError, one_line
from jaxllm.serving.host.progress import Progress

_log = logging.getLogger(__name__)
_PERIOD_S = 5.0
_VERBS = {"load": "loading weights", "compile": "compiling buckets", "profile": "timing levels"}


class StartProgress:
    """The progress of a start, logged every few seconds. It is a `Progress` for the opening thread; others
    read `facts`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stage, self._began_s, self._logged_s = "", clock(), clock()
        self._facts: Mapping[str, Any] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Reports that `done` of `total` parts of a stage are done."""
        now_s = self._clock()
        if new := (stage, total) != (self._stage, self._facts.get("total")):
            self._stage, self._began_s = stage, now_s
        # Of what was loaded at once nothing can be told yet.
        left_s = (now_s - self._began_s) * (total - done) / done if done else None
        facts = {"stage": _VERBS.get(stage, stage), "done": done, "total": total}
        # Replaced, never mutated: other threads read it.
        self._facts = facts | ({} if left_s is None else {"left_s": round(left_s, 1)})
        if done < total and (new or now_s - self._logged_s >= _PERIOD_S):
            self._logged_s = now_s
            _log.info("opening the model: %s", self.text, extra=self._facts)

    @property
    def facts(self) -> Mapping[str, Any]:
        """The current stage, how many of its parts are done, and the time left; empty at first."""
        return self._facts

    @property
    def text(self) -> str:
        """`facts` as text."""
        if not (facts := self._facts):
            return "finding the model"
        done = f"{facts['stage']} ({100 * facts['done'] // max(1, facts['total'])} %)"
        return done + (f", about {facts['left_s']:.0f} s left" if facts.get("left_s") else "")


class _Stopped(Exception):
    """The service is closing."""


class LaterBuckets:
    """Compiles buckets that a service can do without at first, in a thread of its own.

    Args:
      keep: compiles buckets to disk, with a progress (see `BucketTable.keep`).
      groups: buckets that are compiled together; requests that need one wait for its group at most.
      load: called in the thread at the end.
    """

    def __init__(
        self,
        keep: Callable[[Sequence[Any], Progress], None],
        groups: Sequence[Sequence[Any]],
        load: Callable[[], None] = lambda: None,
    ) -> None:
        self._keep, self._groups, self._load = keep, groups, load
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="later-buckets", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wait(self) -> None:
        """Waits until all are compiled, if it was started."""
        if self._thread.ident is not None:
            self._thread.join()

    def close(self) -> None:
        """Ends the thread after the bucket that is being compiled."""
        self._stopping.set()
        self.wait()

    def _run(self) -> None:
        progress, began_s = StartProgress(), time.monotonic()
        try:
            for group in self._groups:
                self._keep(group, lambda *done: self._report(progress, *done))
            self._load()
        except _Stopped:
            return
        except Exception as error:
            # Each is compiled when a request needs it.
            _log.warning("not all buckets could be compiled in advance: %s", one_line(error))
            return
        if (took_s := time.monotonic() - began_s) >= 1:
            _log.info("all buckets are compiled, %.0f s after the first answer could begin", took_s)

    def _report(self, progress: StartProgress, stage: str, done: int, total: int) -> None:
        if self._stopping.is_set():
            raise _Stopped
        progress(stage, done, total)


def later_buckets(engine: Any, *, copies: bool) -> LaterBuckets:
    """What only some requests of a service need: batches, embeddings, scores, and with `copies` those of
    caches of ended answers."""
    # Imported here: exported programs run without JAX.
    from jaxllm.serving.runners.scorer import Scorer

    buckets, some, scores = engine.runner.buckets, list[Any](), list[Any]()
    with contextlib.suppress(ConfigError):
        # Streamed weights support neither; requests for them are refused.
        scorer: Scorer = Scorer(engine.runner)
        some, scores = scorer.embedding_buckets(), scorer.scoring_buckets()
    if copies:
        some += [each for level in engine.levels for each in engine.runner_at(level).fork_buckets()]
    groups = [engine.model.later_buckets(), some, scores]
    return LaterBuckets(buckets.keep, groups, lambda: buckets.fill([], later=some))
