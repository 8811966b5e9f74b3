"""Measures the times of drafting, and whether it is faster: the time per token with drafts and without.

An answer begins with drafts; after some passes a few tokens are decoded without, and the faster way is
used. The other way is retried later, because texts and machines change.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxllm.serving.engine.decoding import pace

# Weight of a new measurement in a running mean.
_NEW_SHARE = 0.25
# Passes before a decision, maximum number and time of plainly decoded tokens to measure, and number of tokens
# without drafts after a negative decision, doubled each time.
_PATIENT_PASSES, _TRIED_TOKENS, _TRIED_MS = 3, 4, 40.0
_FIRST_PAUSE_TOKENS, _LONGEST_PAUSE_TOKENS = 8, 256


@dataclasses.dataclass
class DraftTimes:
    """Measured times of a drafter; zeros if negligible.

    Attributes:
      run_s: time of a run in `Drafter.grow`, without its branches.
      branch_s: time per branch of a run.
      step_s: time of a `Drafter.step`.
      steps: number of runs and steps so far.
    """

    run_s: float = 0.0
    branch_s: float = 0.0
    step_s: float = 0.0
    steps: int = 0


class Payoff:
    """Measures passes with and without a draft, and decides whether the next one has a draft."""

    def __init__(self) -> None:
        self._drafted_ms = self._tokens = self._pass_ms = self._plain_ms = 0.0
        self._passes = 0
        self._left = 0
        self._pause = _FIRST_PAUSE_TOKENS

    @property
    def worthwhile(self) -> bool:
        """Whether the next pass should have a draft."""
        return self._left <= 0

    @property
    def paused_tokens(self) -> int:
        """Number of tokens without drafts before the next draft."""
        return max(0, self._left)

    @property
    def pace(self) -> int:
        """The number of plain tokens of a dispatch (see `jaxllm.serving.engine.decoding.pace`); 1 before any
        was measured."""
        return pace(self._plain_ms) if self._plain_ms else 1

    @property
    def token_ms(self) -> float | None:
        """Time per token with drafts; None before the first."""
        return self._drafted_ms / self._tokens if self._tokens else None

    @property
    def plain_token_ms(self) -> float | None:
        """Time per token without drafts; None before the first."""
        return self._plain_ms or None

    @property
    def rate(self) -> float:
        """Tokens per second of the faster way; 0 before the first measurement."""
        known = [each for each in (self.token_ms, self.plain_token_ms) if each]
        return 1000 / min(known) if known else 0.0

    @property
    def pays(self) -> bool | None:
        """Whether drafting is the faster way; None before both are known."""
        if self.token_ms is None or self.plain_token_ms is None:
            return None
        return self.token_ms <= self.plain_token_ms

    def drafted(self, *, draft_ms: float, verify_ms: float, tokens: int) -> None:
        """Learns from a verification that gave `tokens` tokens."""
        again = self._passes > 0
        self._passes += 1
        self._drafted_ms = running_mean(self._drafted_ms if again else None, draft_ms + verify_ms)
        self._pass_ms = running_mean(self._pass_ms if again else None, verify_ms)
        self._tokens = running_mean(self._tokens if again else None, tokens)
        if self._passes < _PATIENT_PASSES:
            return
        if not self._plain_ms:
            # With streamed weights a token takes about as long as a verification.
            self._left = max(1, min(_TRIED_TOKENS, int(_TRIED_MS / max(1.0, self._pass_ms))))
        # If the machine has become faster since, plain decoding takes no longer than verification.
        elif self._drafted_ms / self._tokens <= min(self._plain_ms, self._pass_ms):
            self._pause = _FIRST_PAUSE_TOKENS
        else:
            self.pause()

    def pause(self) -> None:
        """Goes on without drafts, for longer each time until they pay."""
        self._left = self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_TOKENS)
        # The next try starts new means.
        self._passes = 0

    def plain(self, *, took_ms: float, tokens: int) -> None:
        """Learns from tokens decoded without drafts."""
        self._plain_ms = running_mean(self._plain_ms or None, took_ms / tokens)
        self._left -= tokens


def running_mean(old: float | None, new: float) -> float:
    """An exponential moving average; `old` is None before the first measurement."""
    return new if old is None else old + _NEW_SHARE * (new - old)


# Variances in squares of the first measurement: of the first state, of a size's own time, of a measurement,
# and of the changes of the states per measurement. The time per unit is a property of the device, so it
# changes slowly.
_FIRST_DOUBT, _OWN_DOUBT = 0.25, 0.02
_NOISE = 0.01
_DRIFT, _SLOW_DRIFT = 0.01, 0.0004
# A measurement further off than so many deviations is an outlier: it is clipped to this.
_MOST_DEVIATIONS = 3.0


class SizeCost:
    """Seconds of work of a size, `base + share * size / most + own(size)`.

    Args:
      most: the largest size.
      own: sizes with a specific time.
    """

    def __init__(self, most: int, own: Sequence[int] = ()) -> None:
        self._most, self._own = most, {size: 2 + place for place, size in enumerate(own)}
        self._state = np.zeros(2 + len(own))
        self._doubt = np.zeros((len(self._state), len(self._state)))
        self._unit = 0.0

    def seconds(self, size: float) -> float:
        """The expected time; 0 before the first measurement."""
        state = self._state.copy()
        state[1] = max(0.0, state[1])
        return max(0.0, float(self._seen(size) @ state))

    def measured(self, size: float, took_s: float) -> None:
        """Learns from the time that work of a size took."""
        seen = self._seen(size)
        if not self._unit:
            # The first guess: half of the time of the largest size is due to its size.
            self._unit = max(took_s, 1e-9)
            self._state[:2] = took_s - 0.5 * took_s * seen[1], 0.5 * took_s
            doubt = [_FIRST_DOUBT] * 2 + [_OWN_DOUBT] * len(self._own)
            self._doubt = np.diag(doubt) * self._unit**2
        drift = [_DRIFT] + [_SLOW_DRIFT] * (1 + len(self._own))
        self._doubt = self._doubt + np.diag(drift) * self._unit**2
        spread = float(seen @ self._doubt @ seen) + _NOISE * self._unit**2
        most = _MOST_DEVIATIONS * spread**0.5
        error = float(np.clip(took_s - seen @ self._state, -most, most))
        gain = self._doubt @ seen / spread
        self._state = self._state + gain * error
        self._doubt = self._doubt - np.outer(gain, seen @ self._doubt)

    def _seen(self, size: float) -> np.ndarray:
        seen = np.zeros(len(self._state))
        seen[:2] = 1.0, size / self._most
        if size in self._own:
            seen[self._own[size]] = 1.0  # pyright: ignore[reportArgumentType]
        return seen
