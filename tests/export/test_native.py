"""The C++ sample over LiteRT's C API: it answers as the live service, plans by levels, and refuses."""

import shutil
import subprocess
from pathlib import Path

import pytest

from jaxllm.config import FULL_LEVEL
from tests.export.models import PROMPTS

pytest.importorskip("litert_converter")
litert = pytest.importorskip("ai_edge_litert")

SOURCE = Path("examples/native/device.cpp")
LIBRARY = Path(litert.__file__).parent / "libLiteRt.so"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if COMPILER is None or not LIBRARY.exists():
        pytest.skip(f"needs a C++ compiler and {LIBRARY.name} of ai-edge-litert")
    path = tmp_path_factory.mktemp("native") / "device"
    warnings = ["-Wall", "-Wextra", "-Werror"]
    command = [COMPILER, "-std=c++17", "-O1", *warnings, str(SOURCE), "-o", str(path), str(LIBRARY)]
    subprocess.run([*command, f"-Wl,-rpath,{LIBRARY.parent}"], check=True)
    return path


def run(program, folder, prompt, *options):
    """Tokens, and what it says besides."""
    asked = [str(program), str(folder), "--prompt", " ".join(map(str, prompt)), "--threads", "1", *options]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if not line.startswith(("INFO", "WARNING"))]
    return done.returncode, [int(line) for line in done.stdout.split() if line.isdigit()], said


@pytest.mark.parametrize("level", [40, FULL_LEVEL])
def test_the_answers_are_the_live_engines(program, tflite, live, level):
    for prompt, wanted in zip(PROMPTS, live[level], strict=True):
        rc, tokens, said = run(program, tflite[0], prompt, "--max-tokens", "12", "--level", str(level))
        assert (rc, tokens) == (0, wanted), said


def test_a_level_is_planned_by_a_profile_of_this_device(program, tflite, live, tmp_path):
    profile, prompt = tmp_path / "profile.txt", PROMPTS[2]
    asked = ["--max-tokens", "12", "--profile", str(profile)]
    _, tokens, (plan,) = run(program, tflite[0], prompt, "--slo", "100,100", *asked)
    assert plan.startswith("plan: level 100,")
    assert tokens == live[FULL_LEVEL][2]
    # Level, tokens of a step and milliseconds; a step of level 40 that takes a tenth is planned for a half.
    head, *times = profile.read_text().splitlines()
    rows = [line.split() for line in times]
    found = {(int(level), int(count)) for level, count, _ in rows}
    assert found == {(40, 1), (40, 16), (FULL_LEVEL, 1), (FULL_LEVEL, 16)}
    kept = [f"{level} {count} {0.1 if level == '40' else 1}" for level, count, _ in rows]
    profile.write_text("\n".join([head, *kept]) + "\n")
    _, tokens, (plan,) = run(program, tflite[0], prompt, "--slo", "50,50", *asked)
    assert plan.startswith("plan: level 40, 0.")
    assert tokens == live[40][2]
    _, _, (plan,) = run(program, tflite[0], prompt, "--slo", "5,5", *asked)
    assert plan.startswith("plan: level 40 (no level meets the objective)")
    # A profile of another model or of other threads is measured anew.
    profile.write_text("\n".join(["another", *kept]) + "\n")
    run(program, tflite[0], prompt, "--slo", "50,50", *asked)
    assert profile.read_text().splitlines()[0] == head


def test_it_stops_behind_a_stop_token_and_says_what_is_wrong(program, tflite, live, tmp_path):
    wanted = live[FULL_LEVEL][1]
    stop = wanted[3]
    rc, tokens, _ = run(program, tflite[0], PROMPTS[1], "--stop", str(stop))
    assert (rc, tokens) == (0, wanted[: wanted.index(stop) + 1])
    for folder, options, message in (
        (tmp_path, (), "no such file"),
        (tflite[0], ("--level", "70"), "no signature decode of 1 tokens at level 70"),
        (tflite[0], ("--max-tokens", "200"), "and programs have room for 64"),
        (tflite[0], ("--slo", "fast"), "--slo takes two percentages"),
    ):
        rc, tokens, said = run(program, folder, [1, 2], *options)
        assert (rc, tokens) == (1, [])
        assert message in said[-1]
        assert said[-1].startswith("error: ")
