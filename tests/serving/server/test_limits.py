"""Limits of apps, by hand at given times, and as laws over random calls; objectives that apps are bound to,
by options and by themselves."""

import math
import random
from typing import Any

import pytest

from jaxllm.elastic.slo import Slo
from jaxllm.errors import BudgetExceeded, ConfigError, ObjectiveMissed
from jaxllm.serving.elastic.objectives import Binding, EndToEnd, EnergyBudget, Latency
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.server import limits
from jaxllm.serving.server.calls import Call, Refused
from jaxllm.serving.server.limits import (
    AppLimits,
    Bindings,
    Limiter,
    Limits,
    Reserved,
    bound,
    objective_from,
    written,
)
from tests.serving.server.services import FOX, FULL_LEVEL, facts, made


def limiter(**limits: Any) -> Limiter:
    return Limiter(Limits(default=AppLimits(**limits)))


class Admitted:
    """A call."""

    def __init__(self, limiter: Limiter, app: str, reserved: Reserved) -> None:
        self._limiter, self._app, self._reserved, self._started = limiter, app, reserved, False

    def started(self) -> None:
        self._started = True
        self._limiter.started(self._app)

    def ended(self, **how: Any) -> None:
        self._limiter.ended(self._app, self._reserved, started=self._started, **how)


def admit(
    limiter: Limiter, now_s: float = 0.0, *, app: str = "mail", prompt: int = 10, most: int = 10
) -> Admitted:
    reserved = limiter.admit(app, prompt_tokens=prompt, max_tokens=most, now_s=now_s)
    return Admitted(limiter, app, reserved)


def retry(limiter: Limiter, now_s: float = 0.0, **more: Any) -> float | None:
    with pytest.raises(Refused) as caught:
        admit(limiter, now_s, **more)
    assert caught.value.reason == "full"
    return caught.value.retry_after_s


def test_queued_calls_are_those_that_have_not_started() -> None:
    limits = limiter(queued=1)

    def counts() -> tuple[int, int]:
        return limits.usage("mail").queued, limits.usage("mail").running

    first = admit(limits)
    assert retry(limits) == 1.0
    admit(limits, app="calendar")
    first.started()
    second = admit(limits)
    assert counts() == (1, 1)
    second.ended(tokens=5, now_s=0.0)
    assert counts() == (0, 1)


def test_tokens_are_reserved_and_settled() -> None:
    limits = limiter(tokens_per_minute=600)
    call = admit(limits, 0.0, prompt=100, most=400)
    assert limits.usage("mail").minute.tokens == 100
    # 50 more than there are, at ten a second.
    assert retry(limits, 0.0, prompt=50, most=100) == pytest.approx(5.0)
    assert retry(limits, 4.0, prompt=50, most=100) == pytest.approx(1.0)
    call.ended(tokens=150, now_s=4.0)
    assert limits.usage("mail").minute.tokens == 100 + 40 + 350
    admit(limits, 4.0, prompt=90, most=400)
    assert limits.usage("mail").minute.tokens == 0
    assert limits.usage("calendar").minute.tokens == math.inf
    # An answer that may be longer than a minute allows takes a full bucket, and what it used beyond is owed.
    limits = limiter(tokens_per_minute=60)
    assert retry(limits, prompt=61) is None, "a prompt beyond a minute is never taken"
    admit(limits, 0.0, prompt=30, most=1000).ended(tokens=130, now_s=10.0)
    assert limits.usage("mail").minute.tokens == 10 + 60 - 130
    assert retry(limits, 10.0, prompt=5, most=5) == pytest.approx(70.0)
    # A bucket is never more than full, nor does a clock that goes back fill it.
    admit(limits, 80.0, prompt=5, most=5).ended(tokens=0, now_s=1000.0)
    assert limits.usage("mail").minute.tokens == 60
    admit(limits, 0.0, prompt=10, most=50)
    assert limits.usage("mail").minute.tokens == 0


