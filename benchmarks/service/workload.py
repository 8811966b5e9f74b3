"""Draws what the apps send: times, prompts, and lengths of answers, from a Poisson process or a real trace.

Six apps, one per objective of ELMS (arXiv 2409.09071, section 5.1), call equally often. About half of their
calls continue the app's last conversation, and send all of it again, as clients of chats do. Prompts are
random tokens: no system's speed depends on them. What a conversation was answered is drawn, too, so that what
can be reused of it are its earlier prompts.
"""

import dataclasses
import math
import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks.traces import Lengths, read_azure, read_mooncake
from jaxllm.elastic.slo import SLOS
from jaxllm.errors import ConfigError

APPS = tuple(f"app-{number}" for number in range(1, len(SLOS) + 1))
# The first ids of every tokenizer are special tokens.
FIRST_TOKEN = 16
LEAST_PROMPT_TOKENS, LEAST_ANSWER_TOKENS = 16, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What one client sends.

    Attributes:
      time_s: when, in seconds from the beginning; 0 where clients wait for answers.
      app: number of the app in `APPS`, and of its objective in `SLOS`.
      prompt: token ids.
      answer_tokens: to be answered.
    """

    time_s: float = 0.0
    app: int
    prompt: tuple[int, ...]
    answer_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Lengths to draw from: log-normal around the medians, as those of real services are.

    Attributes:
      prompt_tokens, answer_tokens: medians.
      deviation: of the logarithms.
      context_tokens: most tokens of prompt and answer together.
      vocab_size: number of token ids.
    """

    prompt_tokens: int
    answer_tokens: int
    deviation: float = 0.5
    context_tokens: int
    vocab_size: int

    def __post_init__(self) -> None:
        least = LEAST_PROMPT_TOKENS + LEAST_ANSWER_TOKENS
        if self.context_tokens < 2 * least or self.vocab_size <= FIRST_TOKEN:
            raise ConfigError(
                f"bench service needs a context of {2 * least} tokens and a vocabulary of more than "
                f"{FIRST_TOKEN}, got {self.context_tokens} and {self.vocab_size}; measure a larger model"
            )

    def within(self, prompt: float, answer: float) -> Lengths:
        """Lengths that fit the context: at most half of it for the answer."""
        answer_tokens = min(max(LEAST_ANSWER_TOKENS, round(answer)), self.context_tokens // 2)
        most = self.context_tokens - answer_tokens
        return min(max(LEAST_PROMPT_TOKENS, round(prompt)), most), answer_tokens


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """Times and lengths of the requests of a trace, in the order of their times."""

    times_s: Sequence[float]
    lengths: Sequence[Lengths]

    def __post_init__(self) -> None:
        if len(self.times_s) < 2:
            raise ConfigError("a trace of arrivals needs at least two requests")

    @classmethod
    def read(cls, path: Path) -> "Arrivals":
        """Reads a trace of Azure's LLM inference service (.csv) or of Mooncake (.jsonl).

        Raises:
          ConfigError: it is neither, cannot be read or is malformed.
        """
        if path.suffix == ".csv":
            requests = read_azure(path)
        elif path.suffix == ".jsonl":
            calls = read_mooncake(path)
            requests = [(each.time_s, (each.prompt_tokens, each.answer_tokens)) for each in calls]
        else:
            raise ConfigError(f"{path}: a trace is Azure's .csv or Mooncake's .jsonl")
        requests.sort()
        return cls([time for time, _ in requests], [lengths for _, lengths in requests])


def draw_lengths(sizes: Sizes, count: int, draw: random.Random) -> list[Lengths]:
    """Lengths of `count` requests."""
    mu = math.log(sizes.prompt_tokens), math.log(sizes.answer_tokens)
    return [sizes.within(*(math.exp(draw.gauss(each, sizes.deviation)) for each in mu)) for _ in range(count)]


def poisson(sizes: Sizes, *, rate_per_s: float, duration_s: float, seed: int) -> list[Request]:
    """Requests of a Poisson process.

    Args:
      rate_per_s: mean number of requests per second.
    """
    draw = random.Random(seed)
    times = [draw.expovariate(rate_per_s)]
    while times[-1] < duration_s and len(times) < 100_000:
        times.append(times[-1] + draw.expovariate(rate_per_s))
    del times[-1]
    return _requests(sizes, times, draw_lengths(sizes, len(times), draw), seed)


def from_trace(
    sizes: Sizes, arrivals: Arrivals, *, rate_per_s: float, duration_s: float, seed: int
) -> tuple[list[Request], float]:
    """Requests that follow each other in a trace, compressed in time to a mean rate, their lengths scaled
    together so that the trace's median prompt and answer are those of the sizes.

    Args:
      rate_per_s: mean number of requests per second.
      duration_s: in which they are sent.
      seed: chooses which part of the trace is sent.

    Returns:
      The requests, and how many times faster than in the trace they come.
    """
    count = max(2, min(round(rate_per_s * duration_s), len(arrivals.times_s)))
    start = random.Random(seed).randrange(len(arrivals.times_s) - count + 1)
    times = arrivals.times_s[start : start + count]
    # Requests of one moment, as a trace may begin with, are spread as little as a clock can tell.
    span_s = max(times[-1] - times[0], 1e-6)
    faster = span_s / duration_s
    prompts, answers = (sorted(each[side] for each in arrivals.lengths) for side in (0, 1))
    scales = (
        sizes.prompt_tokens / prompts[len(prompts) // 2],
        sizes.answer_tokens / answers[len(answers) // 2],
    )
    lengths = [
        sizes.within(prompt * scales[0], answer * scales[1])
        for prompt, answer in arrivals.lengths[start : start + count]
    ]
    return _requests(sizes, [(each - times[0]) / faster for each in times], lengths, seed), faster


def back_to_back(sizes: Sizes, *, count: int, seed: int) -> list[Request]:
    """Requests for clients that send one as soon as the one before is answered."""
    return _requests(sizes, [0.0] * count, draw_lengths(sizes, count, random.Random(seed)), seed)


def random_prompt(sizes: Sizes, tokens: int, draw: random.Random) -> tuple[int, ...]:
    """Random tokens."""
    return tuple(draw.randrange(FIRST_TOKEN, sizes.vocab_size) for _ in range(tokens))


def _requests(sizes: Sizes, times: Sequence[float], lengths: Sequence[Lengths], seed: int) -> list[Request]:
    draw = random.Random(seed + 1)
    requests: list[Request] = []
    last: dict[int, Request] = {}
    for time_s, (prompt, answer) in zip(times, lengths, strict=True):
        app = draw.randrange(len(APPS))
        said: tuple[int, ...] = ()
        new = prompt
        if app in last and draw.random() < 0.5:
            before = last[app]
            said = before.prompt + random_prompt(sizes, before.answer_tokens, draw)
            # A further turn is shorter than a first prompt.
            new = max(LEAST_PROMPT_TOKENS, round(0.25 * prompt))
            if len(said) + new + answer > sizes.context_tokens:
                said, new = (), prompt
        request = Request(
            time_s=time_s, app=app, prompt=said + random_prompt(sizes, new, draw), answer_tokens=answer
        )
        last[app] = request
        requests.append(request)
    return requests
