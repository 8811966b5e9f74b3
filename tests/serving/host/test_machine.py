"""Facts of the machine, harmless where a system does not tell them; and the quick import of JAX."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.serving.host import machine
from jaxllm.serving.host.jax_import import DEFERRED
from jaxllm.serving.host.machine import cpu_features, process_age_ms, usable_cores


def test_cores_are_those_that_this_process_may_use():
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("the system binds no process to cores")
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + (
        "from jaxllm.serving.host.machine import usable_cores; print(usable_cores())"
    )
    assert output(code) == ["1"]


def test_only_what_compilers_look_at_counts(monkeypatch, tmp_path):
    assert cpu_features() == cpu_features()
    assert platform.machine() in cpu_features()
    place = tmp_path / "cpuinfo"
    monkeypatch.setattr("jaxllm.serving.host.machine._CPUINFO", place)
    described = []
    for flags, clock in (("sse avx", 2100), ("sse avx", 3000), ("sse", 2100)):
        place.write_text(f"processor: 0\nflags: {flags}\ncpu MHz: {clock}\n\nprocessor: 1\nflags: none\n")
        described.append(cpu_features())
    assert described[0] == described[1] != described[2]
    # A system that tells no features is told apart by its name.
    for text in ("", "processor\t: 0\ncpu MHz\t\t: 2100.000\n\nprocessor\t: 1\n", None):
        place.write_text(text) if text is not None else place.unlink()
        assert platform.node() in cpu_features()


def test_the_share_of_waiting_tasks_and_systems_that_do_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_PRESSURE", tmp_path / "memory")
    assert machine.memory_pressure() is None
    for text, share in (
        ("some avg10=12.50 avg60=1 avg300=0 total=9\nfull avg10=3.00", 0.125),
        ("full", None),
    ):
        (tmp_path / "memory").write_text(text)
        assert machine.memory_pressure() == share
    assert process_age_ms() > 0
    monkeypatch.setattr(machine, "_PROCESS_FACTS", tmp_path / "absent")
    assert process_age_ms() is None


# The quick import of JAX leaves a JAX that is whole.

_PLUGIN = """
from jaxllm.serving.host.jax_import import import_jax
import_jax()
from jax._src.numpy.array_constructors import rocm_plugin_extension as found
print(found.__name__ if found else None)
"""
_WHOLE = f"""
import gc, importlib.metadata, sys
before = importlib.metadata.distributions, list(sys.meta_path)
from jaxllm.serving.host.jax_import import import_jax
import_jax()
assert (importlib.metadata.distributions, sys.meta_path) == before
assert gc.isenabled()
lazy = {{name for name in {sorted(DEFERRED)!r} if type(sys.modules.get(name)).__name__ == "_LazyModule"}}
print(*sorted(lazy))
import filelock, unittest.mock
filelock.FileLock, unittest.mock.Mock
import jax.numpy as jnp
print(int(jnp.arange(4).sum()))
"""


def output(script: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, check=True, env={**os.environ, **environment},
    )  # fmt: skip
    return done.stdout.splitlines()


def test_what_is_deferred_is_loaded_when_it_is_used():
    assert output(_WHOLE) == [" ".join(sorted(DEFERRED)), "6"]


def test_a_plugin_of_jax_is_still_found(tmp_path: Path):
    facts, package = tmp_path / "jax_rocm7_plugin-1.0.dist-info", tmp_path / "jax_rocm7_plugin"
    for folder in (facts, package):
        folder.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: jax-rocm7-plugin\nVersion: 1.0\n")
    (package / "__init__.py").touch()
    (package / "rocm_plugin_extension.py").touch()
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    assert output(_PLUGIN, PYTHONPATH=path) == ["jax_rocm7_plugin.rocm_plugin_extension"]
