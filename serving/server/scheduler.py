"""Schedules the engine: what its next dispatch does, and how long a new call would wait.

Pure functions over a queue. Whoever calls them brings the time, in milliseconds of any clock, and carries out
what they say; every decision is made anew before every dispatch, so that a run may be interrupted between any
two of them.

The earliest deadline goes first, a foreground call's before any background call's. The deadline of a prefill
is the latest time at which its remaining chunks must begin, that of a decoding run the time at which the
reader of its text runs out of it. An app that has had more than its share of the engine lately is treated as
if its deadlines were later by so much. What has waited longer than the patience counts as foreground, so that
nothing starves.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jaxllm.errors import ConfigError
from jaxllm.options import check_options, option
from jaxllm.serving.elastic.planner import Load
from jaxllm.serving.server.calls import Priority

# Largest share of the engine's time that decoding runs are expected to take from a prefill.
_MOST_DECODING = 0.8
# A further row of a batch takes this share of a single one's time.
ROW_SHARE = 0.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Bounds of the queue, and times of calls that ask for none.

    Attributes:
      queued: most calls that wait to begin, of all apps together.
      app_queued: most of one app.
      running: most calls that have begun and not ended: each has a cache of its own.
      background_running: most of them that are background calls; the rest stays free for foreground calls.
      reserved_running: so many of `running` are for apps of which nothing runs.
      batch_rows: most runs of one decoding dispatch.
      patience_ms: a background call that got nothing for so long gets one dispatch before all others.
      foreground_ttft_ms, background_ttft_ms: time to the first token to aim at, where no objective says.
      foreground_tpot_ms, background_tpot_ms: per further token.
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
        if self.reserved_running >= self.running:
            raise ConfigError(
                f"reserved_running must be less than running, got {self.reserved_running} of {self.running}"
            )

    def ttft_ms(self, priority: Priority) -> float:
        """The time to the first token of a call without an objective."""
        return self.foreground_ttft_ms if priority == "foreground" else self.background_ttft_ms

    def tpot_ms(self, priority: Priority) -> float:
        """The time per further token of a call without an objective."""
        return self.foreground_tpot_ms if priority == "foreground" else self.background_tpot_ms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A call that waits or runs.

    Attributes:
      id: unique in the queue.
      app: that calls.
      priority: of the call.
      since_ms: when it came, or got its last dispatch.
      due_ms: when its first token, or the next ones, should be there.
      left_ms: expected time of what must be computed until then.
      rest_ms: expected time of all that it needs until it ends.
      stage: what its next dispatch does: "start" for a call that waits.
      context_bytes: most memory that chunks of the context that it continues will take; 0 for none.
      token_ms: expected time per token, of a decoding run; its limit per token is `tpot_ms`.
      tpot_ms: see `token_ms`.
      batchable: whether it may be decoded with others.
      adapter: that answers; calls with different ones are not decoded together.
      ready: whether its next dispatch need not wait for its grammar.
    """

    id: int
    app: str
    priority: Priority = "foreground"
    since_ms: float
    due_ms: float
    left_ms: float = option(0.0, above=0, below=math.inf)
    rest_ms: float = option(0.0, above=0, below=math.inf)
    stage: str = "start"
    context_bytes: int = 0
    token_ms: float = option(0.0, above=0, below=math.inf)
    tpot_ms: float = math.inf
    batchable: bool = False
    adapter: str = ""
    ready: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Queue:
    """All that a decision is made of.

    Attributes:
      now_ms: the time.
      work: calls that wait and calls that run.
      engine_ms: time of the engine that each app has had lately (see `decayed`).
      context_bytes: memory for chunks of contexts that run.
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


@dataclasses.dataclass(frozen=True)
class Action:
    """What the engine does next.

    Attributes:
      kind: "start" a call and take its first step; "step" a run: a chunk, a block or its end; "decode"
        several runs together; "idle".
      ids: of the calls.
    """

    kind: str
    ids: tuple[int, ...] = ()


def next_action(queue: Queue, options: SchedulerOptions) -> Action:
    """What the engine does next; "idle" only where nothing can be done."""
    candidates = [each for each in queue.running if each.ready]
    candidates += startable(queue, options)
    if not candidates:
        return Action("idle")
    excess = _excess_ms(queue)

    def order(each: Work) -> tuple[int, float, float, int]:
        # What is late already is not the more urgent for it, or a flood of late calls would go before all.
        latest = max(queue.now_ms, each.due_ms - each.left_ms) + excess.get(each.app, 0.0)
        return _rank(each, queue.now_ms, options), latest, each.due_ms, each.id

    # An answer that is complete keeps its client waiting for nothing, and takes next to no time.
    first = min([each for each in candidates if each.stage == "finish"] or candidates, key=order)
    if first.stage == "start":
        return Action("start", (first.id,))
    if first.stage != "decode" or not first.batchable:
        return Action("step", (first.id,))
    beside = [each for each in candidates if each.stage == "decode" and each.batchable]
    rows = sorted((each for each in beside if each.adapter == first.adapter), key=order)
    ids = tuple(each.id for each in rows[: options.batch_rows])
    return Action("decode", ids) if len(ids) > 1 else Action("step", ids)


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


def expected_load(
    queue: Queue, options: SchedulerOptions, priority: Priority, due_ms: float = math.inf
) -> Load:
    """What a new call of a priority finds, whose first token is due at `due_ms`.

    Args:
      queue: without the call.
      options: of the scheduler.
      priority: of the call.
      due_ms: its deadline; those that are due later do not go first.
    """

    def goes_first(each: Work) -> bool:
        if each.priority != priority:
            return each.priority == "foreground"
        return each.due_ms <= due_ms

    prefills = sum(each.left_ms for each in queue.work if each.stage != "decode" and goes_first(each))
    decoding = [each for each in queue.work if each.stage == "decode"]
    streams = [each for each in decoding if goes_first(each) or each.priority == priority]
    step_ms = _step_ms(streams)
    # Decoding runs are served as often as their readers need, and prefill has the rest.
    share = min(_MOST_DECODING, step_ms / min((each.tpot_ms for each in streams), default=math.inf))
    slots = _slot_ms(queue, options)
    rows = min(options.batch_rows, 1 + sum(each.batchable for each in decoding))
    return Load(waiting_ms=max(prefills, slots) / (1 - share), token_share=1 + ROW_SHARE * (rows - 1))


def retry_after_s(queue: Queue) -> float:
    """When the queue should be half as long: a whole number of seconds, at least 1."""
    left = sum(each.rest_ms for each in queue.work)
    return float(max(1, math.ceil(left / 2 / 1000)))


def queue_refusal(waiting: int, of_app: int, options: SchedulerOptions) -> str | None:
    """Why no further call of an app may wait, by the numbers of calls that wait, in all and of the app; None
    if one may."""
    if waiting >= options.queued:
        return f"{waiting} calls wait already, which is the most"
    if of_app >= options.app_queued:
        return f"{of_app} calls of this app wait already, which is the most for one app"
    return None


def decayed(engine_ms: Mapping[str, float], passed_ms: float, half_life_ms: float) -> dict[str, float]:
    """Each app's time of the engine, after some time has passed: it halves in `half_life_ms`."""
    factor = 0.5 ** (passed_ms / half_life_ms)
    return {app: each * factor for app, each in engine_ms.items() if each * factor >= 1.0}


