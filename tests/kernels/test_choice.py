"""The choice of kernels and threads, and its messages; and the package's own build, which leaves out the
kernels that do not compile and nothing else, and says why."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxllm.kernels import native
from tests.kernels.switching import NATIVE, needs_native

pytest.importorskip("setuptools")
ROOT = Path(__file__).parents[2]

# Runs in a process of its own: a choice holds as long as its process. Lists, for each environment of its
# argument, what `kernels` found or how it refused.
LIST = """
import json, os, sys
from jaxllm.kernels import native
from jaxllm.errors import ConfigError

def found(environment):
    for name in (native.CHOICE_VARIABLE, native.THREADS_VARIABLE):
        os.environ.pop(name, None)
    os.environ.update(environment)
    native.process_kernels.cache_clear()
    try:
        own = native.kernels()
        return dict(name=own.name, reason=own.reason, choices=own.choices, threads=native.threads())
    except ConfigError as error:
        return dict(error=str(error))

print(json.dumps([found(each) for each in json.loads(sys.argv[1])]))
"""


def python(source: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAXLLM_")}
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def in_environments(*environments: dict[str, str], before: str = "") -> list[dict[str, Any]]:
    """What a process finds in each environment; `before` runs first."""
    done = python(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{before}\n{LIST}", json.dumps(environments)
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def chosen(choice: str | None = None, threads: str | None = None) -> dict[str, str]:
    asked = {native.CHOICE_VARIABLE: choice, native.THREADS_VARIABLE: threads}
    return {name: value for name, value in asked.items() if value is not None}


@needs_native
def test_what_the_environment_asks_for():
    """In one process, from the fastest kernels to each that this processor runs, and to none; what cannot be
    had is one line: the variable, what is wrong with it and what is there instead."""
    bad = [
        *map(chosen, ["nonsense", "avx2 "]),
        *(chosen(threads=count) for count in ("nonsense", "0", "257", "")),
    ]
    asked = [chosen(), chosen(threads="3"), chosen("xla", threads="3")]
    asked += [chosen(name, threads="1") for name in NATIVE]
    plain, three, xla, *each = in_environments(*asked, *bad, chosen(threads="2"))
    assert (plain["choices"], plain["name"]) == (list(NATIVE), NATIVE[0])
    assert plain["reason"] == "the fastest of those built that this processor runs"
    assert plain["threads"] == len(os.sched_getaffinity(0))
    assert three == plain | {"threads": 3}
    assert xla == plain | {"name": "xla", "reason": "JAXLLM_KERNELS=xla", "choices": [], "threads": 1}
    for name, found in zip(NATIVE, each, strict=False):
        assert (found["name"], found["reason"], found["threads"]) == (name, f"JAXLLM_KERNELS={name}", 1)
    assert "portable" in NATIVE
    assert each.pop()["threads"] == 2
    for environment, found in zip(bad, each[len(NATIVE) :], strict=True):
        (variable, value), message = next(iter(environment.items())), found["error"]
        assert variable in message, environment
        assert value in message, environment
        assert "portable" in message or variable == native.THREADS_VARIABLE
        assert "\n" not in message


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
    plain, threads, portable = in_environments(
        chosen(), chosen(threads="7"), chosen("portable"), before=before
    )
    assert (plain["name"], plain["choices"], plain["threads"]) == ("xla", [], 1)
    assert plain["reason"] == reason
    assert threads == plain
    assert f"JAXLLM_KERNELS=portable: there are no native kernels ({reason})" in portable["error"]


# The build

SOURCES = Path("jaxllm/kernels/native")
NO_COMPILER = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
# What the module needs of all other files.
REST = """
#include "ffi.h"
#include "ops.h"
const jaxllm::Target* const jaxllm::kTargets[] = {nullptr};
int64_t jaxllm::busy_ns() { return 0; }
int64_t jaxllm::read_all(const void*, size_t) { return 0; }
"""
KERNELS = """
#include "backend.h"
#if {condition}
{line}
static constexpr jaxllm::Backend kBackend{{"{name}"}};
const jaxllm::Backend* const jaxllm::{name}_backend = &kBackend;
#else
const jaxllm::Backend* const jaxllm::{name}_backend = nullptr;
#endif
"""
REPORT = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("_native", sys.argv[1])
library = importlib.util.module_from_spec(spec)
print(json.dumps([library.built_backends(), library.refused_backends(), library.backends()]))
"""


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What an editable install does to the sources: a build in place."""
    files = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "jaxllm/__init__.py", "jaxllm/version.py")
    for name in files:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    if not (folder / SOURCES).exists():
        shutil.copytree(ROOT / SOURCES, folder / SOURCES)
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [("", "built without native kernels ("), ("0", "JAXLLM_NATIVE=0: jaxllm is built without")],
)
def test_without_a_compiler_there_is_a_package_without_kernels(
    tmp_path: Path, wanted: str, said: str
) -> None:
    done = build(tmp_path, JAXLLM_NATIVE=wanted, **NO_COMPILER)
    assert done.returncode == 0, done.stderr
    assert said in done.stderr
    assert not list(tmp_path.rglob("*.so"))
    (line,) = python(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import jaxllm.kernels._native"
    ).stderr.splitlines()[-1:]
    if wanted == "0":
        assert "No module named 'jaxllm.kernels" in line
    else:
        # Which `jaxllm info` shows, long after the build's own words are gone.
        assert line == "ImportError: they could not be built: /nonexistent/c++: No such file or directory"


def write_kernels(folder: Path, broken: dict[str, str]) -> None:
    """The library with kernels that compute nothing, some of them with a line that does not compile, under a
    condition."""
    (folder / SOURCES).mkdir(parents=True)
    headers = (ROOT / SOURCES).glob("*.h")
    for path in (*headers, *(ROOT / SOURCES / f"{each}.cpp" for each in ("module", "dispatch", "pool"))):
        shutil.copy(path, folder / SOURCES)
    for name in ("chunk_tables", "weight_tables", "masks"):
        shutil.copy(ROOT / SOURCES / f"{name}.cpp", folder / SOURCES)
    (folder / SOURCES / "rest.cpp").write_text(REST)
    for name in ("amx", "avx512", "avxvnni", "avx2", "i8mm", "neon", "portable"):
        condition = broken.get(name, "0" if name in ("i8mm", "neon") else "1")
        line = "int wrong = ;" if name in broken else ""
        source = KERNELS.format(name=name, condition=condition, line=line)
        (folder / SOURCES / f"backend_{name}.cpp").write_text(source)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86 hosts")
@pytest.mark.skipif(not shutil.which("g++"), reason="missing: g++")
def test_a_build_for_this_processor_has_what_it_would_choose(tmp_path: Path) -> None:
    write_kernels(tmp_path, {})
    found = []
    for wanted in ("", "host"):
        assert build(tmp_path, JAXLLM_NATIVE=wanted).returncode == 0
        (library,) = (tmp_path / "jaxllm/kernels").glob("_native*")
        found.append(json.loads(python(REPORT, library).stdout))
    (built, _, runs), (own, left_out, _) = found
    assert own == [runs[0], "portable"]
    assert set(left_out) == set(built) - set(own)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86 hosts")
@pytest.mark.skipif(not shutil.which("g++"), reason="missing: g++")
def test_an_instruction_set_that_does_not_compile_is_left_out_alone(tmp_path: Path) -> None:
    # One fails with its own flags, one with any.
    write_kernels(tmp_path, {"avx512": "defined(__AVX512F__)", "avxvnni": "1"})
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    (library,) = (tmp_path / "jaxllm/kernels").glob("_native*")
    built, refused, runs = json.loads(python(REPORT, library).stdout)
    assert built == ["amx", "avx2", "portable"]
    assert set(runs) <= set(built)
    assert set(refused) == {"avx512", "avxvnni"}
    for name, reason in refused.items():
        assert f"backend_{name}.cpp" in reason
        assert "error" in reason
        assert f"jaxllm is built without the native kernels for {name} ({reason})" in done.stderr
    # Who insists on kernels gets all of them, or the error.
    library.unlink()
    done = build(tmp_path, JAXLLM_NATIVE="1")
    assert done.returncode != 0
    assert "backend_avx512.cpp" in done.stderr

    # What all processors need is no instruction set: then there is no library, neither an older one.
    with (tmp_path / SOURCES / "backend_portable.cpp").open("a") as file:
        file.write("int wrong = ;")
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "jaxllm is built without native kernels (" in done.stderr
    (note,) = (tmp_path / "jaxllm/kernels").glob("_native*")
    assert "backend_portable.cpp" in note.read_text()
