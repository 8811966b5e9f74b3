"""Tests what a device's system reports: heat lowers levels, trim levels shrink what can be, and apps in the
background wait or are refused, as limits and a day's tokens say."""

import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.server.calls import Refused
from jaxllm.serving.server.device_state import DeviceState
from jaxllm.serving.server.limits import AppLimits, Limiter, Limits
from jaxllm.serving.server.memory import Holding, ServiceMemory
from tests.serving.server.services import FOX, FULL_LEVEL, facts, made
from tests.serving.server.test_memory import World


@pytest.fixture
def operator(served):
    """Reports the state of the device, which is none again afterwards."""
    yield served.http("admin")
    served.executor.device = DeviceState()


def said(http, **more):
    return http.post("/v1/completions", json={"prompt": FOX, "max_tokens": 2, **FULL_LEVEL, **more})


def code(answer):
    return answer.status_code, answer.json()["error"]["code"]


def test_heat_bounds_the_work_of_every_call(served, http, operator):
    service, before = served.service, served.service.profile
    times = {"ttft_ms": ((2.0, 2000.0), (5.0, 5000.0)), "tpot_ms": ((2.0, 2.0), (5.0, 5.0))}
    service.use_profile(DeviceProfile(levels=(50, 100), tokens=(1, 1000), chunk_tokens=(16,), **times))
    assert said(http).json()["jaxllm"]["level"] == 100
    context = made(http, level=100)
    for thermal in ("severe", "emergency"):
        assert operator.post("/v1/device", json={"thermal": thermal}).json()["thermal"] == thermal
        assert http.get("/health").json()["device"] == {"thermal": thermal, "trim": "none"}
        if thermal == "severe":
            # As the profile predicts, which has the small level at less than half; whatever the objective.
            for more in ({}, {"slo": "<100,100>"}):
                assert said(http, **more).json()["jaxllm"]["level"] == 50
            assert facts(http, context, FOX)["level"] == 50
            metrics = served.backend.metrics.text().decode()
            assert "jaxllm_device_thermal 3.0" in metrics
            assert "jaxllm_device_work_share 0.5" in metrics
    assert code(said(http)) == (503, "BUSY")
    assert operator.post("/v1/device", json={"thermal": "none"}).status_code == 200
    assert said(http).json()["jaxllm"]["level"] == 100
    service.use_profile(before)


def test_apps_in_the_background_wait_or_are_refused(served, http, operator, monkeypatch):
    seen, real = [], served.executor.submit

    def submit(call, loop):
        seen.append(call.priority)
        return real(call, loop)

    monkeypatch.setattr(served.executor, "submit", submit)
    for foreground in (None, ["mail"], ["spy"]):
        assert operator.post("/v1/device", json={"foreground": foreground}).status_code == 200
        assert said(http).status_code == 200
    assert seen == ["foreground", "foreground", "background"]
    served.backend.limiter.limits = Limits(default=AppLimits(foreground_only=True))
    for foreground, expected in ((None, 403), (["spy"], 403), (["mail"], 200)):
        operator.post("/v1/device", json={"foreground": foreground})
        assert said(http).status_code == expected
    operator.post("/v1/device", json={"foreground": []})
    assert code(said(http)) == (403, "BACKGROUND_USE_BLOCKED")
    # Apps neither report nor read it.
    assert code(http.post("/v1/device", json={})) == (403, "not_operator")
    assert code(http.get("/v1/device")) == (403, "not_operator")
    for wrong in ({"thermal": "hot"}, {"trim": 1}, {"foreground": ["a b"]}, {"heat": "none"}):
        assert operator.post("/v1/device", json=wrong).status_code == 400
    assert operator.get("/v1/device").json()["foreground"] == []
    with pytest.raises(ConfigError):
        DeviceState(thermal="hot")


def test_tokens_of_a_day(served, http):
    limits = Limiter(Limits(default=AppLimits(tokens_per_day=100)))
    reserved = limits.admit("mail", prompt_tokens=10, max_tokens=80, now_s=0.0)
    limits.ended("mail", reserved, started=False, tokens=60, now_s=0.0)
    with pytest.raises(Refused, match="100 tokens a day") as refused:
        limits.admit("mail", prompt_tokens=30, max_tokens=30, now_s=0.0)
    assert (refused.value.reason, refused.value.retry_after_s) == ("quota", pytest.approx(0.2 * 86_400))
    limits.admit("mail", prompt_tokens=30, max_tokens=30, now_s=0.2 * 86_400)
    served.backend.limiter.limits = Limits(default=AppLimits(tokens_per_day=3))
    assert code(said(http)) == (429, "PER_APP_BATTERY_USE_QUOTA_EXCEEDED")
    served.backend.limiter.limits = Limits(default=AppLimits(tokens_per_minute=3))
    assert code(said(http)) == (429, "BUSY")


def test_trim_levels_shrink_what_can_be_and_it_comes_back(monkeypatch):
    world, size = World(monkeypatch), [900]
    holding = Holding(
        "contexts", lambda: size[0], lambda limit: size.__setitem__(0, min(size[0], limit)), most=lambda: 900,
        least=lambda: 200,
    )  # fmt: skip
    world.holdings = (holding,)
    memory = ServiceMemory(0, 0, holdings=[holding], clock=lambda: world.now)
    found = []
    for trim in ("none", "moderate", "moderate", "critical", "none"):
        memory.trim, world.now = trim, world.now + 1.0
        memory.step()
        found.append(holding.limit_bytes)
    # By a twentieth of what there was, twice; then by all; and nothing is left of it.
    assert found == [900, 850, 800, 200, 900]
    assert memory.figures(0)["limit_bytes"] == 0
