"""Limits each app's resources, so that no app exhausts the service for the others, and stores the objectives
that apps are bound to.

    reserved = limiter.admit(app, prompt_tokens=300, max_tokens=256, now_s=now)   # or Refused
    limiter.started(app)
    limiter.ended(app, reserved, started=True, tokens=412, now_s=now)

    bindings = Bindings({"mail": bound("<40,70>")})
    call = bindings.applied(call)       with the app's objective, if the call has none

Tokens of a minute, and of a day as a measure of battery, are counted by quotas that refill steadily: a call
reserves its prompt and its longest answer, and returns the unused rest at its end. Nothing here reads a
clock. Apps share no state: one app's calls never change another's limits.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxllm.elastic.slo import Slo
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.options import check_options, option
from jaxllm.serving.elastic.objectives import Binding, EndToEnd, EnergyBudget, Latency, Objective
from jaxllm.serving.server.calls import Call, ContextFacts, Refused
from jaxllm.serving.server.sockets import require_name

_MINUTE_S, _DAY_S = 60.0, 86_400.0
# Retry delay of a call that waits for another to end, whose duration is unknown.
_RETRY_S = 1.0
# Apps without running calls are dropped beyond this number, once their quotas are full.
_MOST_IDLE = 256
Reserved = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AppLimits:
    """Limits of an app; 0 is no limit. `Limits` has the defaults of all apps.

    Attributes:
      in_flight: maximum number of accepted calls that have not ended, including queued ones.
      queued: maximum number of calls that wait for their first step.
      tokens_per_minute: rate of tokens of prompts and answers; also the maximum of a call.
      tokens_per_day: the same over a day, since the service began.
      foreground_only: whether calls are refused while the app is not in the foreground of the device.
      contexts: maximum number of contexts.
      prefix_bytes: memory limit of its caches of ended answers.
      stored_bytes: size limit of its contexts on storage.
      pinned: maximum number of pinned contexts.
    """

    in_flight: int = option(0, low=0)
    queued: int = option(0, low=0)
    tokens_per_minute: int = option(0, low=0)
    tokens_per_day: int = option(0, low=0)
    foreground_only: bool = False
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
        for app in self.apps:
            require_name(app)

    def of(self, app: str) -> AppLimits:
        """The limits of an app."""
        return self.apps.get(app, self.default)

    def context_options(self) -> dict[str, Any]:
        """The corresponding fields of `ContextOptions`: these apply to every app, so each is the loosest of
        all limits; an app's tighter ones are checked by `require_room`."""
        everyone = [self.default, *self.apps.values()]
        names = {"contexts_per_app": "contexts", "app_quota_bytes": "stored_bytes"}
        found = {name: [getattr(each, own) for each in everyone] for name, own in names.items()}
        return {name: 0 if 0 in values else max(values) for name, values in found.items()}


@dataclasses.dataclass
class Quota:
    """Tokens that an app may use.

    Attributes:
      period_s: time in which it is filled.
      tokens: tokens left; negative if answers were longer than reserved.
      at_s: time of `tokens`.
    """

    period_s: float
    tokens: float = math.inf
    at_s: float = 0.0

    def refill(self, most: int, now_s: float) -> None:
        """Adds the tokens of the time that has passed, up to `most`; 0 for no limit. A clock that goes back
        refills nothing."""
        gained = most / self.period_s * max(0.0, now_s - self.at_s)
        self.tokens = min(float(most), self.tokens + gained) if most else math.inf
        self.at_s = now_s


