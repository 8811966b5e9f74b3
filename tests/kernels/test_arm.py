"""The kernels for Arm: the library as setup.py builds it with a cross compiler, and `native_check` of it."""

import sys
from pathlib import Path

import pytest

from tests.kernels.test_native_check import APART, COMMON, HERE, NATIVE, needs, run

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs(COMPILER, EMULATOR)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What setup.py makes for Arm, every file of it."""
    folder = tmp_path_factory.mktemp("arm")
    c_compiler = COMPILER.replace("g++", "gcc")
    places = ("--build-lib", folder / "lib", "--build-temp", folder / "temp")
    run(
        *(sys.executable, "setup.py", "build_ext", *places), _PYTHON_HOST_PLATFORM="linux-aarch64",
        JAXLLM_NATIVE="1", CC=c_compiler, CXX=COMPILER, LDSHARED=f"{c_compiler} -shared",
        LDCXXSHARED=f"{COMPILER} -shared",
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def native_check(built: Path) -> Path:
    """The program, of the library's own objects."""
    objects = sorted((built / "temp").rglob("*.o"))
    kept = [path for path in objects if path.stem not in {*APART, "refused_backends"}]
    program = built / "native_check"
    includes = (f"-I{NATIVE}", f"-I{HERE}")
    run(COMPILER, *COMMON, "-O2", "-static", *includes, HERE / "native_check.cpp", *kept, "-o", program)
    return program


def test_the_library_is_for_arm(built: Path) -> None:
    (library,) = (built / "lib").rglob("_native.*")
    assert library.suffix == ".so"
    machine = library.read_bytes()[18:20]
    assert int.from_bytes(machine, "little") == 183  # EM_AARCH64
    assert {path.stem for path in (built / "temp").rglob("*.o")} >= {
        path.stem for path in NATIVE.glob("*.cpp")
    }


@pytest.mark.parametrize(
    ("processor", "cases", "kernels"),
    [("max", 10, "i8mm neon portable"), ("neoverse-n1", 3, "neon portable"), ("cortex-a53", 3, "portable")],
)
def test_each_instruction_set(native_check: Path, processor: str, cases: int, kernels: str) -> None:
    """With products of matrices, with dot products alone, and on a processor that lacks both."""
    out = run(EMULATOR, "-cpu", processor, native_check, cases, 4)
    assert out == f"{cases} cases with {kernels}\n"
