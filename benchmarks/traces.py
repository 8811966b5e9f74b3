"""Makes request traces of apps, one JSON object a line, and replays those with questions on a service.

Apps with objectives ask the tasks' questions (ELMS, arXiv 2409.09071, section 5.1): six apps, one per
objective, Poisson arrivals, and a skew of the number of requests per app. A trace contains its questions, so
that it can be replayed without the data sets.

Apps switch between contexts (LLMS, arXiv 2403.11805, section 4, equation 5): some active contexts, called
over 72 hours in one of three patterns. Arrivals and lengths can be read from traces of real services, too.
"""

import csv
import dataclasses
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.errors import ConfigError, ContextOverflow
from jaxllm.files.atomic import atomic_file
from jaxllm.files.input_files import open_regular
from jaxllm.serving.elastic.objectives import Cost
from jaxllm.serving.evaluation.tasks import is_right
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.server.service import LLMService
from jaxllm.tasks.example import TaskExample

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
    """

    time_s: float
    app: str
    slo: Slo
    task: str
    example: TaskExample

    def __post_init__(self) -> None:
        if self.time_s < 0:
            raise ConfigError(f"a request at {self.time_s} s")


def make_trace(
    questions: Mapping[str, Sequence[TaskExample]],
    *,
    requests: int,
    skew: float = 0.0,
    rate_per_s: float = 1.0,
    seed: int = 0,
) -> list[TraceRequest]:
    """Draws a trace.

    Args:
      questions: by task; all tasks are equally likely, as are the questions of one.
      skew: app i makes requests in proportion to (i + 1)^-skew: 0 is even, a positive one gives the first
        apps more, a negative one the last.
      rate_per_s: mean arrivals per second of the Poisson process.
    """
    if not questions or not all(questions.values()):
        raise ConfigError("a trace needs questions of at least one task")
    draw = random.Random(seed)
    weights = [(place + 1) ** -skew for place in range(len(SLOS))]
    tasks, time_s, trace = sorted(questions), 0.0, []
    for _ in range(requests):
        time_s += draw.expovariate(rate_per_s)
        (place,) = draw.choices(range(len(SLOS)), weights)
        task = draw.choice(tasks)
        trace.append(
            TraceRequest(
                time_s=round(time_s, 6),
                app=f"app-{place + 1}",
                slo=SLOS[place],
                task=task,
                example=draw.choice(questions[task]),
            )
        )
    return trace


def write_trace(path: Path, trace: Iterable[TraceRequest]) -> None:
    """Writes a trace, a JSON line per call, whole or not at all."""
    write_lines(path, map(dataclasses.asdict, trace))


def read_trace(path: Path) -> list[TraceRequest]:
    """Reads a trace that `write_trace` wrote."""
    import msgspec

    return read_lines(path, msgspec.json.Decoder(TraceRequest, strict=True).decode)


_NO_COST = Cost(ttft_ms=0.0, tpot_ms=0.0, tokens=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one request.

    Attributes:
      right: whether the answer was the right one.
      met: whether the answer met its objective.
      kept_share: share of the prompt's tokens that were kept.
      source: of the plan (see `Plan`); "failed" where there is no answer, whose numbers are then all 0.
      confident: whether the plan should have met the objective with the service's confidence (see `Plan`).
      failure: why there is no answer; None where there is one.
    """

    request: TraceRequest
    right: bool = False
    met: bool = False
    cost: Cost = _NO_COST
    level: int = 0
    kept_share: float = 0.0
    source: str = "failed"
    planning_ms: float = 0.0
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
    """
    outcomes = []
    for done, request in enumerate(trace, start=1):
        try:
            answer = service.call(request.example, slo=request.slo, max_tokens=answer_tokens).result()
        except ContextOverflow as error:
            outcomes.append(Outcome(request=request, failure=str(error)))
        else:
            plan = answer.plan
            outcomes.append(
                Outcome(
                    request=request, right=is_right(request.example, answer.text), met=bool(answer.met),
                    cost=answer.cost, level=plan.level, kept_share=len(plan.kept) / plan.prompt_tokens,
                    source=plan.source, planning_ms=plan.planning_ms, confident=plan.confident,
                )
            )  # fmt: skip
        if progress is not None:
            progress("replay", done, len(trace))
    return outcomes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Totals:
    """Means over the requests of one objective, or of all.

    Attributes:
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

    def mean(some: Sequence[Outcome], value: Callable[[Outcome], float]) -> float:
        return sum(map(value, some)) / max(1, len(some))

    return Totals(
        requests=len(outcomes),
        failed=len(outcomes) - len(answered),
        accuracy=mean(outcomes, lambda each: each.right),
        met=mean(outcomes, lambda each: each.met),
        right_and_met=mean(outcomes, lambda each: each.right and each.met),
        level=mean(answered, lambda each: each.level),
        kept_share=mean(answered, lambda each: each.kept_share),
        ttft_ms=mean(answered, lambda each: each.cost.ttft_ms),
        tpot_ms=mean(answered, lambda each: each.cost.tpot_ms),
        planning_ms=mean(answered, lambda each: each.planning_ms),
    )


