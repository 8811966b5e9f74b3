"""Chunks are chosen with the order: by simulation where all stages are timed, else the cheapest."""

import itertools

import pytest

from jaxllm.int8_prefill.schedule import ORDERS, Order, prompt_subgraphs, simulate
from jaxllm.serving.int8_prefill.chunk_plans import ChunkPlanner, chunk_plans
from jaxllm.serving.int8_prefill.stage_bucket import IntegerStageBucket
from jaxllm.serving.int8_prefill.subgraph_times import SubgraphTime, SubgraphTimes
from jaxllm.serving.runners.chunks import plan_chunks

LENGTHS, CAPACITY, LAYERS = (64, 128, 256), 1024, 4


def bucket_of(layer, stage, tokens, capacity):
    del layer, capacity
    return IntegerStageBucket(
        stage=stage, shadowed=False, tokens=tokens, cache_tokens=0, layer=0, float_rows=0, device="cpu:0"
    )


def planner(ms_of, lengths=LENGTHS, order: Order = "out-of-order"):
    """With times of stages by (stage, tokens)."""
    measured = SubgraphTimes(None, IntegerStageBucket)
    for stage, tokens in itertools.product(("project", "attend", "finish"), lengths):
        alone = (ms_of(stage, tokens),) * 2
        measured.put({bucket_of(0, stage, tokens, CAPACITY): SubgraphTime(alone=alone, shared=alone)}, 0.0)
    return ChunkPlanner(LENGTHS, order, measured, bucket_of, lambda n: prompt_subgraphs(n, [False] * LAYERS))


def test_plans_cover_the_prompt_the_cheapest_first():
    assert chunk_plans(64, LENGTHS) == [(64,)]
    assert chunk_plans(256, LENGTHS) == [(256,), (128, 128), (64, 64, 64, 64)]
    for tokens in (1, 100, 300, 1000):
        plans = chunk_plans(tokens, LENGTHS)
        assert plans[0] == tuple(plan_chunks(tokens, LENGTHS))
        assert all(sum(plan) >= tokens for plan in plans)


def test_two_halves_overlap_where_one_chunk_waits():
    """Times that grow with the tokens alone: 256 as two of 128 lets both processors work."""
    found = planner(lambda stage, tokens: tokens / 64)
    spans = {}
    for plan in chunk_plans(256, LENGTHS):
        chunks = list(zip(plan, itertools.accumulate(plan, initial=0), strict=False))
        subgraphs = prompt_subgraphs(len(plan), [False] * LAYERS)
        spans[plan] = simulate(subgraphs, found.times(chunks, CAPACITY)).makespan_ms
    assert spans[128, 128] < 0.75 * spans[(256,)]
    assert found.plan(256, 0, CAPACITY) == min(spans, key=lambda plan: spans[plan])


@pytest.mark.parametrize("order", ORDERS)
def test_one_chunk_where_short_ones_cost_as_much(order):
    assert planner(lambda stage, tokens: 1.0, order=order).plan(256, 0, CAPACITY) == (256,)


def test_a_plan_is_kept_until_times_change():
    found = planner(lambda stage, tokens: tokens / 64)
    assert found.plan(256, 0, CAPACITY) == (128, 128)
    slow = SubgraphTime(alone=(50.0, 50.0), shared=(50.0, 50.0))
    found.measured.put({bucket_of(0, "project", 128, CAPACITY): slow}, 0.0)
    assert found.plan(256, 0, CAPACITY) == (128, 128)
    found.chosen.clear()
    assert found.plan(256, 0, CAPACITY) == (64, 64, 64, 64)


def test_the_cheapest_where_times_are_missing():
    found = planner(lambda stage, tokens: tokens / 64, lengths=(128, 256))
    assert found.plan(256, 0, CAPACITY) == (256,)
    assert found.chosen == {}
