"""The C library with sanitizers, for Arm in an emulator, and in Java's machine."""

import os
import random
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from jaxllm.config import FULL_LEVEL
from jaxllm.export.device.opening import open_device
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from tests.export.device_library import COMPILER, FLAGS, ROOT, build
from tests.export.models import CFG, PROMPTS

pytest.importorskip("litert_converter")
litert = pytest.importorskip("ai_edge_litert")

LIBRARY = Path(litert.__file__).parent / "libLiteRt.so"
# Where `make test-arm` puts what an AArch64 wheel of LiteRT has.
ARM_LIBRARY = Path(os.environ.get("JAXLLM_ARM_LITERT", "no")) / "libLiteRt.so"
ARM_COMPILER, EMULATOR, ARM_ROOT = (
    "aarch64-linux-gnu-g++",
    "qemu-aarch64-static",
    Path("/usr/aarch64-linux-gnu"),
)
HERE = Path(__file__).parent
DRAW = random.Random(9)
# Some with repetitions, for drafts.
LINES = [[DRAW.randrange(CFG.vocab_size) for _ in range(1 + n)] * (1 + n % 3) for n in range(12)]
LINES += [[DRAW.randrange(5) for _ in range(3 * n)] for n in range(1, 9)]
LINES = [each[:26] for each in LINES]
TEXT = "It's 12 o'clock,  na\u00efve \u4f60\u597d\n\n\U0001f600 \ufffd"
# What a processor without SVE says of itself; LiteRT asks for it, and an emulator has that of its host.
CPUINFO = """processor\t: 0
Features\t: fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1
"""


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
    loop, said = open_device(tflite[0], threads=1), []
    for prompt in LINES:
        tokens = {}
        for kind, temperature in (("greedy", 0), ("drafted", 0), ("drawn", 1)):
            config = GenerationConfig(
                max_tokens=8, ignore_eos=True, sampling=Sampling(temperature=temperature, seed=3)
            )
            tokens[kind] = loop.generate(prompt, config).tokens
        # One that continues is given its prompt again.
        config = GenerationConfig(max_tokens=2, ignore_eos=True, sampling=config.sampling)
        tokens["continued"] = loop.generate([*prompt, *tokens["drawn"], *prompt], config).tokens
        said += [" ".join(map(str, [kind, *ids])) for kind, ids in tokens.items()]
    return [*said, " ".join(map(str, ["encoded", *loop.tokenizer.encode(TEXT, special=False)]))]


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


@pytest.fixture(scope="module")
def arm_program(tmp_path_factory):
    if not ARM_LIBRARY.exists():
        pytest.skip("JAXLLM_ARM_LITERT has no LiteRT for Arm (make test-arm-device)")
    return check_program(tmp_path_factory.mktemp("arm"), ARM_LIBRARY.absolute(), compiler=ARM_COMPILER)


@pytest.mark.parametrize("processor", ["neoverse-n1", "cortex-a76"])
def test_answers_on_arm_are_those_here(arm_program, tflite, wanted, tmp_path, processor):
    root = tmp_path / "root"
    (root / "proc").mkdir(parents=True)
    (root / "proc/cpuinfo").write_text(CPUINFO)
    (root / "lib").symlink_to(ARM_ROOT / "lib")
    assert answers(arm_program, tflite[0], tmp_path, EMULATOR, "-cpu", processor, "-L", root) == wanted


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
