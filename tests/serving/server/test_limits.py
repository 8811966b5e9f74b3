"""Limits of apps, by hand at given times, and as laws over random calls."""

import dataclasses
import math
import random
from typing import Any

import pytest

from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.serving.server.calls import ContextFacts, Refused
from jaxllm.serving.server.limits import AppLimits, Limiter, Limits, require_room


def limiter(**limits: Any) -> Limiter:
    return Limiter(Limits(default=AppLimits(**limits)))


def admit(
    limiter: Limiter, now_s: float = 0.0, *, app: str = "mail", prompt: int = 10, most: int = 10
) -> Any:
    return limiter.admit(app, prompt_tokens=prompt, max_tokens=most, now_s=now_s)


def retry(limiter: Limiter, now_s: float = 0.0, **more: Any) -> float | None:
    with pytest.raises(Refused) as caught:
        admit(limiter, now_s, **more)
    assert caught.value.reason == "full"
    return caught.value.retry_after_s


def facts(name: str, *, stored: int = 0, pinned: bool = False) -> ContextFacts:
    return ContextFacts(name=name, tokens=1, level=100, pinned=pinned, stored_bytes=stored)


def test_queued_calls_are_those_that_have_not_started_and_an_end_counts_once() -> None:
    limits = limiter(queued=1)

    def counts() -> tuple[int, int]:
        return limits.usage("mail").queued, limits.usage("mail").running

    first = admit(limits)
    assert retry(limits) == 1.0
    admit(limits, app="calendar")
    first.started()
    first.started()
    second = admit(limits)
    assert counts() == (1, 1)
    for _ in range(3):
        second.ended(tokens=5, now_s=0.0)
    second.started()
    assert counts() == (0, 1)


def test_tokens_are_reserved_and_settled() -> None:
    limits = limiter(tokens_per_minute=600)
    call = admit(limits, 0.0, prompt=100, most=400)
    assert limits.usage("mail").tokens == 100
    # 50 more than there are, at ten a second.
    assert retry(limits, 0.0, prompt=50, most=100) == pytest.approx(5.0)
    assert retry(limits, 4.0, prompt=50, most=100) == pytest.approx(1.0)
    call.ended(tokens=150, now_s=4.0)
    assert limits.usage("mail").tokens == 100 + 40 + 350
    admit(limits, 4.0, prompt=90, most=400)
    assert limits.usage("mail").tokens == 0
    assert limits.usage("calendar").tokens == math.inf


def test_an_answer_may_be_longer_than_a_minute_allows() -> None:
    """It takes a full bucket, and what it used beyond is owed."""
    limits = limiter(tokens_per_minute=60)
    call = admit(limits, 0.0, prompt=30, most=1000)
    call.started()
    call.ended(tokens=130, now_s=10.0)
    assert limits.usage("mail").tokens == 10 + 60 - 130
    assert retry(limits, 10.0, prompt=5, most=5) == pytest.approx(70.0)
    admit(limits, 80.0, prompt=5, most=5)


def test_a_bucket_is_never_more_than_full() -> None:
    limits = limiter(tokens_per_minute=60)
    assert retry(limits, prompt=61) is None, "a prompt beyond a minute is never taken"
    call = admit(limits, 0.0, prompt=10, most=50)
    call.ended(tokens=0, now_s=1000.0)
    assert limits.usage("mail").tokens == 60
    # Nor does a clock that goes back fill it.
    admit(limits, 0.0, prompt=10, most=50)
    assert limits.usage("mail").tokens == 0


def test_limits_may_change_while_calls_run() -> None:
    limits = limiter(tokens_per_minute=60, in_flight=3)
    calls = [admit(limits, 0.0, prompt=10, most=10) for _ in range(3)]
    limits.limits = Limits(default=AppLimits(in_flight=1))
    assert retry(limits) == 1.0, "calls in flight are those that have not ended"
    for each in calls:
        each.ended(tokens=20, now_s=0.0)
    admit(limits)
    limits.limits = Limits(default=AppLimits(tokens_per_minute=30))
    admit(limits, prompt=20, most=20)
    assert limits.usage("mail").tokens == 0


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


def test_each_app_has_its_own_limits() -> None:
    limits = Limiter(Limits(default=AppLimits(in_flight=1), apps={"mail": AppLimits()}))
    for _ in range(100):
        admit(limits)
    admit(limits, app="calendar")
    assert retry(limits, app="calendar")


def test_contexts() -> None:
    limits = AppLimits(contexts=2, stored_bytes=100, pinned=1)
    there = [facts("a", stored=60, pinned=True), facts("b", stored=40)]
    require_room(limits, there[:1], new=True)
    require_room(limits, there, stored=False, pin="a")
    for changes, message in (
        ({"new": True}, "2 contexts of at most 2"), ({}, "100 bytes on storage of at most 100"),
        ({"stored": False, "pin": "b"}, "pinned 1"), ({"stored": False, "pin": ""}, "pinned 1"),
    ):  # fmt: skip
        with pytest.raises(BudgetExceeded, match=message):
            require_room(limits, there, **changes)
    require_room(AppLimits(), there * 100, new=True, pin="")


def test_limits_are_checked_and_options_of_contexts_have_the_loosest() -> None:
    limits = Limits(default=AppLimits(contexts=2, stored_bytes=100), apps={"mail": AppLimits(contexts=5)})
    assert limits.context_options() == {"contexts_per_app": 5, "app_quota_bytes": 0}
    wrong: tuple[Any, ...] = (-1, 1.5, True, "1", None)
    for name in (field.name for field in dataclasses.fields(AppLimits)):
        for value in wrong:
            with pytest.raises(ConfigError, match=name):
                AppLimits(**{name: value})
    with pytest.raises(ConfigError, match="an app's name"):
        Limits(apps={"a b": AppLimits()})
