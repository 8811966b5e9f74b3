"""Schedules the engine: decides its next dispatch, and estimates the waiting time of a new call.

Pure functions over a queue. Callers pass the time, in milliseconds of any clock, and carry out the
decisions; each decision is made before one dispatch, so that runs can be interrupted between any two.

The earliest deadline goes first, foreground before background. The deadline of a prefill is the latest time
to begin its remaining chunks, that of a decoding run the time at which its reader runs out of text. An app
that has had more than its share of the engine lately has its deadlines delayed by the excess. A call that
has waited longer than the patience counts as foreground, against starvation.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxllm.errors import ConfigError
from jaxllm.options import check_options, option
from jaxllm.serving.elastic.planner import Load
from jaxllm.serving.server.calls import Priority

# Maximum share of the engine's time that decoding runs are expected to take from a prefill.
_MOST_DECODING = 0.8
# Cost of a further row of a batch, relative to a single row's.
ROW_SHARE = 0.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Limits of the queue, and target times of calls without an objective.

    Attributes:
      queued: maximum number of calls that wait to begin, over all apps.
      app_queued: the same for one app.
      running: maximum number of running calls: each has a cache.
      background_running: maximum number of running background calls; the rest is reserved for foreground
        calls.
      reserved_running: number of `running` that is reserved for apps without running calls.
      batch_rows: maximum number of runs of one decode dispatch.
      patience_ms: time after which a background call that got nothing gets one dispatch before all others.
      foreground_ttft_ms, background_ttft_ms: target time to the first token without an objective.
      foreground_tpot_ms, background_tpot_ms: target time per further token without an objective.
    """

    queued: int = option(64, low=1)
    app_queued: int = option(32, low=1)
    running: int = option(10, low=1)
    background_running: int = option(6, low=1)
    reserved_running: int = option(2, low=0)
    batch_rows: int = option(8, low=1)
    patience_ms: float = option(10_000.0, above=0, below=math.inf)
    foreground_ttft_ms: float = option(1_000.0, above=0, below=math.inf)
    background_ttft_ms: float = option(60_000.0, above=0, below=math.inf)
    foreground_tpot_ms: float = option(200.0, above=0, below=math.inf)
    background_tpot_ms: float = option(2_000.0, above=0, below=math.inf)

    def __post_init__(self) -> None:
        check_options(self)
        if (reserved := self.reserved_running) >= self.running:
            raise ConfigError(f"reserved_running must be less than running, got {reserved} of {self.running}")

    def ttft_ms(self, priority: Priority) -> float:
        """The time to the first token of a call without an objective."""
        return self.foreground_ttft_ms if priority == "foreground" else self.background_ttft_ms

    def tpot_ms(self, priority: Priority) -> float:
        """The time per further token of a call without an objective."""
        return self.foreground_tpot_ms if priority == "foreground" else self.background_tpot_ms


@dataclasses.dataclass(kw_only=True, eq=False)
class Work:
    """A waiting or running call, as the scheduler sees it; the caller keeps it up to date.

    Attributes:
      id: id, unique in the queue.
      app: app of the call.
      priority: priority of the call.
      since_ms: time of its arrival, or of its last dispatch.
      due_ms: deadline of its first or next tokens.
      left_ms: expected time of the computation until then.
      rest_ms: expected time of the computation until its end.
      stage: stage of its next dispatch: "start" for a waiting call.
      context_bytes: maximum memory of the chunks of its context; 0 for none.
      token_ms: expected time per token of a decoding run; its limit is `tpot_ms`.
      tpot_ms: see `token_ms`.
      batchable: whether it can be decoded in a batch.
      adapter: its adapter; a batch has one adapter.
      ready: whether its next dispatch need not wait for its grammar.
    """

    id: int
    app: str
    priority: Priority = "foreground"
    since_ms: float
    due_ms: float
    left_ms: float = 0.0
    rest_ms: float = 0.0
    stage: str = "start"
    context_bytes: int = 0
    token_ms: float = 0.0
    tpot_ms: float = math.inf
    batchable: bool = False
    adapter: str = ""
    ready: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Queue:
    """The input of a decision.

    Attributes:
      now_ms: current time.
      work: waiting and running calls.
      engine_ms: recent engine time of each app (see `decayed`).
      context_bytes: memory for chunks of running contexts.
    """

    now_ms: float
    work: Sequence[Work]
    engine_ms: Mapping[str, float] = dataclasses.field(default_factory=dict)
    context_bytes: int = 0

    @property
    def waiting(self) -> list[Work]:
        """Calls that have not begun."""
        return [each for each in self.work if each.stage == "start"]

    @property
    def running(self) -> list[Work]:
        """Calls that have begun."""
        return [each for each in self.work if each.stage != "start"]


