"""kill -9 at random moments and file operations: nothing older is lost, no byte is left over, and the store
always opens."""

import dataclasses
import os
import random

import pytest

from jaxllm.serving.ground.options import EngineOptions
from tests import tiny_states
from tests.serving.contexts.killed import Told, live_and_die, use_contexts
from tests.tiny import write_tiny_bundle

# Of the long test, all lanes together; a thousand take ten minutes on two cores.
KILLS, LANES = int(os.environ.get("JAXLLM_TEST_KILLS", "32")), 4
LONG = [pytest.mark.campaign, pytest.mark.timeout(7200)]
OPTIONS = EngineOptions(
    context_tokens=128,
    cache_tokens=(128,),
    chunk_tokens=(16,),
    decode_block=4,
    kv_codec="raw",
    buckets_bytes=1 << 28,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lane", "kills"),
    [
        (0, 3),
        (LANES - 1, 3),
        (LANES, 3),
        *(pytest.param(lane, KILLS // LANES, marks=LONG) for lane in range(LANES)),
    ],
)
def test_kills_lose_at_most_what_was_running(lane, kills, tmp_path):
    """What ended before a kill is there after it, and goes on token for token."""
    # In one lane chunks are stored at fewer bits; one more model has states.
    options = dataclasses.replace(OPTIONS, kv_codec="kivi" if lane == LANES - 1 else "raw")
    path, draw, told = tmp_path / "tiny.jaxllm", random.Random(lane), Told()
    bundle = write_tiny_bundle(path) if lane < LANES else tiny_states.write_bundle(path, "delta_rule")
    for seed in range(lane * kills, (lane + 1) * kills):
        after_s = draw.uniform(0.0, 0.4)
        arguments = (bundle, options, tmp_path / "cache", seed, None)
        live_and_die(told, use_contexts, tmp_path / "store", *arguments, after_s=after_s)
    assert told.tokens
    assert told.deeds >= kills
    print(f"{kills} kills, {told.deeds} deeds, {told.checked} answers compared")


@pytest.mark.slow
def test_kills_at_file_operations_lose_at_most_what_was_running(tmp_path):
    told, bundle = Told(), write_tiny_bundle(tmp_path / "tiny.jaxllm")
    for at in range(1, 241, 15):
        options = dataclasses.replace(OPTIONS, kv_codec="kivi" if at % 2 else "raw")
        arguments = (bundle, options, tmp_path / "cache", at, at)
        live_and_die(told, use_contexts, tmp_path / "store", *arguments, after_s=None)
    assert told.lives == 16
    assert told.deeds > told.lives // 2
