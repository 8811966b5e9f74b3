"""Makes request traces of apps that ask the tasks' questions, and replays them on a service.

ELMS (arXiv 2409.09071, section 5.1): six apps, one per objective, Poisson arrivals, and a skew of the number
of requests per app. A trace contains its questions, so that it can be replayed without the data sets.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.errors import ConfigError, ContextOverflow
from jaxllm.tasks.example import TaskExample
from serving.evaluation.tasks import is_right
from serving.host.progress import Progress
from serving.planned_answer import PlannedAnswer
from serving.planning.objectives import Cost
from serving.service import LLMService
from serving.traces.files import MAX_ENTRIES, read_lines, write_lines

# The multiple-choice tasks of a trace by default.
TRACE_TASKS = ("sentiment", "news", "emotion", "ui-step", "api-choice")
ANSWER_TOKENS = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One call of a trace.

    Attributes:
      time_s: seconds from the trace's beginning.
      app: that calls.
      slo: its objective.
      task: of the question.
      example: the question.
    """

    time_s: float
    app: str
    slo: Slo
    task: str
    example: TaskExample

    def to_json(self) -> dict[str, Any]:
        """A plain dict for `from_json`."""
        return {**dataclasses.asdict(self), "slo": str(self.slo)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TraceRequest":
        """Reads a dict that `to_json` made.

        Raises:
          ConfigError: it is malformed.
        """
        try:
            example: dict[str, Any] = {
                name: tuple(map(_text, value)) if isinstance(value, list) else _text(value)
                for name, value in data["example"].items()
            }
            time_s = float(data["time_s"])
            if not 0 <= time_s < float("inf"):
                raise ConfigError(f"a request at {time_s} s")
            return cls(
                time_s=time_s,
                app=_text(data["app"]),
                slo=Slo.parse(data["slo"]),
                task=_text(data["task"]),
                example=TaskExample(**example),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"malformed request: {error!s:.200}") from error


def _text(value: Any) -> str:
    """A text of a trace.

    Raises:
      TypeError: it is not a text.
      UnicodeEncodeError: it has no UTF-8 form.
    """
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not text")
    value.encode()
    return value


def make_trace(
    questions: Mapping[str, Sequence[TaskExample]],
    *,
    requests: int,
    slos: Sequence[Slo] = SLOS,
    skew: float = 0.0,
    rate_per_s: float = 1.0,
    seed: int = 0,
) -> list[TraceRequest]:
    """Draws a trace.

    Args:
      questions: by task; all tasks are equally likely, as are the questions of one.
      requests: number of requests.
      slos: of the apps, one app each.
      skew: app i makes requests in proportion to (i + 1)^-skew: 0 is even, a positive one gives the first
        apps more, a negative one the last.
      rate_per_s: mean arrivals per second of the Poisson process.
      seed: of the draw.

    Raises:
      ConfigError: there are no questions, or a number is out of its domain.
    """
    if not questions or not all(questions.values()):
        raise ConfigError("a trace needs questions of at least one task")
    if not 1 <= requests <= MAX_ENTRIES:
        raise ConfigError(f"a trace has 1 to {MAX_ENTRIES} requests, got {requests}")
    if not 0 < rate_per_s < float("inf") or not -100 <= skew <= 100:
        raise ConfigError(f"rate {rate_per_s} must be above 0, and skew {skew} in [-100, 100]")
    draw = random.Random(seed)
    weights = [(place + 1) ** -skew for place in range(len(slos))]
    tasks, time_s, trace = sorted(questions), 0.0, []
    for _ in range(requests):
        time_s += draw.expovariate(rate_per_s)
        (place,) = draw.choices(range(len(slos)), weights)
        task = draw.choice(tasks)
        trace.append(
            TraceRequest(
                time_s=round(time_s, 6),
                app=f"app-{place + 1}",
                slo=slos[place],
                task=task,
                example=draw.choice(questions[task]),
            )
        )
    return trace


def write_trace(path: Path, trace: Iterable[TraceRequest]) -> None:
    """Writes a trace, a JSON line per request, whole or not at all.

    Raises:
      ConfigError: it cannot be written.
    """
    write_lines(path, (each.to_json() for each in trace))


def read_trace(path: Path) -> list[TraceRequest]:
    """Reads a trace that `write_trace` wrote.

    Raises:
      ConfigError: it cannot be read, is malformed, or too long.
    """
    return read_lines(path, TraceRequest.from_json)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one request.

    Attributes:
      request: of the trace.
      right: whether the answer was the right one.
      met: whether the answer met its objective.
      cost: of the answer.
      level: that answered.
      kept_share: share of the prompt's tokens that were kept.
      source: of the plan (see `Plan`); "failed" where there is no answer, whose numbers are then all 0.
      planning_ms: time to plan.
      confident: whether the plan should have met the objective with the service's confidence (see `Plan`).
      failure: why there is no answer; None where there is one.
    """

    request: TraceRequest
    right: bool
    met: bool
    cost: Cost
    level: int
    kept_share: float
    source: str
    planning_ms: float
    confident: bool = False
    failure: str | None = None


def replay(
    service: LLMService,
    trace: Sequence[TraceRequest],
    *,
    answer_tokens: int = ANSWER_TOKENS,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Makes a trace's calls one after another, each as soon as the one before has ended: this measures the
    service, not a queue.

    A request that does not fit the context fails: it is neither right nor in time.

    Args:
      service: that answers.
      trace: the requests.
      answer_tokens: most tokens of an answer.
      progress: called with ("replay", requests done, requests in all).
    """
    outcomes = []
    for done, request in enumerate(trace, start=1):
        try:
            answer = service.call(request.example, slo=request.slo, max_tokens=answer_tokens).result()
            outcomes.append(outcome_of(request, answer))
        except ContextOverflow as error:
            outcomes.append(failed(request, str(error)))
        if progress is not None:
            progress("replay", done, len(trace))
    return outcomes


def outcome_of(request: TraceRequest, answer: PlannedAnswer) -> Outcome:
    """The outcome of a finished answer."""
    plan = answer.plan
    return Outcome(
        request=request,
        right=is_right(request.example, answer.text),
        met=answer.met,
        cost=answer.cost,
        level=plan.level,
        kept_share=len(plan.kept) / plan.prompt_tokens,
        source=plan.source,
        planning_ms=plan.planning_ms,
        confident=plan.confident,
    )


def failed(request: TraceRequest, failure: str) -> Outcome:
    """The outcome of a request without an answer."""
    return Outcome(
        request=request, right=False, met=False, cost=Cost(ttft_ms=0.0, tpot_ms=0.0, tokens=0), level=0,
        kept_share=0.0, source="failed", planning_ms=0.0, failure=failure,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Totals:
    """Means over the requests of one objective, or of all.

    Attributes:
      requests: number of requests.
      failed: number of requests without an answer.
      accuracy: share of right answers, in time or not.
      met: share that met the objective, right or not.
      right_and_met: share of right answers that met the objective.
      level, kept_share, ttft_ms, tpot_ms, planning_ms: means over answered requests; 0 if there are none.
    """

    requests: int
    failed: int
    accuracy: float
    met: float
    right_and_met: float
    level: float
    kept_share: float
    ttft_ms: float
    tpot_ms: float
    planning_ms: float


def totals(outcomes: Sequence[Outcome]) -> Totals:
    """Means over at least one outcome."""
    answered = [each for each in outcomes if each.failure is None]

    def share(value: Callable[[Outcome], bool]) -> float:
        return sum(map(value, outcomes)) / len(outcomes)

    def mean(value: Callable[[Outcome], float]) -> float:
        return sum(map(value, answered)) / max(1, len(answered))

    return Totals(
        requests=len(outcomes),
        failed=len(outcomes) - len(answered),
        accuracy=share(lambda each: each.right),
        met=share(lambda each: each.met),
        right_and_met=share(lambda each: each.right and each.met),
        level=mean(lambda each: each.level),
        kept_share=mean(lambda each: each.kept_share),
        ttft_ms=mean(lambda each: each.cost.ttft_ms),
        tpot_ms=mean(lambda each: each.cost.tpot_ms),
        planning_ms=mean(lambda each: each.planning_ms),
    )


def totals_by_slo(outcomes: Sequence[Outcome]) -> dict[str, Totals]:
    """Means by objective, from loose to tight."""
    groups: dict[Slo, list[Outcome]] = {}
    for each in outcomes:
        groups.setdefault(each.request.slo, []).append(each)
    loose_first = sorted(groups, key=lambda slo: (-slo.ttft, -slo.tpot))
    return {str(slo): totals(groups[slo]) for slo in loose_first}