def next_dispatch(queue: Queue, options: SchedulerOptions) -> list[Work]:
    """Decides the engine's next dispatch: the first step of a waiting call, a step of a run (a chunk, a block
    or its end), or of a batch of decoding runs; empty only if nothing can be done."""
    candidates = [each for each in queue.running if each.ready]
    candidates += startable(queue, options)
    if not candidates:
        return []
    excess = _excess_ms(queue)

    def order(each: Work) -> tuple[int, float, float, int]:
        starved = queue.now_ms - each.since_ms > options.patience_ms
        rank = 1 if each.priority == "foreground" else 0 if starved else 2
        # Late calls do not gain urgency: a flood of them would go before all others.
        latest = max(queue.now_ms, each.due_ms - each.left_ms) + excess.get(each.app, 0.0)
        return rank, latest, each.due_ms, each.id

    # Finish complete answers first: their clients wait, and it costs next to nothing.
    first = min([each for each in candidates if each.stage == "finish"] or candidates, key=order)
    if first.stage != "decode" or not first.batchable:
        return [first]
    beside = [each for each in candidates if each.stage == "decode" and each.batchable]
    rows = sorted((each for each in beside if each.adapter == first.adapter), key=order)
    return rows[: options.batch_rows]


def startable(queue: Queue, options: SchedulerOptions) -> list[Work]:
    """The calls that may begin now."""
    running = queue.running
    free = options.running - len(running)
    background = options.background_running - sum(each.priority == "background" for each in running)
    shared = free - options.reserved_running
    apps = {each.app for each in running}
    found = [
        each
        for each in queue.waiting
        if each.ready
        and (free if each.app not in apps else shared) > 0
        and (each.priority == "foreground" or background > 0)
    ]
    fitting = _fitting(found, queue.context_bytes, sum(each.context_bytes for each in running))
    return [each for each in found if not each.context_bytes or each.id in fitting]


def expected_load(queue: Queue, options: SchedulerOptions, priority: Priority) -> Load:
    """The expected load for a call of a priority that begins now, and is not in the queue. Others' prefills
    go before a background call only, if they are of foreground calls."""
    decoding = [each for each in queue.work if each.stage == "decode"]
    prefills = 0.0
    if priority == "background":
        others = (each for each in queue.work if each.stage != "decode" and each.priority == "foreground")
        prefills = sum(each.left_ms for each in others)
    streams = [each for each in decoding if each.priority in ("foreground", priority)]
    step_ms = _step_ms(streams)
    # Decoding runs are served as often as their readers need; prefill gets the rest.
    share = min(_MOST_DECODING, step_ms / min((each.tpot_ms for each in streams), default=math.inf))
    # The time until a run ends, if no further one may begin.
    slots = 0.0
    if len(running := queue.running) >= options.running - options.reserved_running:
        slots = min(each.rest_ms for each in running)
    rows = min(options.batch_rows, 1 + sum(each.batchable for each in decoding))
    return Load(waiting_ms=max(prefills, slots) / (1 - share), token_share=1 + ROW_SHARE * (rows - 1))


def retry_after_s(queue: Queue) -> float:
    """Estimated time in which the queue halves: a whole number of seconds, at least 1."""
    left = sum(each.rest_ms for each in queue.work)
    return float(max(1, math.ceil(left / 2 / 1000)))


def queue_refusal(queue: Queue, app: str, options: SchedulerOptions) -> str | None:
    """Why no further call of an app may wait; None if one may."""
    apps = [each.app for each in queue.waiting]
    if len(apps) >= options.queued:
        return f"{len(apps)} calls wait already, the maximum"
    if (of_app := apps.count(app)) >= options.app_queued:
        return f"{of_app} calls of this app wait already, the maximum for one app"
    return None


def decayed(engine_ms: Mapping[str, float], passed_ms: float, half_life_ms: float) -> dict[str, float]:
    """Each app's engine time after some time has passed: it halves in `half_life_ms`."""
    factor = 0.5 ** (passed_ms / half_life_ms)
    return {app: each * factor for app, each in engine_ms.items() if each * factor >= 1.0}


def _fitting(waiting: Sequence[Work], most_bytes: int, taken_bytes: int) -> set[int]:
    """The calls in contexts that may begin: those whose chunks fit next to those of running ones, or any if
    none runs. Calls after one that does not fit wait, too; otherwise a large one would never begin."""
    found: set[int] = set()
    for each in sorted(waiting, key=lambda each: (each.priority != "foreground", each.id)):
        if taken_bytes and each.context_bytes and taken_bytes + each.context_bytes > most_bytes:
            break
        found.add(each.id)
    return found


def _excess_ms(queue: Queue) -> dict[str, float]:
    """The excess of each app's recent engine time over an equal share, among apps in the queue."""
    apps = {each.app for each in queue.work}
    if len(apps) < 2:
        return {}
    mean = sum(queue.engine_ms.get(app, 0.0) for app in apps) / len(apps)
    return {app: max(0.0, queue.engine_ms.get(app, 0.0) - mean) for app in apps}


def _step_ms(streams: Sequence[Work]) -> float:
    """The time of one token of all streams: of a batch per adapter, plus each unbatched run."""
    batches: dict[str, list[float]] = {}
    for each in streams:
        if each.batchable:
            batches.setdefault(each.adapter, []).append(each.token_ms)
    alone = sum(each.token_ms for each in streams if not each.batchable)
    return alone + sum(max(each) * (1 + ROW_SHARE * (len(each) - 1)) for each in batches.values())
