"""`jaxllm bench service`, whole: real services under load, on the packaged model."""

import pytest

from benchmarks.service.reference import Reference
from benchmarks.service.run import Plan, Subject, _duration, _loads, run
from benchmarks.service.systems import OurService
from benchmarks.service.workload import Sizes
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


SIZES = Sizes(prompt_tokens=32, answer_tokens=8, context_tokens=160, vocab_size=300)
REFERENCE = Reference((16, 160), (10.0, 10.0), 10.0)


def loads_of(repetition, plan):
    return _loads("m", plan, SIZES, REFERENCE, None, repetition, lambda _: None)


def test_no_prompt_is_sent_twice():
    """Else a server would have it in its cache, from another load."""
    plan = Plan(
        loads=(0.5, 1.0), clients=(1, 8), load_s=2.0, clients_s=1.0, prompt_tokens=32, answer_tokens=8
    )
    loads = [load for repetition in range(2) for load in loads_of(repetition, plan)]
    assert len(loads) == 8
    prompts = [{request.prompt for request in load.requests} for load in loads]
    assert all(len(each) == len(load.requests) for each, load in zip(prompts, loads, strict=True))
    assert len(set.union(*prompts)) == sum(map(len, prompts))
    # The same ones for each system, whenever they are drawn.
    assert [load.requests for load in loads_of(1, plan)] == [load.requests for load in loads[4:]]


def test_clients_have_enough_requests_and_patience():
    plan = Plan(clients=(1, 64), clients_s=100.0, patience_s=3.0, parts=("clients",))
    few, many = loads_of(0, plan)
    # An answer takes about 80 ms.
    assert len(few.requests) > 5000
    assert few.patience_s == 3
    assert 8 < many.patience_s < 16


def test_the_time_of_all_loads_is_told():
    plan = Plan(loads=(1.0,), clients=(8,), load_s=60.0, clients_s=30.0, patience_s=30.0)
    systems = [OurService(), OurService("no-planning")]
    # Without objectives there is nothing to plan: three loads in each of two repetitions.
    assert _duration(loads_of(0, plan), systems, 2).startswith("takes 5.0 minutes, at most 8.0 ")


def test_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="jaxllm prepare"):
        run(Subject(model=tmp_path), PLAN)


@pytest.mark.parametrize("wrong", [{"slo_scale": 0.0}, {"loads": (-1.0,)}])
def test_plans_are_checked(wrong):
    with pytest.raises(ConfigError):
        Plan(**wrong)