def test_limits_may_change_while_calls_run() -> None:
    limits = limiter(tokens_per_minute=60, in_flight=3)
    calls = [admit(limits, 0.0, prompt=10, most=10) for _ in range(3)]
    limits.limits = Limits(default=AppLimits(in_flight=1), apps={"notes": AppLimits()})
    assert retry(limits) == 1.0, "calls in flight are those that have not ended"
    for _ in range(9):
        admit(limits, app="notes")
    for each in calls:
        each.ended(tokens=20, now_s=0.0)
    admit(limits)
    limits.limits = Limits(default=AppLimits(tokens_per_minute=30))
    admit(limits, prompt=20, most=20)
    assert limits.usage("mail").minute.tokens == 0


@pytest.mark.parametrize("seed", range(20))
def test_no_calls_are_left_and_rates_hold(seed: int) -> None:
    """Whatever an app does, it has used no more than its rate and one full bucket, beyond what the answers
    admitted last had over their share; other apps see none of it."""
    draw = random.Random(seed)
    limits, now, used, calls = limiter(in_flight=4, queued=2, tokens_per_minute=600), 0.0, 0, []
    waits: list[float] = []
    for _ in range(400):
        now += draw.random()
        if calls and draw.random() < 0.5:
            call, most = calls.pop(draw.randrange(len(calls)))
            if draw.random() < 0.7:
                call.started()
            tokens = draw.randint(0, most)
            used += tokens
            call.ended(tokens=tokens, now_s=now)
        else:
            prompt, most = draw.randint(1, 200), draw.randint(1, 200)
            try:
                calls.append((admit(limits, now, prompt=prompt, most=most), prompt + most))
            except Refused as refused:
                waits.append(refused.retry_after_s or 0.0)
        usage = limits.usage("mail")
        assert 0 <= usage.queued <= 2
        assert usage.queued + usage.running <= 4
        assert usage.queued + usage.running == len(calls)
        assert used <= 600 + 10 * now + 1e-6
    assert limits._usage.keys() == {"mail"}
    assert min(waits) > 0


def test_idle_apps_are_forgotten() -> None:
    limits = limiter(tokens_per_minute=60)
    busy = admit(limits, 0.0, app="busy")
    for n in range(1000):
        admit(limits, float(n), app=f"app{n}").ended(tokens=20, now_s=float(n))
    assert len(limits._usage) < 300
    busy.ended(tokens=20, now_s=1000.0)


LOOSE = {"ttft_ms": 1e6, "tpot_ms": 1e6}
NEVER = {"ttft_ms": 1e-3, "tpot_ms": 1e-3}


def call(app="mail", **more):
    return Call(app=app, request_id="1", prompt="a", config=GenerationConfig(), **more)


def test_objectives_are_written_as_they_are_read():
    for value, objective in (
        ("<40,70>", Slo(ttft=0.4, tpot=0.7)), ({"ttft_ms": 5, "tpot_ms": 1}, Latency(ttft_ms=5, tpot_ms=1)),
        ({"total_ms": 5}, EndToEnd(total_ms=5)), ({"joules": 2}, EnergyBudget(joules=2)),
    ):  # fmt: skip
        assert (objective_from(value), written(objective)) == (objective, value)
        assert bound(value) == Binding(objective)
        assert bound({"slo": value, "strict": True}) == Binding(objective, strict=True)
        assert bound({"slo": value, "shorten": True}) == Binding(objective, shorten=True)
        if isinstance(value, dict):
            assert bound(value | {"strict": True}) == Binding(objective, strict=True)
    for wrong in (3, None, {}, "40", "<0,5>", {"ttft_ms": 1}, {"total_ms": -1}, {"total_ms": 10**400}):
        with pytest.raises(ConfigError):
            objective_from(wrong)
        with pytest.raises(ConfigError):
            bound({"slo": wrong})


