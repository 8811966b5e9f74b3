"""The folder of a device: it answers as the live service does, where JAX is not installed, and without these
sources."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.config import WHOLE
from jaxllm.errors import ProgramError
from jaxllm.export.folder import loop_modules
from jaxllm.export.folder_format.manifest import LOOP, MANIFEST, Manifest
from jaxllm.export.programs.model import open_program
from jaxllm.serving.engine.request import GenerationConfig
from tests.export.bare_python import DEVICE, TESTING, bare_python
from tests.export.conftest import PLAN
from tests.export.device.conftest import FOLDER_VARIABLE
from tests.export.models import CFG, OPTIONS

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")

from jaxllm.export.folder import write_loop
from jaxllm.export.tflite import FILE, export_tflite

CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)
# Above the weights, at the peak.
MOST_BYTES = 120 << 20
_DRAW = np.random.default_rng(3)
PROMPTS = [_DRAW.integers(0, CFG.vocab_size, 1 + 2 * n).tolist() for n in range(20)]
TEXTS = [" ".join(["the", "hello", "there", "one"][n % 4] for n in range(count)) for count in range(1, 21)]
# What a device does, in an environment without JAX; prints one JSON object.
SCRIPT = """
import importlib.util, json, sys
from pathlib import Path
folder, place, prompts, texts = Path(sys.argv[1]), Path(sys.argv[2]), *json.loads(sys.argv[3])
sys.path.insert(0, str(folder / "loop.pyz"))
from jaxllm.elastic.slo import Slo
from jaxllm.sampling_state import Sampling
from jaxllm.export.device.opening import open_device
from jaxllm.export.device.service import ProgramService
from jaxllm.serving.elastic.objectives import Latency
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.speculation_options import SpeculationOptions
config = GenerationConfig(max_tokens=12, ignore_eos=True)
drafts = SpeculationOptions(drafter="ngram", pausing=False)
engine = open_device(folder, threads=1)
executor, out = engine.model.executor, {}
ready = set(executor._buffers)
out["plain"] = {
    level: [engine.stream(each, config, level=level).result().tokens for each in prompts]
    for level in engine.levels
}
for sampling in (Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=3, top_p=0.9, min_p=0.1)):
    engine.generate(prompts[3], GenerationConfig(max_tokens=5, sampling=sampling))
drafted = open_device(folder, threads=1, drafts=drafts)
out["drafted"] = [drafted.generate(each, config).tokens for each in prompts]
out["verifications"] = drafted.speculation.counts.verifications
for name, options in (
    ("level", SpeculationOptions(drafter="level", level=40, pausing=False)),
    ("folder", SpeculationOptions(model=folder, pausing=False)),
):
    by = open_device(folder, threads=1, drafts=options)
    out[name] = [by.generate(each, config).tokens for each in prompts[:8]]
out["new_buffers"] = len(set(executor._buffers) - ready)
chunk_bytes = sum(
    8 * 16 * engine.cfg.units(layer).kv_heads * engine.cfg.head_dim for layer in range(engine.cfg.layers)
)
def opened():
    engine = open_device(folder, threads=1, drafts=drafts)
    return ProgramService.open(engine, threads=1, contexts=place, budget_bytes=3 * chunk_bytes)
service = opened()
# What any level meets, what none meets, and what a device decides.
objectives = [Latency(ttft_ms=1e6, tpot_ms=1e6), Latency(ttft_ms=1e-6, tpot_ms=1e-6), Slo.parse("<60,60>")]
out["planned"] = []
for number, text in enumerate(texts):
    answer = service.call(text, slo=objectives[number % 3], max_tokens=12).result()
    facts = [answer.plan.level, answer.plan.source, service.tokenize(text, "").ids.tolist(), answer.tokens]
    out["planned"].append(facts)
names, turns = [], prompts[9:12]
for turn in turns:
    context = service.new_context("app")
    context.answer(turn, config).result()
    names.append(context.name)
out["resident"] = service.contexts.memory.resident_bytes <= 3 * chunk_bytes
service.close()
service = opened()
answers = [service.context("app", each).answer([5, 6, 7], config).result() for each in names]
out["second"] = [each.tokens for each in answers]
out["read"] = [each.restoration.read for each in answers]
service.close()
out["installed"] = [each for each in ("jax", "jaxlib", "flax", "optax") if importlib.util.find_spec(each)]
out["sources"] = sys.modules["jaxllm.serving.engine.engine"].__file__
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def folder(subject, tmp_path_factory):
    path = tmp_path_factory.mktemp("programs") / "device"
    export_tflite(subject, path, PLAN, beside=write_loop)
    return path


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of a device's environment."""
    return bare_python(tmp_path_factory.mktemp("bare") / "environment", (*DEVICE, *TESTING))