def totals_by_slo(outcomes: Sequence[Outcome]) -> dict[str, Totals]:
    """Means by objective, from loose to tight."""
    groups: dict[Slo, list[Outcome]] = {}
    for each in outcomes:
        groups.setdefault(each.request.slo, []).append(each)
    loose_first = sorted(groups, key=lambda slo: (-slo.ttft, -slo.tpot))
    return {str(slo): totals(groups[slo]) for slo in loose_first}


HOURS = 72.0
Lengths = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextCall:
    """One call of a switching trace.

    Attributes:
      time_s: seconds from the trace's beginning.
      context: number of the context, from 0.
      prompt_tokens, answer_tokens: that the prompt and the answer add to the context.
    """

    time_s: float
    context: int
    prompt_tokens: int
    answer_tokens: int


def _uniform(contexts: int, draw: random.Random) -> Iterator[int]:
    while True:
        yield draw.randrange(contexts)


def _markov(contexts: int, draw: random.Random) -> Iterator[int]:
    """The more recently a context was called, the likelier it is called again: the r-th in the order of last
    calls in proportion to 1/r. That order is the state of the chain."""
    recent = draw.sample(range(contexts), contexts)
    sums = list(itertools.accumulate(1 / (rank + 1) for rank in range(contexts)))
    while True:
        (rank,) = draw.choices(range(contexts), cum_weights=sums)
        recent.insert(0, recent.pop(rank))
        yield recent[0]


def _gaussian(contexts: int, draw: random.Random) -> Iterator[int]:
    """Contexts of a moderate workload are called most: they are numbered by the lengths of their calls, and
    two standard deviations reach the first and the last."""
    middle = (contexts - 1) / 2
    while True:
        context = round(draw.gauss(middle, max(middle, 0.5) / 2))
        if 0 <= context < contexts:
            yield context


# A new pattern is a function and its line here.
PATTERNS: Mapping[str, Callable[[int, random.Random], Iterator[int]]] = MappingProxyType(
    {"random": _uniform, "markov": _markov, "gaussian": _gaussian}
)


