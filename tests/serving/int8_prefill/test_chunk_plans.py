"""Chunks are chosen with the order: by simulation where all stages are timed, else the cheapest."""

import dataclasses
import itertools

import pytest

from jaxllm.int8_prefill.recipe import ORDERS, Order
from jaxllm.int8_prefill.schedule import prompt_subgraphs, simulate
from jaxllm.serving.int8_prefill.buckets import IntegerStageBucket
from jaxllm.serving.int8_prefill.subgraph_times import ChunkPlanner, SubgraphTime, SubgraphTimes, chunk_plans
from jaxllm.serving.runners.runner import plan_chunks

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


def test_a_plan_is_kept_until_times_change():
    found = planner(lambda stage, tokens: tokens / 64)
    assert found.plan(256, 0, CAPACITY) == (128, 128)
    slow = SubgraphTime(alone=(50.0, 50.0), shared=(50.0, 50.0))
    found.measured.put({bucket_of(0, "project", 128, CAPACITY): slow}, 0.0)
    assert found.plan(256, 0, CAPACITY) == (128, 128)
    found.chosen.clear()
    assert found.plan(256, 0, CAPACITY) == (64, 64, 64, 64)
    # One chunk where short ones cost as much.
    for order in ORDERS:
        assert planner(lambda stage, tokens: 1.0, order=order).plan(256, 0, CAPACITY) == (256,)
    # The cheapest where times are missing.
    found = planner(lambda stage, tokens: tokens / 64, lengths=(128, 256))
    assert found.plan(256, 0, CAPACITY) == (256,)
    assert found.chosen == {}


# Times of subgraphs in a file: read back, kept together, and measured anew where they are malformed.


ONE = IntegerStageBucket(
    stage="project", shadowed=False, tokens=16, cache_tokens=0, layer=0, float_rows=0, device="cpu:0"
)
OTHER = dataclasses.replace(ONE, stage="finish", device="cpu:1", own_cores=True)
TIME = SubgraphTime(alone=(1.0, 2.0), shared=(3.0, 4.0))


def test_what_is_kept_comes_back(tmp_path):
    """Two processes that measured different stages both keep theirs."""
    path = tmp_path / "profiles" / "times.json"
    here, there = SubgraphTimes(path, IntegerStageBucket), SubgraphTimes(path, IntegerStageBucket)
    here.put({ONE: TIME}, 0.5)
    here.keep()
    there.put({OTHER: TIME}, 0.25)
    there.keep()
    found = SubgraphTimes(path, IntegerStageBucket)
    assert (found[ONE], found[OTHER]) == (TIME, TIME)
    assert found.handover_ms == 0.25


@pytest.mark.parametrize(
    ("content", "told"),
    [
        *(
            (content, True)
            for content in (
                b"", b"[", b"[]", b"null", b'{"version": 1}', b"\xff",
                b'{"version": 1, "handover_ms": 0, "times": 3}',
                b'{"version": 1, "handover_ms": NaN, "times": []}',
                b'{"version": 1, "handover_ms": 0, "times": [{"alone": [1, 2], "shared": [1, 2]}]}',
            )
        ),
        # Another version, and a negative time.
        (b'{"version": 0}', False),
        (None, False),
    ],
)  # fmt: skip
def test_what_is_malformed_is_as_nothing(tmp_path, content, told, caplog):
    path = tmp_path / "times.json"
    found = SubgraphTimes(path, IntegerStageBucket)
    found.put({ONE: TIME}, 0.5)
    found.keep()
    path.write_bytes(path.read_bytes().replace(b"3.0", b"-3.0") if content is None else content)
    found = SubgraphTimes(path, IntegerStageBucket)
    assert ONE not in found
    assert ("measured again" in caplog.text) or not told
    found.put({ONE: TIME}, 0.5)
    found.keep()
    assert SubgraphTimes(path, IntegerStageBucket)[ONE] == TIME