def test_the_calls_own_objective_goes_before_the_apps():
    given = Binding(Slo(ttft=0.4, tpot=0.7), strict=True)
    bindings = Bindings({"mail": given})
    own = Latency(ttft_ms=5, tpot_ms=1)
    assert bindings.applied(call("chat")) == call("chat")
    mine = {"strict": True, "shorten": False}
    assert bindings.applied(call()) == call(objective=given.objective, bound=True, **mine)
    assert bindings.applied(call(objective=own)) == call(objective=own, **mine)
    assert bindings.applied(call(strict=False)).strict is False
    bindings.bind("mail", Binding(own, shorten=True))
    assert bindings.applied(call()) == call(objective=own, strict=False, shorten=True, bound=True)
    assert bindings.applied(call(shorten=False)).shorten is False
    bindings.given = {}
    assert bindings.is_own("mail")
    bindings.unbind("mail")
    assert bindings.applied(call()) == call()


def test_bound_apps_are_bounded_and_budgets_of_energy_are_not_for_contexts(monkeypatch):
    bindings = Bindings({"mail": Binding(EnergyBudget(joules=2))})
    assert bindings.applied(call(context="a")) == call(context="a")
    assert bindings.applied(call()).objective == EnergyBudget(joules=2)
    monkeypatch.setattr(limits, "_MOST_BOUND", 1)
    for _ in range(2):
        bindings.bind("a", Binding(EndToEnd(total_ms=1)))
    with pytest.raises(BudgetExceeded):
        bindings.bind("b", Binding(EndToEnd(total_ms=1)))


def test_an_app_binds_itself_over_the_wire(served, http):
    mail, spy = served.client("mail"), served.client("spy")
    try:
        assert mail.bind(LOOSE) == ()
        told = mail.call(FOX, max_tokens=4).result()
        assert (told.facts["slo"], told.facts["slo_from"], told.met) == (LOOSE, "app", True)
        own = mail.call(FOX, slo="<50,60>", max_tokens=4).result()
        assert (own.facts["slo"], own.facts["slo_from"]) == ("<50,60>", "call")
        # No other app's.
        assert "slo" not in spy.call(FOX, max_tokens=4).result().facts
        assert spy.objective()["slo"] is None
        # Turns in contexts have it, too: the level follows.
        turn = facts(http, made(http, level=50), FOX)
        assert (turn["level"], turn["slo"], turn["slo_from"], turn["met"]) == (100, LOOSE, "app", True)
        # At every prompt length; here nothing is told that is not so.
        assert len(mail.bind(NEVER, strict=True)) == len(served.service.profile.tokens)
        with pytest.raises(ObjectiveMissed):
            mail.call(FOX, max_tokens=4).result()
        assert mail.call(FOX, max_tokens=4, strict=False).result().met is False
        served.backend.bindings.given = {"mail": Binding(Slo(ttft=0.5, tpot=0.5))}
        mail.unbind()
        assert (mail.objective()["slo"], mail.objective()["from"]) == ("<50,50>", "options")
    finally:
        served.backend.bindings.given = {}
        mail.unbind()


def test_what_cannot_be_bound_is_refused_and_the_header_binds_too(http):
    for body in (
        {}, {"slo": None}, {"slo": "40"}, {"slo": {"ttft_ms": 1}}, {"slo": "<40,70>", "strict": 1},
        {"slo": "<40,70>", "shorten": "yes"}, {"slo": "<40,70>", "app": "spy"}, {"slo": {"joules": 2}},
    ):  # fmt: skip
        refused = http.post("/v1/objective", json=body)
        assert refused.status_code == 400, refused.text
        assert http.get("/v1/objective").json()["slo"] is None
    told = http.post("/v1/objective", json={}, headers={"X-SLO": "<40,70>; strict"}).json()
    assert (told["slo"], told["strict"]) == ("<40,70>", True)
    assert http.delete("/v1/objective").json()["slo"] is None
    # What has no words is not shortened.
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "shorten": True, **FULL_LEVEL}
    refused = http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "shorten"), refused.text