@pytest.fixture(scope="module")
def said(python, folder, tmp_path_factory):
    """What a device says of all prompts."""
    place = tmp_path_factory.mktemp("place")
    asked = json.dumps([PROMPTS, TEXTS])
    done = subprocess.run(
        [str(python), "-P", "-c", SCRIPT, str(folder), str(place / "store"), asked],
        cwd=place, env={"JAXLLM_CACHE": str(place / "cache")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def live_engine(elastic):
    return Engine.open(elastic, options=OPTIONS)


def test_twenty_prompts_token_for_token(said, live_engine):
    for level in (40, WHOLE):
        wanted = [live_engine.stream(each, CONFIG, level=level).result().tokens for each in PROMPTS]
        assert said["plain"][str(level)] == wanted
    assert said["drafted"] == said["plain"][str(WHOLE)]
    assert said["verifications"] > 0
    assert said["level"] == said["folder"] == said["drafted"][:8]


def test_nothing_of_jax_or_of_the_sources(said, folder):
    assert said["installed"] == []
    assert said["sources"].startswith(str(folder / LOOP))
    assert said["new_buffers"] == 0


def test_twenty_calls_have_plans_and_drafts(said, live_engine):
    assert len(said["planned"]) == 20
    levels = set()
    for number, (level, source, prompt, tokens) in enumerate(said["planned"]):
        config = GenerationConfig(max_tokens=12)
        assert tokens == live_engine.stream(prompt, config, level=level).result().tokens
        assert source in (("whole",), ("nearest",), ("whole", "fallback", "nearest"))[number % 3]
        levels.add(level)
    # Which one is nearest is for the device's times to say; test_tiny_lm plans both by a given profile.
    assert WHOLE in levels <= {40, WHOLE}


def test_contexts_are_swapped_and_outlive_the_process(said, live_engine):
    wanted = []
    for turn in PROMPTS[9:12]:
        sequence = [*turn, *live_engine.generate(turn, CONFIG).tokens, 5, 6, 7]
        wanted.append(live_engine.generate(sequence, CONFIG).tokens)
    assert said["second"] == wanted
    assert said["resident"]
    assert said["read"] == [[0], [0, 1], [0, 1]]


def test_the_folder_runs_by_itself(python, folder, tmp_path):
    done = subprocess.run(
        [str(python), "-P", str(folder), "generate", "--json", "-p", "the hello", "--max-tokens", "4"],
        cwd=tmp_path, env={"JAXLLM_CACHE": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    (answer,) = facts["answers"]
    assert len(answer["tokens"]) <= 4
    if "peak_memory_bytes" in facts:
        assert facts["peak_memory_bytes"] - facts["weights_bytes"] <= MOST_BYTES


def test_the_suite_of_a_device_passes_there(python, folder, tmp_path):
    """All of its tests but those of HTTP, which takes other packages, and of draws and executors beside
    JAX's."""
    room = Path("tests/export/device")
    files = [str(room / f"test_{each}.py") for each in ("command", "contexts", "opening", "service")]
    plugins = [
        "--noconftest", "-p", "tests.export.device.conftest", "-p", "no:cacheprovider", "-p", "no:anyio",
    ]  # fmt: skip
    done = subprocess.run(
        [str(python), "-m", "pytest", "-q", *plugins, f"--basetemp={tmp_path / 'its'}", *files],
        env={FOLDER_VARIABLE: str(folder), "JAXLLM_CACHE": str(tmp_path / "cache")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    passed, skipped = (int(re.search(rf"(\d+) {each}", done.stdout)[1]) for each in ("passed", "skipped"))
    assert passed >= 25
    assert skipped == done.stdout.count("could not import 'jax'") == 3


def test_the_manifest_lists_the_loop(folder):
    assert {LOOP, "__main__.py", FILE} <= set(Manifest.read(folder).files)


def test_the_loop_has_what_a_device_imports_where_it_is_used():
    modules = loop_modules()
    assert {
        "jaxllm/export/programs/litert.py",
        "jaxllm/export/programs/drafts.py",
        "jaxllm/text/child_process.py",
    } <= set(modules)
    assert not any(b"\nimport jax\n" in text for text in modules.values())


def test_a_missing_signature_is_named(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    facts = json.loads((other / MANIFEST).read_text())
    more = {"kind": "verify", "tokens": 16, "level": WHOLE, "cache_tokens": 0, "file": FILE}
    facts["signatures"].append(more)
    (other / MANIFEST).write_text(json.dumps(facts))
    with pytest.raises(ProgramError, match="lacks the signatures verify_16, which"):
        open_program(other)


def test_a_model_of_another_export(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    raw = bytearray((other / FILE).read_bytes())
    raw[-1] ^= 1
    (other / FILE).write_bytes(raw)
    with pytest.raises(ProgramError, match="the checksum is wrong"):
        open_program(other)
