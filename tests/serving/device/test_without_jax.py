"""Imports what the live service and a device share where JAX is not installed."""

import subprocess
import sys

import pytest

from serving.device.command import SERVING_PACKAGES

# Packages of which a device has none.
ABSENT = ("jax", "jaxlib", "flax", "optax", "orbax", "chex", "training", "export", "benchmarks")
# Modules that both share, by what they do.
SHARED = {
    "plans": (
        "serving.planning.planner", "serving.planning.profile", "serving.planning.profiling",
        "serving.planning.coarse_profile", "serving.planning.objectives", "serving.planning.safety_margin",
        "serving.planning.reach", "serving.planning.tiny_proposer", "jaxllm.tasks.tiny_reader",
        "serving.planning.turns", "serving.planned_service", "jaxllm.elastic.slo",
    ),
    "contexts": (
        "serving.contexts.store", "serving.contexts.segment", "serving.contexts.record",
        "serving.contexts.memory", "serving.contexts.options", "serving.contexts.turn_ids",
        "jaxllm.kv.codecs", "jaxllm.kv.eviction", "jaxllm.kv.tolerance", "jaxllm.kv.recompute",
    ),
    "drafts": (
        "serving.speculation.speculation", "serving.speculation.host_tree", "serving.speculation.payoff",
        "serving.speculation.ngram_drafter", "serving.speculation.lookup_drafter", "serving.programs.drafts",
        "jaxllm.speculative.token_tree", "jaxllm.speculative.growth", "jaxllm.speculative.tree_size",
        "jaxllm.speculative.fallback",
    ),
    "text": (
        "jaxllm.text.tokenizer", "jaxllm.text.chat_template", "jaxllm.text.prompts", "serving.text_stream",
        "serving.guided.compiler", "serving.guided.decoding", "jaxllm.sampling_state",
    ),
    "answers": (
        "serving.engine", "serving.step", "serving.run", "serving.answer", "serving.request",
        "serving.decoding", "serving.sliding", "serving.runners.runner", "serving.runners.chunks",
    ),
    "programs": (
        "jaxllm.program_folder.manifest", "serving.programs.model", "serving.programs.runner",
        "serving.programs.executor", "serving.programs.adapters", "serving.programs.tiny_lm",
        "serving.programs.litert", "serving.programs.packed", "serving.programs.iree",
    ),
    "device": (
        "serving.device.command", "serving.device.context", "serving.device.contexts",
        "serving.device.host_chooser", "serving.device.host_sampling", "serving.device.opening",
        "serving.device.profiles", "serving.device.service", "serving.device.jobs", "serving.device.backend",
    ),
    "front": (
        "serving.server.calls", "serving.server.prompts", "serving.server.ticket",
        "serving.server.objectives", "serving.server.identity", "serving.server.guard",
        "serving.server.api.app", "serving.device.http",
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
    found = packages("serving.device.command")
    assert found
    assert found <= {"click", "jinja2", "markupsafe", "numpy", "platformdirs", "tokenizers", "xxhash"}


def test_serving_takes_the_packages_that_its_message_names():
    pytest.importorskip("starlette")
    found = packages("serving.device.http", "serving.device.backend") - packages("serving.device.command")
    of_theirs = {"anyio", "click", "h11", "idna", "sniffio", "typing_extensions", "uvloop"}
    assert found
    assert found - of_theirs <= set(SERVING_PACKAGES.split())
