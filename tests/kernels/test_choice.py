"""Tests the choice of kernels and threads, and its messages."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from tests.kernels.switching import NATIVE, needs_native, threads_of

ROOT = Path(__file__).parents[2]

# Runs in a process of its own: a choice holds as long as its process. Tells, for each environment, what
# `kernels` found or how it refused.
TELL = """
import json, os, sys
from jaxllm.kernels import native
from jaxllm.errors import ConfigError

def tell(environment):
    for name in (native.CHOICE_VARIABLE, native.THREADS_VARIABLE):
        os.environ.pop(name, None)
    os.environ.update(environment)
    native.process_kernels.cache_clear()
    try:
        found = native.kernels()
        return dict(name=found.name, reason=found.reason, choices=found.choices, threads=native.threads())
    except ConfigError as error:
        return dict(error=str(error))
"""


def python(source: str, *, cwd: Path = ROOT, **environment: str) -> str:
    """What a script prints, started afresh."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAXLLM_")} | environment
    env["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def told(environments: list[dict[str, str]], before: str = "") -> list[dict[str, Any]]:
    source = f"{before}\n{TELL}\nprint(json.dumps([tell(each) for each in json.loads(sys.argv[1])]))"
    source = source.replace("sys.argv[1]", repr(json.dumps(environments)))
    return json.loads(python(source))


def kernels_and_threads(choice: str | None = None, threads: str | None = None) -> dict[str, str]:
    asked = {native.CHOICE_VARIABLE: choice, native.THREADS_VARIABLE: threads}
    return {name: value for name, value in asked.items() if value is not None}


@needs_native
def test_what_the_environment_asks_for():
    """In one process, from the fastest kernels to each that this processor runs, and to none."""
    asked = [kernels_and_threads(), kernels_and_threads(threads="3"), kernels_and_threads("xla", threads="3")]
    asked += [kernels_and_threads(name, threads="1") for name in NATIVE]
    plain, three, xla, *chosen = told(asked)
    assert plain["choices"] == list(NATIVE)
    assert plain["name"] == NATIVE[0]
    assert plain["reason"] == "the fastest of those built that this processor runs"
    assert plain["threads"] == len(os.sched_getaffinity(0))
    assert three == plain | {"threads": 3}
    assert xla == plain | {"name": "xla", "reason": "JAXLLM_KERNELS=xla", "choices": [], "threads": 1}
    for name, found in zip(NATIVE, chosen, strict=True):
        assert (found["name"], found["reason"], found["threads"]) == (name, f"JAXLLM_KERNELS={name}", 1)
    assert "portable" in NATIVE
    assert len(set(NATIVE)) == len(NATIVE)


@needs_native
def test_what_cannot_be_had_is_named():
    """One line: the variable, what is wrong with it and what is there instead."""
    bad_names = ["nonsense", "AVX2", "avx2 ", "\N{SNOWMAN}"]
    bad_counts = ["nonsense", "0", "-1", "257", "1.5", "", "99999999999999999999"]
    asked = [kernels_and_threads(name) for name in bad_names]
    asked += [kernels_and_threads(threads=count) for count in bad_counts]
    found = told([*asked, kernels_and_threads(threads="2")])
    assert found.pop()["threads"] == 2
    for environment, each in zip(asked, found, strict=True):
        (variable, value), message = next(iter(environment.items())), each["error"]
        assert variable in message, environment
        assert value in message, environment
        assert "portable" in message or variable == native.THREADS_VARIABLE
        assert "\n" not in message


@needs_native
def test_more_processors_than_threads_are_for():
    """Nobody asked for anything: the kernels take as many as they can."""
    many = "import os; os.sched_getaffinity = lambda process: set(range(1000)); os.cpu_count = lambda: 1000"
    (found,) = told([{}], before=many)
    assert found["name"] == NATIVE[0]
    assert 2 <= found["threads"] <= 1000


NOT_BUILT = "import sys; sys.modules['jaxllm.kernels._native'] = None"
BROKEN = """
import importlib.abc, sys
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "jaxllm.kernels._native":
            raise ImportError("undefined symbol: of_another_system")
sys.meta_path.insert(0, Broken())
"""
# A product without kernels.
WITHOUT = """
import jax.numpy as jnp, numpy as np
from jaxllm.nn.linear import to_units
from jaxllm.quant import quantize, to_blocks
weight = np.random.default_rng(0).normal(size=(20, 70)).astype(np.float32)
blocked = to_blocks(quantize(weight, bits=8, axis=-1))
assert np.abs(to_units(jnp.eye(70), blocked) - weight.T).max() < 0.02
"""


@pytest.mark.parametrize(
    ("before", "reason"),
    [(NOT_BUILT, "they were not built"), (BROKEN + WITHOUT, "undefined symbol: of_another_system")],
)
def test_an_absent_library(before, reason):
    """Not built, or built for something else: XLA computes, and `reason` says why."""
    asked = [kernels_and_threads(), kernels_and_threads(threads="7"), kernels_and_threads("portable")]
    plain, threads, chosen = told(asked, before=before)
    assert (plain["name"], plain["choices"], plain["threads"]) == ("xla", [], 1)
    assert plain["reason"] == reason
    assert threads == plain
    assert f"JAXLLM_KERNELS=portable: there are no native kernels ({reason})" in chosen["error"]


@needs_native
@pytest.mark.parametrize("count", [0, -1, 257, 1 << 40])
def test_impossible_numbers_of_threads(count):
    before = native.threads()
    with pytest.raises(ConfigError, match=f"threads must be a whole number in .*{count}"):
        native.set_threads(count)
    assert native.threads() == before


@needs_native
def test_the_process_is_asked_for_threads():
    busy, weight_bytes = native.busy_ns(), np.zeros((1 << 20) + 3, np.uint8)
    for count in (1, 2, 3):
        with threads_of(count):
            assert native.threads() == count
            for part in (weight_bytes, weight_bytes[:0], weight_bytes[1:2]):
                native.read_all(part)
    assert native.busy_ns() >= busy


def test_instruction_sets_that_were_not_built_are_named(monkeypatch):
    """But one that the compiler makes by default, whatever flags it refuses."""
    library = types.SimpleNamespace(
        targets=dict,
        backends=lambda: ("neon", "portable"),
        built_backends=lambda: ("neon", "portable"),
        refused_backends=lambda: {"i8mm": "error: no such flag", "neon": "error: no such flag"},
        use_backend=lambda name: None,
        set_threads=lambda count: None,
        backend=lambda: "neon",
    )
    monkeypatch.setattr(native, "_library", lambda: library)
    found = native.process_kernels.__wrapped__()
    assert (found.name, found.built) == ("neon", ("neon", "portable"))
    assert found.left_out == {"i8mm": "error: no such flag"}
