"""The device's C library, its Python loop and Google's LiteRT-LM for Arm, in an emulator: what they answer is
what they answer here."""

import os
import random
import sys
from pathlib import Path

import pytest

from tests.export.models import CHUNKS, CONTEXT
from tests.export.test_native_builds import HERE, LINES, answers, check_program, run, wanted  # noqa: F401

pytest.importorskip("litert_converter")

from jaxllm.export.folder import write_loop
from jaxllm.export.litertlm import export_litertlm
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject

# Where `make test-arm-device` puts a Python for Arm and its packages.
ARM = Path(os.environ.get("JAXLLM_ARM", "no"))
EMULATOR = ("qemu-aarch64-static", "-L", ARM / "system", "-cpu")
PYTHON = ARM / "system/usr/bin/python3"
ANSWERS = HERE / "device_answers.py"
_DRAW = random.Random(7)
_WORDS = ["the", "hello", "a", "longer", "text,", "of", "more", "than", "one", "chunk", "12", "naïve", "x"]
TEXTS = [" ".join(_DRAW.choices(_WORDS, k=1 + n // 2)) for n in range(20)]
pytestmark = pytest.mark.skipif(
    "JAXLLM_ARM" not in os.environ, reason="JAXLLM_ARM names no Python for Arm (make test-arm-device)"
)


def emulated(*command, processor="cortex-a76", **options):
    """The lines that Arm's Python prints."""
    env = {**os.environ, "PYTHONPATH": str(ARM / "site"), "JAXLLM_CACHE": str(options.pop("cache"))}
    return run(*EMULATOR, processor, PYTHON, "-P", *command, env=env, **options).splitlines()


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory):
    library = ARM.absolute() / "site/ai_edge_litert/libLiteRt.so"
    return check_program(tmp_path_factory.mktemp("arm"), library, compiler="aarch64-linux-gnu-g++")


@pytest.mark.parametrize("processor", ["neoverse-n1", "cortex-a76"])
def test_the_c_library(arm_program, tflite, wanted, tmp_path, processor):  # noqa: F811
    assert answers(arm_program, tflite[0], tmp_path, *EMULATOR, processor) == wanted


def test_the_python_loop(tflite, wanted, tmp_path):  # noqa: F811
    write_loop(tmp_path)
    lines = "\n".join(" ".join(map(str, each)) for each in LINES)
    assert len(LINES) == 20
    said = emulated(
        ANSWERS, "loop", tflite[0], tmp_path / "loop.pyz", input=lines, cache=tmp_path / "cache"
    )  # fmt: skip
    assert said == wanted
    # The machine's own.
    assert emulated("-c", "import platform; print(platform.machine())", cache=tmp_path) == ["aarch64"]


def test_litert_lm(elastic, tmp_path):
    bundle = tmp_path / "tiny.litertlm"
    export_litertlm(read_subject(elastic), bundle, ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS))
    (tmp_path / "here").mkdir()
    (tmp_path / "arm").mkdir()
    command, lines = (ANSWERS, "litert_lm", bundle), "\n".join(TEXTS)
    here = run(sys.executable, "-P", *command, tmp_path / "here", input=lines).splitlines()
    assert len(here) == 20
    assert len(set(here)) > 10
    assert emulated(*command, tmp_path / "arm", input=lines, cache=tmp_path) == here
