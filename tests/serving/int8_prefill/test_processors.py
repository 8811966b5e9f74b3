"""Two processors give what one gives, and run each subgraph once, after all that it needs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.int8_prefill.processors import TwoProcessors, prepare_processors

ROOT = Path(__file__).parents[3]


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


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="takes two cores"
)
@pytest.mark.parametrize(
    ("order", "integer_bytes"),
    [
        # Room for the weights of a few subgraphs: the others run beside attention.
        ("out-of-order", 40_000),
        pytest.param("out-of-order", 0, marks=pytest.mark.slow),
        pytest.param("in-order", 0, marks=pytest.mark.slow),
    ],
)
def test_two_are_as_one(calibrated_bundle, order, integer_bytes):
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


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="takes two cores"
)
def test_times_and_graphs_of_one_start_are_there_for_the_next(calibrated_bundle, tmp_path, monkeypatch):
    """Those of the integer processor's device, too; and the weights of the schedule are measured ones."""
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path))
    # What comes from JAX's own cache cannot be kept in ours.
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
    run = run_module("tests.serving.int8_prefill.two_processors", str(calibrated_bundle))
    assert run.returncode == 0, run.stderr[-2000:]
    first, second = json.loads(run.stdout.splitlines()[-1])
    assert (first["measured"], second["measured"]) == (1, 0)
    assert len(set(first["times"])) > 1
    assert second["times"] == first["times"]
    assert (first["loaded"], second["loaded"]) == (0, first["integer"])
    assert second["integer"] == first["integer"] > 0
    assert second["logits"] == first["logits"]
    assert len(list((tmp_path / "profiles").glob("*.subgraphs.json"))) == 1


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
