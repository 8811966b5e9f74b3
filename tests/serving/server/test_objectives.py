"""Objectives that apps are bound to: by options, by themselves, and which one counts."""

import pytest

from jaxllm.elastic.slo import Slo
from jaxllm.errors import BudgetExceeded, ConfigError, ObjectiveMissed
from jaxllm.serving.elastic.objectives import Binding, EndToEnd, EnergyBudget, Latency
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.server import limits
from jaxllm.serving.server.calls import Call
from jaxllm.serving.server.limits import Bindings, bound, objective_from, written
from tests.serving.server.context_service import WHOLE
from tests.serving.server.talking import FOX, facts, made

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
    loose = Binding(EndToEnd(total_ms=1))
    for _ in range(2):
        bindings.bind("a", loose)
    with pytest.raises(BudgetExceeded):
        bindings.bind("b", loose)


def test_an_app_binds_itself_over_the_wire(served, http):
    mail, spy = served.client("mail"), served.client("spy")
    try:
        assert mail.objective() == {
            "object": "objective", "slo": None, "strict": False, "shorten": False, "from": None,
        }  # fmt: skip
        assert mail.bind(LOOSE) == ()
        assert mail.objective()["from"] == "app"
        told = mail.call(FOX, max_tokens=4).result()
        assert (told.facts["slo"], told.facts["slo_from"], told.met) == (LOOSE, "app", True)
        own = mail.call(FOX, slo="<50,60>", max_tokens=4).result()
        assert (own.facts["slo"], own.facts["slo_from"]) == ("<50,60>", "call")
        # No other app's.
        assert "slo" not in spy.call(FOX, max_tokens=4).result().facts
        assert spy.objective()["slo"] is None
        mail.bind(LOOSE, shorten=True)
        assert mail.objective()["shorten"] is True
        assert mail.call(FOX, max_tokens=4).result().met
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
    body = {"prompt": FOX, "max_tokens": 4, **WHOLE}
    assert "slo" not in http.post("/v1/completions", json=body).json()["jaxllm"]


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
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "shorten": True, **WHOLE}
    refused = http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "shorten"), refused.text
