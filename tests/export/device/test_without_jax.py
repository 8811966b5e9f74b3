"""Imports what the live service and a device share where JAX is not installed."""

import subprocess
import sys

import pytest

from jaxllm.cli.device.command import SERVING_PACKAGES

# Packages of which a device has none.
ABSENT = ("jax", "jaxlib", "flax", "optax", "orbax", "chex", "training", "export", "benchmarks")
# Modules that both share, by what they do.
SHARED = {
    "plans": (
        "jaxllm.serving.elastic.planner", "jaxllm.serving.elastic.profile",
        "jaxllm.serving.elastic.profiling", "jaxllm.serving.elastic.coarse_profile",
        "jaxllm.serving.elastic.objectives", "jaxllm.serving.elastic.safety_margin",
        "jaxllm.serving.elastic.reach", "jaxllm.serving.elastic.tiny_proposer", "jaxllm.tasks.tiny_reader",
        "jaxllm.serving.elastic.turns", "jaxllm.serving.elastic.planned_service", "jaxllm.elastic.slo",
    ),
    "contexts": (
        "jaxllm.serving.contexts.store", "jaxllm.serving.contexts.segment", "jaxllm.serving.contexts.record",
        "jaxllm.serving.contexts.memory", "jaxllm.serving.contexts.options",
        "jaxllm.serving.contexts.turn_ids", "jaxllm.contexts.codecs", "jaxllm.contexts.eviction",
        "jaxllm.contexts.tolerance", "jaxllm.contexts.recompute",
    ),
    "drafts": (
        "jaxllm.serving.speculation.speculation", "jaxllm.serving.speculation.host_tree",
        "jaxllm.serving.speculation.payoff", "jaxllm.serving.speculation.ngram_drafter",
        "jaxllm.serving.speculation.lookup_drafter", "jaxllm.export.programs.drafts",
        "jaxllm.speculation.token_tree", "jaxllm.speculation.token_tree", "jaxllm.speculation.token_tree",
        "jaxllm.speculation.token_tree",
    ),
    "text": (
        "jaxllm.text.tokenizer", "jaxllm.text.chat_template", "jaxllm.text.prompts",
        "jaxllm.serving.ground.text_stream", "jaxllm.serving.guided.compiler",
        "jaxllm.serving.engine.decoding", "jaxllm.sampling_state",
    ),
    "answers": (
        "jaxllm.serving.engine.engine", "jaxllm.serving.engine.step", "jaxllm.serving.engine.run",
        "jaxllm.serving.engine.answer", "jaxllm.serving.engine.request", "jaxllm.serving.engine.decoding",
        "jaxllm.serving.ground.sliding", "jaxllm.serving.runners.runner", "jaxllm.serving.runners.chunks",
    ),
    "programs": (
        "jaxllm.export.folder_format.manifest", "jaxllm.export.programs.model",
        "jaxllm.export.programs.runner", "jaxllm.export.programs.executor", "jaxllm.export.programs.adapters",
        "jaxllm.export.programs.tiny_lm", "jaxllm.export.programs.litert", "jaxllm.export.programs.packed",
    ),
    "device": (
        "jaxllm.cli.device.command", "jaxllm.export.device.context", "jaxllm.export.device.contexts",
        "jaxllm.export.device.host_sampling",
        "jaxllm.export.device.opening", "jaxllm.export.device.service",

    ),
    "front": (
        "jaxllm.serving.server.calls", "jaxllm.serving.server.prompts", "jaxllm.serving.server.daemon",
        "jaxllm.serving.server.objectives", "jaxllm.serving.server.identity", "jaxllm.serving.server.guard",
        "jaxllm.serving.server.api.app", "jaxllm.export.device.serving",
    ),
}  # fmt: skip
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


@pytest.mark.parametrize("what", SHARED)
def test_a_device_imports_them(what):
    done = without_jax("for name in sys.argv[1:]: importlib.import_module(name)", *SHARED[what])
    assert done.returncode == 0, done.stderr


def test_the_blocker_blocks():
    done = without_jax("import jaxllm.sampling")
    assert "jax is not on a device" in done.stderr


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