@dataclasses.dataclass
class Usage:
    """Resources in use by an app.

    Attributes:
      queued, running: numbers of its calls.
      minute, day: its tokens.
    """

    queued: int = 0
    running: int = 0
    minute: Quota = dataclasses.field(default_factory=lambda: Quota(_MINUTE_S))
    day: Quota = dataclasses.field(default_factory=lambda: Quota(_DAY_S))

    def quotas(self, limits: AppLimits) -> Sequence[tuple[Quota, int, str, str]]:
        """The quotas, the tokens of each when full, the period, and the reason of a refusal."""
        return (
            (self.minute, limits.tokens_per_minute, "minute", "full"),
            (self.day, limits.tokens_per_day, "day", "quota"),
        )


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
        return self._usage.setdefault(app, Usage())

    def admit(self, app: str, *, prompt_tokens: int, max_tokens: int, now_s: float) -> Reserved:
        """Admits a call of an app at a time of a monotonic clock, the same for all methods. Raises Refused if
        the app has too many calls, or too few tokens left.

        Returns:
          The reserved tokens of each quota.
        """
        if len(self._usage) >= _MOST_IDLE:
            for idle, usage in list(self._usage.items()):
                full = True
                for quota, most, _, _ in usage.quotas(self.limits.of(idle)):
                    quota.refill(most, now_s)
                    full &= quota.tokens >= most
                if full and not usage.queued and not usage.running:
                    del self._usage[idle]
        usage, limits = self.usage(app), self.limits.of(app)
        for taken, most, what in (
            (usage.queued + usage.running, limits.in_flight, "in flight; wait for one to end"),
            (usage.queued, limits.queued, "queued; wait for one to start"),
        ):
            if most and taken >= most:
                raise Refused(
                    f"the app has {taken} calls of at most {most} {what}",
                    reason="full",
                    retry_after_s=_RETRY_S,
                )
        wanted, reserved = prompt_tokens + max_tokens, []
        for quota, most, period, reason in usage.quotas(limits):
            quota.refill(most, now_s)
            if most and prompt_tokens > most:
                message = f"the prompt has {prompt_tokens} tokens, and the app may use {most} a {period}"
                raise Refused(message, reason=reason)
            # A full quota suffices for any call: else a call with a long answer could never start.
            needed = min(wanted, most)
            if needed > quota.tokens:
                wait_s = (needed - quota.tokens) * quota.period_s / most
                raise Refused(
                    f"the app may use {most} tokens a {period}, and this call needs up to {needed}; try "
                    f"again in {math.ceil(wait_s)} s, or ask for fewer tokens",
                    reason=reason,
                    retry_after_s=wait_s,
                )
            reserved.append(needed)
        usage.queued += 1
        for (quota, *_), tokens in zip(usage.quotas(limits), reserved, strict=True):
            quota.tokens -= tokens
        return tuple(reserved)

    def started(self, app: str) -> None:
        """Called once, at the first step of an admitted call."""
        usage = self.usage(app)
        usage.queued, usage.running = usage.queued - 1, usage.running + 1

    def ended(self, app: str, reserved: Reserved, *, started: bool, tokens: int, now_s: float) -> None:
        """Called once, at the end of an admitted call that has started or not, with the number of used
        tokens."""
        usage = self.usage(app)
        usage.running, usage.queued = usage.running - started, usage.queued - (not started)
        # The limits may have changed since the call was admitted.
        for (quota, most, _, _), own in zip(usage.quotas(self.limits.of(app)), reserved, strict=True):
            quota.refill(most, now_s)
            if most:
                quota.tokens = min(float(most), quota.tokens + own - tokens)


def require_room(
    limits: AppLimits,
    there: Sequence[ContextFacts],
    *,
    new: bool = False,
    stored: bool = True,
    pin: str | None = None,
) -> None:
    """Checks that an app may change its contexts. Raises BudgetExceeded if it has too many, their files are
    too large, or it has pinned too many. `new`: whether it creates one; `stored`: whether one grows; `pin`:
    name of the one that it pins, empty for a new one."""
    size = sum(each.stored_bytes for each in there)
    pinned = sum(each.pinned for each in there if each.name != pin)
    for changes, taken, most, message in (
        (new, len(there), limits.contexts, "has {:,} contexts of at most {:,}; delete one first"),
        (stored, size, limits.stored_bytes, "has {:,} bytes on storage of at most {:,}; delete some"),
        (pin is not None, pinned, limits.pinned, "has pinned {:,} contexts of at most {:,}; unpin one first"),
    ):
        if changes and most and taken >= most:
            raise BudgetExceeded(f"the app {message.format(taken, most)}")


