"""`jaxllm bench service`, whole: real services under load, on the packaged model."""

import pytest

from benchmarks.service.run import Plan, Subject, run
from jaxllm.errors import ConfigError
from serving.bundles import find_model

PLAN = Plan(
    loads=(0.5,), clients=(2,), repetitions=1, load_s=2.0, clients_s=1.0, patience_s=30.0, prompt_tokens=32,
    answer_tokens=8, reference_repeats=1, starts=1,
)  # fmt: skip


@pytest.mark.slow
def test_services_under_load():
    told, kept = [], []
    subject = Subject(model=find_model("default"), systems=("no-planning",))
    rows = run(subject, PLAN, tell=told.append, kept=kept)
    assert {row.system for row in rows} == {"jaxllm", "jaxllm-no-planning"}
    assert any("idle whole model: TTFT" in each for each in told)
    # Without objectives there is nothing to plan.
    assert {each.system for each in kept if "clients" in each.case} == {"jaxllm"}
    outcomes = [one for each in kept for one in each.window.outcomes]
    assert outcomes
    assert all(one.answered for one in outcomes), {one.error for one in outcomes}
    levels = {one.level for each in kept if "planning" in each.system for one in each.window.outcomes}
    assert levels == {100}
    metrics = {row.metric for row in rows}
    assert {"goodput_per_s", "slo_met", "ttft_ms", "tpot_ms", "decode_tokens_per_s", "refused"} <= metrics
    assert {"peak_memory_bytes", "load_ms"} <= metrics


def test_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="jaxllm prepare"):
        run(Subject(model=tmp_path), PLAN)


@pytest.mark.parametrize("wrong", [{"slo_scale": 0.0}, {"loads": (-1.0,)}])
def test_plans_are_checked(wrong):
    with pytest.raises(ConfigError):
        Plan(**wrong)
