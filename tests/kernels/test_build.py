"""The package's own build: it leaves out the kernels that do not compile and nothing else, and says why."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("setuptools")
ROOT = Path(__file__).parents[2]
NATIVE = Path("jaxllm/kernels/native")
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
    if not (folder / NATIVE).exists():
        shutil.copytree(ROOT / NATIVE, folder / NATIVE)
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    return subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)


def python(source: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


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


def test_who_insists_on_kernels_gets_the_error(tmp_path: Path) -> None:
    done = build(tmp_path, JAXLLM_NATIVE="1", **NO_COMPILER)
    assert done.returncode != 0
    assert "/nonexistent/c++" in done.stderr


def write_kernels(folder: Path, broken: dict[str, str]) -> None:
    """The library with kernels that compute nothing, some of them with a line that does not compile, under a
    condition."""
    (folder / NATIVE).mkdir(parents=True)
    headers = (ROOT / NATIVE).glob("*.h")
    for path in (*headers, *(ROOT / NATIVE / f"{each}.cpp" for each in ("module", "dispatch", "pool"))):
        shutil.copy(path, folder / NATIVE)
    for name in ("chunk_tables", "weight_tables"):
        shutil.copy(ROOT / NATIVE / f"{name}.cpp", folder / NATIVE)
    (folder / NATIVE / "rest.cpp").write_text(REST)
    for name in ("amx", "avx512", "avxvnni", "avx2", "i8mm", "neon", "portable"):
        condition = broken.get(name, "0" if name in ("i8mm", "neon") else "1")
        line = "int wrong = ;" if name in broken else ""
        source = KERNELS.format(name=name, condition=condition, line=line)
        (folder / NATIVE / f"backend_{name}.cpp").write_text(source)


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
    with (tmp_path / NATIVE / "backend_portable.cpp").open("a") as file:
        file.write("int wrong = ;")
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "jaxllm is built without native kernels (" in done.stderr
    (note,) = (tmp_path / "jaxllm/kernels").glob("_native*")
    assert "backend_portable.cpp" in note.read_text()
