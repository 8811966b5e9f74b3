"""Makes and reads traces of apps that switch between contexts: the time, context and lengths of each call.

LLMS (arXiv 2403.11805, section 4, equation 5): some active contexts, called over 72 hours in one of three
patterns. Lengths are drawn from those of real calls. Traces of real services can be read instead; their
requests come much faster and are much longer, so that they are slowed down and scaled.
"""

import csv
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxllm.errors import ConfigError
from serving.traces.files import MAX_ENTRIES, read_lines, write_lines

HOURS = 72.0
MAX_CONTEXTS = 100_000
_MAX_TOKENS = 1 << 24
# Mooncake: number of first blocks that all requests share.
_SHARED_BLOCKS = 1

Lengths = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextCall:
    """One call of a switching trace.

    Attributes:
      time_s: seconds from the trace's beginning.
      context: number of the context, from 0.
      prompt_tokens: that the prompt adds to the context.
      answer_tokens: that the answer adds.
    """

    time_s: float
    context: int
    prompt_tokens: int
    answer_tokens: int

    def __post_init__(self) -> None:
        counts = (self.context, self.prompt_tokens, self.answer_tokens)
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in counts):
            raise ConfigError(f"a call's context and tokens are whole numbers, got {counts}")
        if not 0 <= self.context < MAX_CONTEXTS:
            raise ConfigError(f"contexts are numbered from 0 to {MAX_CONTEXTS - 1}, got {self.context}")
        if not 1 <= self.prompt_tokens <= _MAX_TOKENS or not 1 <= self.answer_tokens <= _MAX_TOKENS:
            raise ConfigError(f"a call has 1 to {_MAX_TOKENS} tokens on either side, got {counts[1:]}")
        if not 0 <= self.time_s < float("inf"):
            raise ConfigError(f"a call at {self.time_s} s")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ContextCall":
        """Reads the dict of its fields.

        Raises:
          ConfigError: it is malformed.
        """
        try:
            return cls(**{**data, "time_s": float(data["time_s"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"malformed call: {error!s:.200}") from error


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
    hours: float = HOURS,
    seed: int = 0,
) -> list[ContextCall]:
    """Draws a trace: calls by a Poisson process, contexts by a pattern.

    Each context has a workload of its own: the lengths of real calls, by their sum, are divided among the
    contexts in order, and a context draws from its own.

    Args:
      pattern: one of `PATTERNS`.
      lengths: (prompt, answer) tokens of real calls.
      contexts: number of active contexts.
      calls: number of calls.
      hours: length of the trace.
      seed: of the draw.

    Raises:
      ConfigError: an argument is out of its domain.
    """
    if pattern not in PATTERNS:
        raise ConfigError(f"there is no pattern {pattern!r}; the patterns are {', '.join(PATTERNS)}")
    if not lengths:
        raise ConfigError("a trace needs the lengths of at least one real call")
    if not 1 <= contexts <= MAX_CONTEXTS or not 1 <= calls <= MAX_ENTRIES:
        raise ConfigError(
            f"a trace has 1 to {MAX_CONTEXTS} contexts and 1 to {MAX_ENTRIES} calls, got {contexts} and "
            f"{calls}"
        )
    if not 0 < hours < float("inf"):
        raise ConfigError(f"a trace lasts some hours, got {hours}")
    draw, ordered = random.Random(seed), sorted(lengths, key=lambda each: (sum(each), each))
    # Of a Poisson process of so many calls.
    times = sorted(draw.uniform(0, hours * 3600) for _ in range(calls))
    called = itertools.islice(PATTERNS[pattern](contexts, draw), calls)
    trace = []
    for time_s, context in zip(times, called, strict=True):
        first, end = ((context + each) * len(ordered) // contexts for each in (0, 1))
        prompt, answer = draw.choice(ordered[first : max(end, first + 1)])
        trace.append(
            ContextCall(time_s=round(time_s, 3), context=context, prompt_tokens=prompt, answer_tokens=answer)
        )
    return trace


def write_switching(path: Path, trace: Iterable[ContextCall]) -> None:
    """Writes a trace, a JSON line per call, whole or not at all.

    Raises:
      ConfigError: it cannot be written.
    """
    write_lines(path, map(dataclasses.asdict, trace))


def read_switching(path: Path) -> list[ContextCall]:
    """Reads a trace that `write_switching` wrote.

    Raises:
      ConfigError: it cannot be read, is malformed, or too long.
    """
    return read_lines(path, ContextCall.from_json)


def read_azure_lengths(path: Path) -> list[Lengths]:
    """(prompt, answer) tokens of the requests of a trace (see `read_azure`)."""
    return [lengths for _, lengths in read_azure(path)]


def read_azure(path: Path) -> list[tuple[float, Lengths]]:
    """The requests of a trace of Azure's LLM inference service (its CSV files: TIMESTAMP, ContextTokens,
    GeneratedTokens): seconds from the first, and (prompt, answer) tokens.

    Raises:
      ConfigError: it cannot be read or is malformed.
    """
    requests: list[tuple[float, Lengths]] = []
    first: datetime | None = None
    for number, row in enumerate(_csv_rows(path), 2):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or at
            lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            requests.append(((at - first).total_seconds(), lengths))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: {error!s:.200}") from error
    return [(at, (prompt, answer)) for at, (prompt, answer) in requests if prompt > 0 and answer > 0]


def read_mooncake(path: Path, *, time_scale: float = 1.0, token_scale: float = 1.0) -> list[ContextCall]:
    """The calls of Mooncake's conversation trace (JSON lines: timestamp in ms, input_length, output_length
    and hash_ids, which name the blocks of the prompt by all that precedes them).

    A request continues a conversation if it shares blocks with it, other than the first block, which all
    requests share; it adds its prompt less the conversation's tokens so far.

    Args:
      path: the file.
      time_scale: times are multiplied by this.
      token_scale: lengths are multiplied by this.

    Raises:
      ConfigError: it cannot be read or is malformed, or a number is out of its domain.
    """
    for name, value in (("time_scale", time_scale), ("token_scale", token_scale)):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name} must be above 0, got {value}")
    of_block: dict[int, int] = {}
    conversation_tokens: list[int] = []

    def call(data: Any) -> ContextCall:
        try:
            time_s, blocks = float(data["timestamp"]) / 1000, [int(each) for each in data["hash_ids"]]
            prompt, answer = int(data["input_length"]), int(data["output_length"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"malformed request: {error!s:.200}") from error
        own = blocks[_SHARED_BLOCKS:]
        context = next(
            (of_block[block] for block in reversed(own) if block in of_block), len(conversation_tokens)
        )
        if context == len(conversation_tokens):
            conversation_tokens.append(0)
        added = prompt - conversation_tokens[context] if prompt > conversation_tokens[context] else prompt
        conversation_tokens[context] = prompt + answer
        of_block.update(dict.fromkeys(own, context))
        return ContextCall(
            time_s=time_s * time_scale,
            context=context,
            prompt_tokens=max(1, round(added * token_scale)),
            answer_tokens=max(1, round(answer * token_scale)),
        )

    return read_lines(path, call)


def _csv_rows(path: Path) -> Iterator[dict[str, str]]:
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            yield from itertools.islice(csv.DictReader(file), MAX_ENTRIES)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: the trace cannot be read ({error!s:.200})") from error
