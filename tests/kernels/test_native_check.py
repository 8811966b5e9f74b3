"""The kernels without Python: `native_check.cpp`, built with sanitizers and for older processors."""

import os
import platform
import re
import runpy
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import setuptools

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
NATIVE = ROOT / "jaxllm/kernels/native"
# Of the library's files, those that know Python or XLA; the pool is part of the program itself.
APART = {"module", "operands", "pool", *(path.stem for path in NATIVE.glob("ffi*.cpp"))}
X86_EMULATOR = "qemu-x86_64-static"
COMMON = ["-std=c++17", "-g1", "-fno-math-errno", "-pthread", "-Wall", "-Wno-psabi"]
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="for x86 hosts")


def needs(*programs: str) -> pytest.MarkDecorator:
    missing = [program for program in programs if not shutil.which(program)]
    return pytest.mark.skipif(bool(missing), reason=f"missing: {', '.join(missing)}")


def instructions(machine: str) -> dict[str, list[str]]:
    """The flags of each file for a machine, from setup.py itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **_: None)
        patch.setenv("_PYTHON_HOST_PLATFORM", f"linux-{machine}")
        return runpy.run_path(str(ROOT / "setup.py"))["INSTRUCTIONS"]


def instructions_here() -> dict[str, list[str]]:
    """The flags of the files that this processor can run; the other files are then empty."""
    facts = Path("/proc/cpuinfo").read_text()
    has = set(re.search(r"^flags\s*:(.*)$", facts, re.MULTILINE)[1].replace("_", "").split())
    found = instructions("x86_64")
    return {
        file: flags
        for file, flags in found.items()
        if {flag.removeprefix("-m").replace("-", "") for flag in flags} <= has
    }


def build(folder: Path, compiler: str, of_file: dict[str, list[str]], *flags: str) -> Path:
    """The program, with the kernels of the files that have flags, and the portable ones."""
    sources = [path for path in sorted(NATIVE.glob("*.cpp")) if path.stem not in APART]
    sources.append(HERE / "native_check.cpp")

    def compile_one(source: Path) -> Path:
        out = folder / f"{source.stem}.o"
        options = [*COMMON, *flags, *of_file.get(source.stem, []), f"-I{NATIVE}", f"-I{HERE}"]
        run(compiler, *options, "-c", source, "-o", out)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    program = folder / "native_check"
    run(compiler, *COMMON, *flags, *objects, "-o", program)
    return program


def run(*command: Any, **environment: str) -> str:
    """What a command prints, run in the repository; its complaint is the test's."""
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=os.environ | environment, capture_output=True,
        text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {(done.stdout + done.stderr)[-3000:]}"
    return done.stdout


# Of random cases, with sanitizers; three times as many without.
CASES = int(os.environ.get("JAXLLM_NATIVE_CASES", "12"))


@needs("g++")
@on_x86
def test_no_access_outside_a_buffer_and_nothing_undefined(tmp_path):
    # What this processor cannot run, no sanitizer could watch: half of the time to compile.
    # With an optimizer it takes three times as long to compile, and half as long to run.
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
    program = build(tmp_path, "g++", instructions_here(), *flags, "-O0" if CASES < 40 else "-O1")
    out = run(program, CASES, 1, ASAN_OPTIONS="detect_leaks=0")
    assert out.startswith(f"{CASES} cases with ")
    assert "portable" in out
    assert ("avx2" in out) == ("backend_avx2" in instructions_here())


@needs("g++")
def test_threads_do_not_race(tmp_path):
    """Of the pool and the operations; what one task computes is the sanitizers' above."""
    program = build(tmp_path, "g++", {}, "-fsanitize=thread", "-O1")
    assert run(program, 5, 1, "concurrent").startswith("5 cases with portable")


@pytest.fixture(scope="module")
def as_shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the optimizer that the library is built with."""
    return build(tmp_path_factory.mktemp("shipped"), "g++", instructions(platform.machine()), "-O3")


@needs("g++")
def test_buffers_before_forbidden_pages(as_shipped):
    """Which stop also the instructions that a sanitizer does not see, such as loads of tiles."""
    assert run(as_shipped, 3 * CASES, 2, "concurrent").startswith(f"{3 * CASES} cases with ")


@needs("g++", X86_EMULATOR)
@on_x86
@pytest.mark.parametrize(("processor", "kernels"), [("Nehalem", "portable"), ("Haswell", "avx2 portable")])
def test_older_processors_run_what_they_have(as_shipped, processor, kernels):
    """One library for all: nothing of the newer files may run there, not even to say that it is there."""
    # The emulator loads whole registers where the processor loads one number.
    out = run(X86_EMULATOR, "-cpu", processor, as_shipped, 1, 3, NATIVE_CHECK_SLACK="64")
    assert out == f"1 cases with {kernels}\n"
