"""Limits each app's resources, so that no app exhausts the service for the others.

    admission = limiter.admit(app, prompt_tokens=300, max_tokens=256, now_s=now)   # or Refused
    admission.started()
    admission.ended(tokens=412, now_s=now)

Tokens are counted by a bucket that refills steadily: a call reserves its prompt and its longest answer, and
returns the unused rest at its end. Nothing here reads a clock. Apps share no state: one app's calls never
change another's limits.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.options import check_options, option
from jaxllm.serving.server.calls import ContextFacts, Refused
from jaxllm.serving.server.peer import require_app

_MINUTE_S = 60.0
# Retry delay of a call that waits for another to end, whose duration is unknown.
_RETRY_S = 1.0
# Apps without running calls are dropped beyond this number, once their buckets are full.
_MOST_IDLE = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class AppLimits:
    """Limits of an app; 0 is no limit. `Limits` has the defaults of all apps.

    Attributes:
      in_flight: maximum number of accepted calls that have not ended, including queued ones.
      queued: maximum number of calls that wait for their first step.
      tokens_per_minute: rate of tokens of prompts and answers; also the maximum of a call.
      contexts: maximum number of contexts.
      prefix_bytes: memory limit of its caches of ended answers.
      stored_bytes: size limit of its contexts on storage.
      pinned: maximum number of pinned contexts.
    """

    in_flight: int = option(0, low=0)
    queued: int = option(0, low=0)
    tokens_per_minute: int = option(0, low=0)
    contexts: int = option(0, low=0)
    prefix_bytes: int = option(0, low=0)
    stored_bytes: int = option(0, low=0)
    pinned: int = option(0, low=0)

    def __post_init__(self) -> None:
        check_options(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of all apps.

    Attributes:
      default: limits of other apps.
      apps: limits by app.
    """

    default: AppLimits = AppLimits(in_flight=64, queued=32, contexts=256, stored_bytes=4 << 30)
    apps: Mapping[str, AppLimits] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for app, limits in self.apps.items():
            require_app(app)
            if not isinstance(limits, AppLimits):
                raise ConfigError(f"the limits of {app} must be AppLimits, got {limits!r:.80}")
        object.__setattr__(self, "apps", MappingProxyType(dict(self.apps)))

    def of(self, app: str) -> AppLimits:
        """The limits of an app."""
        return self.apps.get(app, self.default)

    def context_options(self) -> dict[str, int]:
        """The corresponding fields of `ContextOptions`: these apply to every app, so each is the loosest of
        all limits; an app's tighter ones are checked by `require_context` and `require_pin`."""
        everyone = [self.default, *self.apps.values()]
        names = {
            "contexts_per_app": "contexts",
            "app_quota_bytes": "stored_bytes",
        }
        found = {name: [getattr(each, own) for each in everyone] for name, own in names.items()}
        return {name: 0 if 0 in values else max(values) for name, values in found.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Usage:
    """Resources in use by an app.

    Attributes:
      queued, running: numbers of its calls.
      tokens: tokens in its bucket; negative if answers were longer than reserved.
      at_s: time of `tokens`.
    """

    queued: int = option(0, low=0)
    running: int = 0
    tokens: float = math.inf
    at_s: float = 0.0


def refilled(usage: Usage, limits: AppLimits, now_s: float) -> Usage:
    """An app's usage at a later time. A clock that goes back refills nothing."""
    per_minute = limits.tokens_per_minute
    if not per_minute:
        return dataclasses.replace(usage, tokens=math.inf, at_s=now_s)
    gained = per_minute / _MINUTE_S * max(0.0, now_s - usage.at_s)
    return dataclasses.replace(usage, tokens=min(float(per_minute), usage.tokens + gained), at_s=now_s)


def admitted(
    usage: Usage, limits: AppLimits, *, prompt_tokens: int, max_tokens: int, now_s: float
) -> tuple[Usage, int]:
    """An app's usage with one more queued call, and the tokens that it reserves.

    Raises:
      Refused: the app has too many calls, or too few tokens left.
    """
    if limits.in_flight and usage.queued + usage.running >= limits.in_flight:
        raise Refused(
            f"the app has {usage.queued + usage.running} calls in flight of at most {limits.in_flight}; wait "
            "for one to end",
            reason="full",
            retry_after_s=_RETRY_S,
        )
    if limits.queued and usage.queued >= limits.queued:
        raise Refused(
            f"the app has {usage.queued} calls queued of at most {limits.queued}; wait for one to start",
            reason="full",
            retry_after_s=_RETRY_S,
        )
    usage, per_minute = refilled(usage, limits, now_s), limits.tokens_per_minute
    if per_minute and prompt_tokens > per_minute:
        raise Refused(
            f"the prompt has {prompt_tokens} tokens, and the app may use {per_minute} a minute; shorten it",
            reason="full",
        )
    # A full bucket suffices for any call: else a call with a long answer could never start.
    reserved = min(prompt_tokens + max_tokens, per_minute) if per_minute else 0
    if reserved > usage.tokens:
        wait_s = (reserved - usage.tokens) * _MINUTE_S / per_minute
        raise Refused(
            f"the app may use {per_minute} tokens a minute, and this call needs up to {reserved}; try again "
            f"in {math.ceil(wait_s)} s, or ask for fewer tokens",
            reason="full",
            retry_after_s=wait_s,
        )
    return dataclasses.replace(usage, queued=usage.queued + 1, tokens=usage.tokens - reserved), reserved


def started(usage: Usage) -> Usage:
    """An app's usage when a queued call has its first step."""
    return dataclasses.replace(usage, queued=usage.queued - 1, running=usage.running + 1)


def ended(usage: Usage, limits: AppLimits, *, ran: bool, reserved: int, tokens: int, now_s: float) -> Usage:
    """An app's usage when a call has ended.

    Args:
      usage: usage before.
      limits: limits of the app, which may have changed since the call was admitted.
      ran: whether it had started.
      reserved: number of reserved tokens.
      tokens: number of used tokens, of prompt and answer.
      now_s: current time.
    """
    usage = refilled(usage, limits, now_s)
    per_minute = limits.tokens_per_minute
    left = min(float(per_minute), usage.tokens + reserved - tokens) if per_minute else math.inf
    queued, running = (usage.queued, usage.running - 1) if ran else (usage.queued - 1, usage.running)
    return dataclasses.replace(usage, queued=queued, running=running, tokens=left)


class Admission:
    """An admitted call. Its end returns its resources once."""

    def __init__(self, limiter: "Limiter", app: str, reserved: int) -> None:
        self._limiter, self._app, self._reserved = limiter, app, reserved
        self._stage = "queued"

    def started(self) -> None:
        """Called at the call's first step. Does nothing if it has started or ended before."""
        if self._stage == "queued":
            self._stage = "running"
            self._limiter._change(self._app, started(self._limiter.usage(self._app)))

    def ended(self, *, tokens: int, now_s: float) -> None:
        """Called at the call's end with the number of used tokens. Idempotent."""
        if self._stage == "ended":
            return
        ran, self._stage = self._stage == "running", "ended"
        limiter, app = self._limiter, self._app
        usage = ended(
            limiter.usage(app), limiter.limits.of(app),
            ran=ran, reserved=self._reserved, tokens=tokens, now_s=now_s,
        )  # fmt: skip
        limiter._change(app, usage)


class Limiter:
    """Counts the resources of apps. For one thread.

    Attributes:
      limits: limits of all apps; may be replaced at any time without effect on admitted calls.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._usage: dict[str, Usage] = {}

    def usage(self, app: str) -> Usage:
        """An app's usage, its tokens as of its last call."""
        return self._usage.get(app, Usage())

    def snapshot(self) -> dict[str, Usage]:
        """The usage of all apps."""
        return dict(self._usage)

    def admit(self, app: str, *, prompt_tokens: int, max_tokens: int, now_s: float) -> Admission:
        """Admits a call.

        Args:
          app: app of the call.
          prompt_tokens: number of prompt tokens.
          max_tokens: maximum number of tokens of its answer.
          now_s: current time of a monotonic clock, the same for all methods.

        Raises:
          Refused: a limit of the app is reached.
        """
        usage, reserved = admitted(
            self.usage(app), self.limits.of(app),
            prompt_tokens=prompt_tokens, max_tokens=max_tokens, now_s=now_s,
        )  # fmt: skip
        self._forget_idle(now_s)
        self._usage[app] = usage
        return Admission(self, app, reserved)

    def _change(self, app: str, usage: Usage) -> None:
        self._usage[app] = usage

    def _forget_idle(self, now_s: float) -> None:
        if len(self._usage) < _MOST_IDLE:
            return
        for app, usage in list(self._usage.items()):
            full = refilled(usage, self.limits.of(app), now_s).tokens >= self.limits.of(app).tokens_per_minute
            if full and not usage.queued and not usage.running:
                del self._usage[app]


def require_context(limits: AppLimits, there: Sequence[ContextFacts]) -> None:
    """Checks that an app may create a context besides its own.

    Raises:
      BudgetExceeded: it has too many, or their files are too large.
    """
    if limits.contexts and len(there) >= limits.contexts:
        raise BudgetExceeded(
            f"the app has {len(there)} contexts of at most {limits.contexts}; delete one first"
        )
    require_stored(limits, there)


def require_stored(limits: AppLimits, there: Sequence[ContextFacts]) -> None:
    """Checks that an app's contexts may grow.

    Raises:
      BudgetExceeded: their files are too large.
    """
    stored = sum(each.stored_bytes for each in there)
    if limits.stored_bytes and stored >= limits.stored_bytes:
        raise BudgetExceeded(
            f"the app's contexts take {stored:,} bytes on storage of at most {limits.stored_bytes:,}; delete "
            "some first"
        )


def require_pin(limits: AppLimits, there: Sequence[ContextFacts], name: str) -> None:
    """Checks that an app may pin one of its contexts; of a new one, `name` is empty.

    Raises:
      BudgetExceeded: it has pinned too many.
    """
    pinned = sum(each.pinned for each in there if each.name != name)
    if limits.pinned and pinned >= limits.pinned:
        raise BudgetExceeded(
            f"the app has pinned {pinned} contexts of at most {limits.pinned}; unpin one first"
        )


def limits_of(facts: Mapping[str, Any], default: AppLimits | None = None) -> AppLimits:
    """Limits from a config file's values; missing ones are as in `default`, or none.

    Raises:
      ConfigError: a name is unknown or a value is out of range.
    """
    names = [field.name for field in dataclasses.fields(AppLimits)]
    if unknown := set(facts) - set(names):
        raise ConfigError(f"there is no limit {min(unknown)!r:.80}; limits are {', '.join(names)}")
    return dataclasses.replace(default or AppLimits(), **facts)
