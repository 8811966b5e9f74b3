"""Whether drafting pays: what a token takes with it and without, measured while answering.

Reading a whole tree never takes less than reading one token. So as long as drafting and verifying take less
per token than verifying alone per pass, drafting may pay; where they do not, it cannot.
"""

from serving.decoding import pace

# Of a new measurement in a running mean.
_NEW_SHARE = 0.25
# Passes before the first judgement, and tokens without drafts after a bad one: twice as many each time.
_PATIENT_PASSES = 3
_FIRST_PAUSE_TOKENS, _LONGEST_PAUSE_TOKENS = 8, 256


class Payoff:
    """Measures passes with and without a draft, and says which comes next."""

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
        """Tokens that come without drafts before the next draft."""
        return max(0, self._left)

    @property
    def pace(self) -> int:
        """How many plain tokens take as long as a user should wait for the next words; 1 before it is
        known what they take."""
        return pace(self._plain_ms) if self._plain_ms else 1

    @property
    def token_ms(self) -> float:
        """What a token takes with drafts."""
        return self._drafted_ms / self._tokens

    def drafted(self, *, draft_ms: float, verify_ms: float, tokens: int) -> None:
        """A pass over a draft gave so many tokens."""
        again = self._passes > 0
        self._passes += 1
        self._drafted_ms = running_mean(self._drafted_ms if again else None, draft_ms + verify_ms)
        self._pass_ms = running_mean(self._pass_ms if again else None, verify_ms)
        self._tokens = running_mean(self._tokens if again else None, tokens)
        # What a plain pass takes is known where there was one, and else not more than one over a tree.
        plain_ms = min(self._plain_ms or self._pass_ms, self._pass_ms)
        if self.token_ms <= plain_ms:
            self._pause = _FIRST_PAUSE_TOKENS
        elif self._passes >= _PATIENT_PASSES:
            self._left = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_TOKENS)
            # When it is tried again, what is measured then counts alone.
            self._passes = 0

    def plain(self, *, took_ms: float, tokens: int) -> None:
        """So many tokens came without a draft."""
        self._plain_ms = running_mean(self._plain_ms or None, took_ms / tokens)
        self._left -= tokens


def running_mean(old: float | None, new: float) -> float:
    """A mean in which what was measured last counts most; None where nothing was measured before."""
    return new if old is None else old + _NEW_SHARE * (new - old)
