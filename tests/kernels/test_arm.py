"""The kernels for Arm: the wheel that setup.py builds with a cross compiler, and `native_check` of its
objects."""

import os
import sys
import zipfile
from pathlib import Path

import pytest

from tests.kernels.test_native_check import APART, COMMON, HERE, NATIVE, needs, run

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs(COMPILER, EMULATOR)]


# Where `make test-arm` puts a Python for Arm and its packages.
ARM = Path(os.environ.get("JAXLLM_ARM", "no"))
# On random numbers: a kernel of products and one of sampling beside NumPy.
SCRIPT = """
import platform
import jax, jax.numpy as jnp, numpy as np
from jaxllm.kernels import native, native_attention, native_products
from jaxllm.quant import quantize, to_blocks
draw = np.random.default_rng(0)
x, w = (draw.normal(size=size).astype(np.float32) for size in ((3, 64), (32, 64)))
weight = jax.tree.map(jnp.asarray, to_blocks(quantize(w, bits=8, axis=-1)))
found = native_products.to_units(jnp.asarray(x), [weight])[0]
assert np.abs(found - x @ w.T).max() < 0.05 * np.abs(x @ w.T).max()
assert native_attention.largest(jnp.asarray(x)).tolist() == x.argmax(1).tolist()
print(platform.machine(), *native.kernels().choices)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What setup.py makes for Arm, every file of it: a wheel in `dist`, and its objects in `build`."""
    folder = tmp_path_factory.mktemp("arm")
    c_compiler = COMPILER.replace("g++", "gcc")
    run(
        *(sys.executable, "setup.py", "egg_info", "--egg-base", folder, "build", "--build-base"),
        # Else all is compiled a second time.
        *(folder / "build", "bdist_wheel", "--skip-build", "--bdist-dir", folder / "wheel"),
        *("--dist-dir", folder / "dist"),
        _PYTHON_HOST_PLATFORM="linux-aarch64", JAXLLM_NATIVE="1", CC=c_compiler, CXX=COMPILER,
        LDSHARED=f"{c_compiler} -shared", LDCXXSHARED=f"{COMPILER} -shared",
        # By the headers of the jaxlib that it will run beside.
        PYTHONPATH=str(ARM / "site"),
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def native_check(built: Path) -> Path:
    """The program, of the library's own objects."""
    objects = sorted((built / "build").rglob("*.o"))
    kept = [path for path in objects if path.stem not in {*APART, "refused_backends"}]
    program = built / "native_check"
    includes = (f"-I{NATIVE}", f"-I{HERE}")
    run(COMPILER, *COMMON, "-O2", "-static", *includes, HERE / "native_check.cpp", *kept, "-o", program)
    return program


def test_the_library_is_for_arm(built: Path) -> None:
    (library,) = (built / "build").rglob("_native.*")
    assert library.suffix == ".so"
    machine = library.read_bytes()[18:20]
    assert int.from_bytes(machine, "little") == 183  # EM_AARCH64
    assert {path.stem for path in (built / "build").rglob("*.o")} >= {
        path.stem for path in NATIVE.glob("*.cpp")
    }


def test_the_wheel_runs_beside_jax_for_arm(built: Path, tmp_path: Path) -> None:
    """JAX finds the library of the wheel, which computes in the emulator what NumPy does."""
    (wheel,) = (built / "dist").glob("*-abi3-linux_aarch64.whl")
    if not ARM.exists():
        pytest.skip("JAXLLM_ARM has no Python for Arm (make test-arm)")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path)
    system = ARM / "system"
    command = (EMULATOR, "-cpu", "neoverse-n1", "-L", system, system / "usr/bin/python3", "-P", "-c")
    out = run(*command, SCRIPT, PYTHONPATH=f"{tmp_path}:{ARM / 'site'}", JAXLLM_KERNELS="neon")
    assert out == "aarch64 neon portable\n"


@pytest.mark.parametrize(
    ("processor", "cases", "kernels"),
    [("max", 10, "i8mm neon portable"), ("neoverse-n1", 3, "neon portable"), ("cortex-a53", 3, "portable")],
)
def test_each_instruction_set(native_check: Path, processor: str, cases: int, kernels: str) -> None:
    """With products of matrices, with dot products alone, and on a processor that lacks both."""
    out = run(EMULATOR, "-cpu", processor, native_check, cases, 4)
    assert out == f"{cases} cases with {kernels}\n"