def make_switching(
    pattern: str,
    lengths: Sequence[Lengths],
    *,
    contexts: int,
    calls: int,
    seed: int = 0,
) -> list[ContextCall]:
    """Draws a trace: calls by a Poisson process, contexts by a pattern.

    Each context has a workload of its own: the lengths of real calls, by their sum, are divided among the
    contexts in order, and a context draws from its own.
    """
    if not lengths:
        raise ConfigError("a trace needs the lengths of at least one real call")
    draw, ordered = random.Random(seed), sorted(lengths, key=lambda each: (sum(each), each))
    # Of a Poisson process of so many calls.
    times = sorted(draw.uniform(0, HOURS * 3600) for _ in range(calls))
    called = itertools.islice(PATTERNS[pattern](contexts, draw), calls)
    trace = []
    for time_s, context in zip(times, called, strict=True):
        first, end = ((context + each) * len(ordered) // contexts for each in (0, 1))
        prompt, answer = draw.choice(ordered[first : max(end, first + 1)])
        trace.append(
            ContextCall(time_s=round(time_s, 3), context=context, prompt_tokens=prompt, answer_tokens=answer)
        )
    return trace


def read_azure(path: Path) -> list[tuple[float, Lengths]]:
    """The requests of a trace of Azure's LLM inference service (its CSV files: TIMESTAMP, ContextTokens,
    GeneratedTokens): seconds from the first, and (prompt, answer) tokens."""
    requests: list[tuple[float, Lengths]] = []
    first, reader = None, None
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            for row in itertools.islice(reader, MAX_ENTRIES):
                at = datetime.fromisoformat(row["TIMESTAMP"][:26])
                first = first or at
                lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
                if min(lengths) > 0:
                    requests.append(((at - first).total_seconds(), lengths))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: the trace cannot be read ({error!s:.200})") from error
    except (KeyError, TypeError, ValueError) as error:
        line = reader.line_num if reader else 1
        raise ConfigError(f"{path}, line {line}: {error!s:.200}") from error
    return requests


def read_mooncake(path: Path) -> list[tuple[float, Lengths]]:
    """The requests of Mooncake's conversation trace (JSON lines: timestamp in ms, input_length, output_length
    and hash_ids, which name the blocks of the prompt by all that precedes them), as of `read_azure`.

    A request continues a conversation if it shares blocks with it, other than the first block, which all
    requests share; it adds its prompt less the conversation's tokens so far.
    """
    of_block: dict[int, int] = {}
    conversation_tokens: list[int] = []

    def request(line: bytes) -> tuple[float, Lengths]:
        try:
            data = json.loads(line)
            time_s, blocks = float(data["timestamp"]) / 1000, [int(each) for each in data["hash_ids"]]
            prompt, answer = int(data["input_length"]), int(data["output_length"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"malformed request: {error!s:.200}") from error
        own = blocks[1:]
        context = next(
            (of_block[block] for block in reversed(own) if block in of_block), len(conversation_tokens)
        )
        if context == len(conversation_tokens):
            conversation_tokens.append(0)
        added = prompt - conversation_tokens[context] if prompt > conversation_tokens[context] else prompt
        conversation_tokens[context] = prompt + answer
        of_block.update(dict.fromkeys(own, context))
        return time_s, (max(1, added), max(1, answer))

    return read_lines(path, request)


Entry = TypeVar("Entry")
MAX_ENTRIES = 1_000_000
_MAX_LINE_BYTES = 1 << 20


def write_lines(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Writes a trace."""
    try:
        with atomic_file(path) as file:
            for each in entries:
                file.write(json.dumps(each, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: the trace cannot be written ({error.strerror})") from error


def read_lines(path: Path, parse: Callable[[bytes], Entry]) -> list[Entry]:
    """Reads a trace, each line by `parse`, which raises ValueError or ConfigError for a malformed line."""
    entries: list[Entry] = []
    try:
        with open_regular(Path(path)) as file:
            while line := file.readline(_MAX_LINE_BYTES + 1):
                if len(line) > _MAX_LINE_BYTES or len(entries) == MAX_ENTRIES:
                    raise ConfigError("the line is too long, or there are too many")
                entries.append(parse(line))
    except OSError as error:
        raise ConfigError(f"{path}: the trace cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError, ConfigError) as error:
        raise ConfigError(f"{path}, line {len(entries) + 1}: {error!s:.200}") from error
    if not entries:
        raise ConfigError(f"{path}: the trace has no request")
    return entries
