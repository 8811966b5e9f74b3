"""The service over programs: plans by a profile of this device, and measures it anew on another."""

import dataclasses

import pytest

from jaxllm.errors import ConfigError, ObjectiveMissed
from jaxllm.export.device import opening
from jaxllm.export.device.service import ProgramService
from jaxllm.serving.elastic.objectives import Latency
from tests.export.sizes import CONTEXT


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def service(engine, profile):
    return ProgramService(engine, profile)


def test_a_call_takes_the_level_that_is_in_time(service):
    whole, small = (service.profile.tpot(level, 20) for level in (100, 40))
    assert whole >= small
    relaxed = service.call("one two", slo=Latency(ttft_ms=1e6, tpot_ms=1e6), max_tokens=3).result()
    assert (relaxed.plan.level, relaxed.plan.source, relaxed.met) == (100, "whole", True)
    hasty = service.call("one two", slo=Latency(ttft_ms=1e-6, tpot_ms=1e-6), max_tokens=3).result()
    assert (hasty.plan.source, hasty.met) == ("nearest", False)
    with pytest.raises(ObjectiveMissed):
        service.call("one two", slo=Latency(ttft_ms=1e-6, tpot_ms=1e-6), strict=True)


def test_a_profile_is_kept_and_measured_anew_on_another_device(engine, cache, monkeypatch):
    first = opening.device_profile(engine)
    assert first.coarse
    assert first.levels == (40, 100)
    assert first.tokens[-1] < CONTEXT
    marked = dataclasses.replace(first, tpot_ms=tuple(tuple(1e3 for _ in row) for row in first.tpot_ms))
    opening.save_profile(marked, opening.profile_path(engine))
    assert opening.device_profile(engine) == marked
    # One thread is another device, and so is another processor.
    assert opening.profile_path(engine, threads=64) != opening.profile_path(engine)
    monkeypatch.setattr(opening, "cpu_features", lambda: ["another processor"])
    assert opening.device_profile(engine) != marked


def test_contexts_take_a_folder(service):
    with pytest.raises(ConfigError, match="keeps no contexts"):
        service.new_context("mail")


def test_contexts_of_a_service(folder, cache, tmp_path):
    opened = ProgramService.open(
        opening.open_device(folder), contexts=tmp_path / "contexts", budget_bytes=1 << 20
    )
    context = opened.new_context("mail")
    text = context.generate([1, 2, 3]).result().text
    opened.close()
    again = ProgramService.open(
        opening.open_device(folder), contexts=tmp_path / "contexts", budget_bytes=1 << 20
    )
    tokens = again.context("mail", context.name).tokens
    assert tokens[:3] == (1, 2, 3)
    assert again.engine.tokenizer.decode(tokens[3:]).startswith(text)
    again.close()
