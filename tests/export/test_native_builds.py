"""The C library with sanitizers, and in Java's machine."""

import dataclasses
import json
import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from jaxllm.config import FULL_LEVEL
from jaxllm.export.folder_format.manifest import MANIFEST, Manifest
from tests.export.device_answers import loop_answers
from tests.export.device_library import COMPILER, FLAGS, ROOT, Refused, build
from tests.export.models import CFG, CONTEXT, PROMPTS

pytest.importorskip("litert_converter")
litert = pytest.importorskip("ai_edge_litert")

LIBRARY = Path(litert.__file__).parent / "libLiteRt.so"
HERE = Path(__file__).parent
DRAW = random.Random(9)
# Some with repetitions, for drafts.
LINES = [[DRAW.randrange(CFG.vocab_size) for _ in range(1 + n)] * (1 + n % 3) for n in range(12)]
LINES += [[DRAW.randrange(5) for _ in range(3 * n)] for n in range(1, 9)]
LINES = [each[:26] for each in LINES]


def check_program(folder, litert_library, *flags, compiler=COMPILER):
    """`device_check` with the library's own files."""
    build(folder, litert_library, *flags, compiler=compiler)
    objects = sorted(folder.glob("*.o"))
    source, program = HERE / "device_check.cpp", folder / "device_check"
    options = [*FLAGS, "-O1", *flags, f"-I{ROOT / 'native'}", str(source), *map(str, objects)]
    linked = [str(litert_library), f"-Wl,-rpath,{litert_library.parent}", "-o", str(program)]
    subprocess.run([str(compiler), *options, *linked], check=True)
    return program


def run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wanted(tflite):
    """What `device_check` prints, by the Python loop."""
    return loop_answers(tflite[0], LINES)


def answers(program, folder, tmp_path, *before, **options):
    lines = "\n".join(" ".join(map(str, each)) for each in LINES)
    return run(*before, program, folder, tmp_path / "talk", input=lines, **options).splitlines()


def test_sanitizers_find_nothing(tflite, wanted, tmp_path):
    flags = ("-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    program = check_program(tmp_path, LIBRARY, *flags)
    # LiteRT keeps memory of its own.
    env = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    assert answers(program, tflite[0], tmp_path, env=env) == wanted
    seed = int(time.time())
    print(f"seed {seed}")
    assert "were still read" in run(program, tflite[0], 400, seed)


def test_golden_answers_are_compared_once(library, tflite, tmp_path):
    """A manifest of other answers stands for a runtime that computes otherwise."""
    place, mark = shutil.copytree(tflite[0], tmp_path / "folder"), tmp_path / "passed"
    manifest = Manifest.read(place)
    (golden,) = (each for each in manifest.golden if each.level == FULL_LEVEL)
    device = library.open(place)
    library.call("check", device, None)
    assert not mark.exists()
    library.call("check", device, str(mark).encode())
    stamp = mark.stat().st_mtime_ns
    library.call("check", device, str(mark).encode())
    assert mark.stat().st_mtime_ns == stamp
    library.close(device)
    other = dataclasses.replace(
        golden, tokens=(*golden.tokens[:2], (golden.tokens[2] + 1) % CFG.vocab_size, *golden.tokens[3:])
    )
    dataclasses.replace(manifest, golden=(other,)).write(place)
    device = library.open(place)
    for _ in range(2):
        with pytest.raises(Refused, match=rf"runtime: level 100 answers .* 3 is {golden.tokens[2]}, not"):
            library.call("check", device, str(mark).encode())
    library.close(device)
    facts = json.loads((place / MANIFEST).read_text())
    for bad in ({"level": 7}, {"prompt": []}, {"tokens": [CFG.vocab_size]}, {"prompt": [1] * CONTEXT}):
        harmed = facts | {"golden": [facts["golden"][0] | bad]}
        (place / MANIFEST).write_text(json.dumps(harmed))
        with pytest.raises(Refused, match=r"damaged: .*golden answer"):
            checked(library, place)


def checked(library, folder):
    device = library.open(folder)
    try:
        library.call("check", device, None)
    finally:
        library.close(device)


def test_java(tflite, live, tmp_path):
    compiler = shutil.which("javac")
    include = compiler and Path(compiler).resolve().parents[1] / "include"
    if not include or not (include / "jni.h").exists():
        pytest.skip("needs javac and jni.h: on Debian apt-get install default-jdk-headless")
    library = build(tmp_path, LIBRARY)
    places = [f"-I{include}", f"-I{include / 'linux'}", f"-Wl,-rpath,{tmp_path}"]
    source, binding = ROOT / "native/java/jaxllm_device_jni.cpp", tmp_path / "libjaxllm_device_jni.so"
    run(COMPILER, *FLAGS, "-O1", "-fPIC", "-shared", *places, source, library, "-o", binding)
    sources = (ROOT / "native/java/ai/jaxllm/Device.java", HERE / "java/Check.java")
    run(compiler, "-Xlint:all,-try", "-Werror", "--release", "11", "-d", tmp_path / "classes", *sources)
    java = Path(compiler).resolve().parent / "java"
    prompt = " ".join(map(str, PROMPTS[1]))
    options = ("-Xcheck:jni", "-cp", tmp_path / "classes", f"-Djava.library.path={tmp_path}")
    said = run(java, *options, "Check", tflite[0], tmp_path / "talk", prompt)
    tokens = live[FULL_LEVEL][1]
    assert [line for line in said.splitlines() if not line.startswith(("INFO", "WARNING"))] == [
        f"levels {[40, FULL_LEVEL]}",
        f"tokens {tokens}",
        "streamed true",
        "ended 1",
        "cancelled 2 1",
        "thrown mine",
        "busy 6",
        f"loaded {tokens} {len(PROMPTS[1]) - 1}",
        "chat true",
        "refused 1 max_tokens must be 1 to 1,048,576",
        "closed the conversation is closed",
        "missing 2",
    ]
