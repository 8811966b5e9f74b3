"""Two processors give what one gives, run each subgraph once, in chunks chosen by times."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.int8_prefill.recipe import ORDERS, Order
from jaxllm.int8_prefill.schedule import prompt_subgraphs
from jaxllm.serving.int8_prefill.buckets import IntegerStageBucket
from jaxllm.serving.int8_prefill.processor_pair import ChunkPlanner, SubgraphTime, SubgraphTimes, chunk_plans
from jaxllm.serving.int8_prefill.processors import TwoProcessors, prepare_processors

ROOT = Path(__file__).parents[3]
needs_two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="requires two cores"
)


def run_module(*command):
    """Runs a module in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@needs_two_cores
@pytest.mark.parametrize(
    ("order", "integer_bytes"),
    [
        # Room for the weights of a few subgraphs: the others run beside attention.
        ("out-of-order", 40_000),
        pytest.param("out-of-order", 0, marks=pytest.mark.slow),
        pytest.param("in-order", 0, marks=pytest.mark.slow),
    ],
)
def test_two_are_as_one(calibrated_bundle, order, integer_bytes, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    # What comes from JAX's own cache cannot be kept in ours.
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
    run = run_module(
        "tests.serving.int8_prefill.two_processors", str(calibrated_bundle), order, str(integer_bytes)
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    one, two = np.array(found["logits1"]), np.array(found["logits2"])
    np.testing.assert_allclose(two, one, atol=2e-3 * np.abs(one).max())
    assert found["keys2"] == pytest.approx(found["keys1"], rel=1e-3)
    assert found["answer2"] == found["answer1"]
    # As it is beside a GPU: weights in rows, in graphs of their own.
    np.testing.assert_allclose(np.array(found["logits3"]), one, atol=2e-2 * np.abs(one).max())
    assert found["answer3"] == found["answer1"]
    assert found["in_rows"] == {"integer": True, "float": False}
    assert found["runs"] == found["subgraphs"]
    assert found["once"]
    # Of four chunks: a plain layer's two, a shadowed one's three, unless memory is short.
    assert 0 < found["integer"] <= 4 * 5
    assert (found["integer"] < 4 * 5) == bool(integer_bytes)
    assert found["in_time"]
    # One request was warmed up for, and its subgraphs were timed.
    assert len(found["weights"]) > 1
    assert 1.0 not in found["weights"]
    # Times and buckets of one start are there for the next, those of the integer processor's device, too.
    (measured, (none, buckets)), (again, (loaded, _)) = found["starts"]
    assert (measured, again, none) == (1, 0, 0)
    assert loaded == buckets > 0
    # A file for each kind of integer processor.
    assert len(list((tmp_path / "profiles").glob("*.subgraphs.json"))) == 2


def test_a_process_that_was_not_prepared():
    """JAX is in use here, with one device."""
    jax.devices()
    with pytest.raises(ConfigError, match="prepared before JAX is used"):
        prepare_processors()
    with pytest.raises(
        ConfigError, match=r"call jaxllm\.serving\.int8_prefill\.processors\.prepare_processors"
    ):
        TwoProcessors()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is one")
def test_no_gpu():
    """It is said, before a model is opened."""
    with pytest.raises(ConfigError, match=r"JAX has none here; install JAX for your GPU"):
        TwoProcessors("gpu")
    asked = ["generate", "--processors", "2", "--integer-device", "gpu", "-p", "a"]
    run = run_module("jaxllm.cli.main", *asked)
    assert run.returncode == 1, run.stderr[-2000:]
    assert "JAX has none here" in run.stderr
    assert "Traceback" not in run.stderr


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


def test_plans_by_times():
    assert chunk_plans(64, LENGTHS) == [(64,)]
    assert chunk_plans(256, LENGTHS) == [(256,), (128, 128), (64, 64, 64, 64)]
    # Times that grow only with the tokens: 256 as two of 128 lets both processors work.
    found = planner(lambda stage, tokens: tokens / 64)
    assert found.plan(256, 0, CAPACITY) == (128, 128)
    # A plan is kept until times change.
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
                b"", b"[]", b"\xff", b'{"version": 1, "handover_ms": NaN, "times": []}',
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
