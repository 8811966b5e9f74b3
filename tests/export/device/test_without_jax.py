"""Imports what the live service and a device share where JAX is not installed."""

import subprocess
import sys

import pytest

from jaxllm.cli.device.command import SERVING_PACKAGES

# Packages of which a device has none.
ABSENT = ("jax", "jaxlib", "flax", "optax", "orbax", "chex", "training", "export", "benchmarks")
# Modules that both share, besides those that they import.
SHARED = (
    "jaxllm.cli.device.command", "jaxllm.export.device.serving", "jaxllm.export.programs.litert",
    "jaxllm.export.programs.drafts", "jaxllm.serving.server.daemon", "jaxllm.serving.server.api.app",
    "jaxllm.serving.guided.compiler", "jaxllm.serving.speculation.drafter",
    "jaxllm.serving.elastic.tiny_proposer",
)  # fmt: skip
BLOCKER = """
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ImportError(name + " is not on a device")
sys.meta_path.insert(0, Absent())
"""


def without_jax(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a process in which nothing of `ABSENT` can be imported."""
    code = BLOCKER.format(absent=ABSENT) + code
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=300
    )


def test_a_device_imports_them():
    done = without_jax("for name in sys.argv[1:]: importlib.import_module(name)", *SHARED)
    assert done.returncode == 0, done.stderr
    assert "jax is not on a device" in without_jax("import jaxllm.sampling").stderr
    # What is imported where it is used.
    done = without_jax("from jaxllm.export.device.serving import device_options; device_options()")
    assert done.returncode == 0, done.stderr


def packages(*modules):
    """The packages of others that a device imports with these modules."""
    code = (
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "print(*sorted(loaded - set(sys.stdlib_module_names)))"
    )
    loaded = without_jax(code, *modules).stdout.split()
    return {each for each in loaded if not each.startswith(("_", "jaxllm", "serving"))}


def test_a_device_imports_few_packages():
    found = packages("jaxllm.cli.device.command")
    assert found
    assert found <= {"click", "jinja2", "markupsafe", "numpy", "platformdirs", "tokenizers", "xxhash"}


def test_serving_takes_the_packages_that_its_message_names():
    pytest.importorskip("starlette")
    found = packages("jaxllm.export.device.serving", "jaxllm.serving.server.daemon") - packages(
        "jaxllm.cli.device.command"
    )
    of_theirs = {"anyio", "click", "cython_runtime", "h11", "idna", "sniffio", "typing_extensions", "uvloop"}
    assert found
    assert found - of_theirs <= set(SERVING_PACKAGES.split())
