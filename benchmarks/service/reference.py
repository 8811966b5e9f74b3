"""Times the idle whole model through the service: what every system's objectives are shares of.

The limits are the same milliseconds for all systems. They are taken once, at the start, from our service with
one client, which sends prompts of several lengths without an objective.
"""

import dataclasses
import itertools
import random
import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.measuring.quiet import wait_for_quiet
from benchmarks.service.load import send
from benchmarks.service.server import Server
from benchmarks.service.systems import Conditions, Limits, OurService
from benchmarks.service.workload import LEAST_PROMPT_TOKENS, Request, Sizes, random_prompt
from jaxllm.elastic.slo import SLOS
from jaxllm.errors import JaxllmError

_PATIENCE_S = 600.0
_ANSWER_TOKENS = 24


@dataclasses.dataclass(frozen=True)
class Reference:
    """Times of the idle whole model.

    Attributes:
      tokens: lengths of prompts, ascending.
      ttft_ms: of each.
      tpot_ms: after the longest prompt's half.
    """

    tokens: tuple[int, ...]
    ttft_ms: tuple[float, ...]
    tpot_ms: float

    def ttft(self, prompt_tokens: int) -> float:
        """Milliseconds to the first token after a prompt of so many tokens."""
        return float(np.interp(prompt_tokens, self.tokens, self.ttft_ms))

    def answer_s(self, request: Request) -> float:
        """Seconds of a whole answer."""
        return (self.ttft(len(request.prompt)) + self.tpot_ms * (request.answer_tokens - 1)) / 1000

    def limits(self, request: Request, scale: float) -> Limits:
        """Most TTFT and TPOT in milliseconds: the app's shares of `scale` times the idle whole model's."""
        return SLOS[request.app].limits(scale * self.ttft(len(request.prompt)), scale * self.tpot_ms)

    @property
    def note(self) -> str:
        """Its times."""
        lengths = ", ".join(
            f"{ttft:.1f} ms at {tokens}" for tokens, ttft in zip(self.tokens, self.ttft_ms, strict=True)
        )
        return f"idle whole model: TTFT {lengths} tokens, TPOT {self.tpot_ms:.2f} ms"


def measure(server: Server, given: Conditions, sizes: Sizes, *, repeats: int, seed: int) -> Reference:
    """Times the whole model on our idle service.

    Args:
      server: of ours.
      given: the conditions.
      sizes: of prompts.
      repeats: of each length, of which medians are taken, after one that is not counted.
      seed: of the prompts.

    Raises:
      JaxllmError: a request is not answered.
    """
    draw, ours = random.Random(seed), OurService()
    tokens = _lengths(sizes)
    requests = []
    for _ in range(repeats + 1):
        for each in tokens:
            # No prompt begins as another, so that nothing is reused.
            request = Request(app=0, prompt=random_prompt(sizes, each, draw), answer_tokens=_ANSWER_TOKENS)
            # Without an objective the whole model answers.
            requests.append(ours.message(request, None, given) | {"time_s": 0.0})
    wait_for_quiet()
    job = {"url": server.url, "requests": requests, "clients": 1, "duration_s": 0, "patience_s": _PATIENCE_S}
    found = send(job, alive=server.require_alive)
    for outcome in found:
        if outcome["error"] or outcome["tokens"] < 2:
            raise JaxllmError(f"the reference was not answered: {outcome['error'] or outcome}")
    counted = found[len(tokens) :]
    ttft = [1000 * (each["first_s"] - each["sent_s"]) for each in counted]
    tpot = [1000 * (each["last_s"] - each["first_s"]) / (each["tokens"] - 1) for each in counted]
    medians = [statistics.median(ttft[place :: len(tokens)]) for place in range(len(tokens))]
    # A longer prompt never takes less time, whatever disturbed a sample.
    rising = tuple(itertools.accumulate(medians, max))
    return Reference(tokens, rising, statistics.median(tpot))


def _lengths(sizes: Sizes) -> tuple[int, ...]:
    most = sizes.within(sizes.context_tokens, _ANSWER_TOKENS)[0]
    wanted: Sequence[int] = (
        LEAST_PROMPT_TOKENS,
        sizes.prompt_tokens // 2,
        sizes.prompt_tokens,
        2 * sizes.prompt_tokens,
    )
    return tuple(sorted({min(max(each, LEAST_PROMPT_TOKENS), most) for each in wanted} | {most}))
