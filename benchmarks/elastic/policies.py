"""Chooses, for every request of a trace, one of a system's variants.

A system has variants of its model (sizes, and lengths of the prompt). For each variant and question the
times are known, and whether the likeliest of the options is the right one. Every system chooses by a policy;
only the oracle's looks at the right answers.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxllm.elastic.slo import Slo

OURS = "jaxllm"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Variants:
    """Times and answers of V variants on N questions.

    Attributes:
      names: of the variants `[V]`, the largest last.
      ttft_ms: `[N, V]` float64, to the first token, without changing to the variant. Infinite where the
        context does not hold the question, which is then answered wrong and late.
      tpot_ms: `[N, V]` float64, per further token.
      right: `[N, V]` bool.
      change_ms: `[V]` float64, time to change to it from another variant.
    """

    names: tuple[str, ...]
    ttft_ms: np.ndarray
    tpot_ms: np.ndarray
    right: np.ndarray
    change_ms: np.ndarray

    def only(self, indices: Sequence[int], *, less_ms: np.ndarray | float = 0.0) -> "Variants":
        """Some of the variants; `less_ms` is subtracted from the `ttft_ms` of all but the last."""
        ttft = self.ttft_ms[:, indices]
        ttft[:, :-1] -= np.reshape(less_ms, (-1, 1))
        return Variants(
            names=tuple(self.names[each] for each in indices),
            ttft_ms=ttft,
            tpot_ms=self.tpot_ms[:, indices],
            right=self.right[:, indices],
            change_ms=self.change_ms[list(indices)],
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Choices:
    """A system's answers to a trace of M requests.

    Attributes:
      questions: `[M]` int, which question each request asked.
      right: `[M]` bool, whether the answer was right, in time or not.
      met: `[M]` bool, whether the objective was met, by the known times.
    """

    questions: np.ndarray
    right: np.ndarray
    met: np.ndarray

    @property
    def right_and_met(self) -> np.ndarray:
        """`[M]` bool, whether the answer was right and in time."""
        return self.right & self.met


# Chooses a variant: from which are in time, `[V]` bool, and the request's number.
Policy = Callable[[np.ndarray, int], int]


def largest(allowed: np.ndarray, request: int) -> int:
    """The largest variant in time."""
    del request
    return int(np.flatnonzero(allowed)[-1])


def at_random(seed: int) -> Policy:
    """Any variant in time."""
    draw = np.random.default_rng(seed)

    def choose(allowed: np.ndarray, request: int) -> int:
        del request
        return int(draw.choice(np.flatnonzero(allowed)))

    return choose


def best(right: np.ndarray) -> Policy:
    """A variant in time that answers right, if there is one, the smallest.

    Args:
      right: `[M, V]` bool, of each request.
    """

    def choose(allowed: np.ndarray, request: int) -> int:
        good = np.flatnonzero(allowed & right[request])
        return int(good[0]) if len(good) else largest(allowed, request)

    return choose


def run_trace(
    variants: Variants,
    questions: Sequence[int],
    slos: Sequence[Slo],
    whole_ms: tuple[np.ndarray, np.ndarray],
    policy: Policy,
    *,
    margin: float = 1.0,
    ignore_tpot: bool = False,
) -> Choices:
    """Lets a system choose for every request of a trace, in order.

    Args:
      variants: of the system.
      questions: `[M]`, which question each request asks.
      slos: `[M]`, its objective.
      whole_ms: `[N]` times to the first token and per token of the whole model with the whole prompt.
      policy: chooses among the variants in time; where there are none, the quickest is used.
      margin: share of an objective that is planned for.
      ignore_tpot: whether the system is counted as meeting every time per token.
    """
    right, met = np.zeros(len(questions), bool), np.zeros(len(questions), bool)
    last = len(variants.names) - 1
    for request, (question, slo) in enumerate(zip(questions, slos, strict=True)):
        changes = np.where(np.arange(len(variants.names)) == last, 0.0, variants.change_ms)
        ttft = variants.ttft_ms[question] + changes
        most_ttft, most_tpot = slo.limits(whole_ms[0][question], whole_ms[1][question])
        excess = np.divide(ttft, most_ttft, out=np.full(len(ttft), np.inf), where=np.isfinite(ttft))
        if not ignore_tpot:
            excess = np.maximum(excess, variants.tpot_ms[question] / most_tpot)
        allowed = excess <= margin + 1e-9
        last = policy(allowed, request) if allowed.any() else int(np.argmin(excess))
        right[request], met[request] = variants.right[question, last], excess[last] <= 1 + 1e-9
    return Choices(np.asarray(questions), right, met)