# Apps are known by keys and users of the machine: usually there are fewer.
_MOST_BOUND = 4096
_KINDS: dict[frozenset[str], Callable[..., Objective]] = {
    frozenset({"ttft_ms", "tpot_ms"}): Latency,
    frozenset({"total_ms"}): EndToEnd,
    frozenset({"joules"}): EnergyBudget,
}


def objective_from(value: Any) -> Objective:
    """Parses an objective: `"<TTFT,TPOT>"` in percent, or an object of milliseconds or joules. Raises
    ConfigError if it is malformed or out of range."""
    if isinstance(value, str):
        return Slo.parse(value)
    kind = _KINDS.get(frozenset(value)) if isinstance(value, Mapping) else None
    if kind is None:
        raise ConfigError(
            'slo is "<TTFT,TPOT>" in percent, {"ttft_ms": .., "tpot_ms": ..}, {"total_ms": ..} or '
            f'{{"joules": ..}}, got {value!r:.80}'
        )
    try:
        return kind(**value)
    except OverflowError:
        raise ConfigError("a number of slo is too large") from None


def written(objective: Objective) -> str | dict[str, float]:
    """The format that `objective_from` parses."""
    return str(objective) if isinstance(objective, Slo) else dataclasses.asdict(objective)


def bound(value: Any) -> Binding:
    """Parses an app's objective in options: like `objective_from`, or an object with `slo` or its numbers,
    and optionally `strict` and `shorten`. Raises ConfigError if it is malformed."""
    choices = {"strict": False, "shorten": False}
    if isinstance(value, Mapping):
        value = dict(value)
        for name in choices:
            choices[name] = value.pop(name, False)
            if not isinstance(choices[name], bool):
                raise ConfigError(f"{name} must be true or false, got {choices[name]!r:.80}")
        value = value["slo"] if value.keys() == {"slo"} else value
    return Binding(objective_from(value), **choices)


class Bindings:
    """The objectives of apps' calls without their own. For the event loop's thread.

    Attributes:
      given: app -> binding from the options; may be replaced at any time.
    """

    def __init__(self, given: Mapping[str, Binding] | None = None) -> None:
        self.given: Mapping[str, Binding] = dict(given or {})
        self._own: dict[str, Binding] = {}

    def of(self, app: str) -> Binding | None:
        """An app's binding: set by itself, else by the options; None for none."""
        return self._own.get(app, self.given.get(app))

    def is_own(self, app: str) -> bool:
        """Whether the app has bound itself."""
        return app in self._own

    def bind(self, app: str, binding: Binding) -> None:
        """Binds an app, until it unbinds itself or the service ends. Raises BudgetExceeded if too many apps
        are bound."""
        if app not in self._own and len(self._own) >= _MOST_BOUND:
            raise BudgetExceeded(f"{_MOST_BOUND} apps are bound, the limit; name the objective in each call")
        self._own[app] = binding

    def unbind(self, app: str) -> None:
        """Removes the app's own binding; the one of the options applies again."""
        self._own.pop(app, None)

    def applied(self, call: Call) -> Call:
        """A call with its app's objective, `strict` and `shorten` as defaults. Energy budgets do not apply to
        turns in contexts, which cannot be planned for energy."""
        own = self.of(call.app)
        if own is None or (call.context and isinstance(own.objective, EnergyBudget)):
            return call
        strict = own.strict if call.strict is None else call.strict
        shorten = own.shorten if call.shorten is None else call.shorten
        call = dataclasses.replace(call, strict=strict, shorten=shorten)
        if call.objective is not None:
            return call
        return dataclasses.replace(call, objective=own.objective, bound=True)
