"""Parses and formats objectives of requests and options, and stores those that apps are bound to.

bindings = Bindings({"mail": bound("<40,70>")})
bindings.bind("mail", bound({"ttft_ms": 200, "tpot_ms": 50, "strict": True}))
call = bindings.applied(call)       with the app's objective, if the call has none
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.elastic.slo import Slo
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.serving.elastic.objectives import Binding, EndToEnd, EnergyBudget, Latency, Objective
from jaxllm.serving.server.calls import Call

# Apps are known by keys and users of the machine: usually there are fewer.
_MOST_BOUND = 4096
_KINDS: dict[frozenset[str], Callable[..., Objective]] = {
    frozenset({"ttft_ms", "tpot_ms"}): Latency,
    frozenset({"total_ms"}): EndToEnd,
    frozenset({"joules"}): EnergyBudget,
}


def objective_from(value: Any) -> Objective:
    """Parses an objective: `"<TTFT,TPOT>"` in percent, or an object of milliseconds or joules.

    Raises:
      ConfigError: it is malformed or out of range.
    """
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
    and optionally `strict` and `shorten`.

    Raises:
      ConfigError: it is malformed.
    """
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
        """Binds an app, until it unbinds itself or the service ends.

        Raises:
          BudgetExceeded: too many apps are bound.
        """
        if app not in self._own and len(self._own) >= _MOST_BOUND:
            raise BudgetExceeded(
                f"{_MOST_BOUND} apps are bound to objectives, which is the most; unbind one, or name the "
                "objective in each call"
            )
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