def _fitting(waiting: Sequence[Work], most_bytes: int, taken_bytes: int) -> set[int]:
    """Which calls in contexts may begin: those whose chunks fit beside those of the ones that run, or any
    where none runs. What comes after one that does not fit waits, too, or a large one would never begin."""
    found: set[int] = set()
    for each in sorted(waiting, key=lambda each: (each.priority != "foreground", each.id)):
        if taken_bytes and each.context_bytes and taken_bytes + each.context_bytes > most_bytes:
            break
        found.add(each.id)
    return found


def _rank(each: Work, now_ms: float, options: SchedulerOptions) -> int:
    if each.priority == "foreground":
        return 1
    return 0 if now_ms - each.since_ms > options.patience_ms else 2


def _excess_ms(queue: Queue) -> dict[str, float]:
    """How much more than an equal share of the engine's time the apps that want it have had lately."""
    apps = {each.app for each in queue.work}
    if len(apps) < 2:
        return {}
    mean = sum(queue.engine_ms.get(app, 0.0) for app in apps) / len(apps)
    return {app: max(0.0, queue.engine_ms.get(app, 0.0) - mean) for app in apps}


def _step_ms(streams: Sequence[Work]) -> float:
    """The time of one token of all streams: of a batch for each adapter, and of each run that is decoded
    alone."""
    batches: dict[str, list[float]] = {}
    for each in streams:
        if each.batchable:
            batches.setdefault(each.adapter, []).append(each.token_ms)
    alone = sum(each.token_ms for each in streams if not each.batchable)
    return alone + sum(max(each) * (1 + ROW_SHARE * (len(each) - 1)) for each in batches.values())


def _slot_ms(queue: Queue, options: SchedulerOptions) -> float:
    """The time until a run ends, where no further one may begin."""
    running = queue.running
    return (
        0.0
        if len(running) < options.running - options.reserved_running
        else min(each.rest_ms for each in running)
    )
