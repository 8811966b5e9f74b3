"""The folder of a device: it answers as the live service does, without JAX and without these sources."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from export.device import LOOP, loop_modules
from jaxllm.config import WHOLE
from jaxllm.errors import ProgramError
from jaxllm.program_folder.manifest import MANIFEST, Manifest
from serving.engine import Engine
from serving.request import GenerationConfig
from tests.export.conftest import PLAN
from tests.export.models import CFG, OPTIONS

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")

from export.device import write_loop
from export.tflite import FILE, export_tflite

CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)
_DRAW = np.random.default_rng(3)
PROMPTS = [_DRAW.integers(0, CFG.vocab_size, 1 + 2 * n).tolist() for n in range(20)]
# What a device does without JAX; prints one JSON object.
SCRIPT = """
import importlib.abc, json, sys
from pathlib import Path
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax", "chex", "export", "training"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
folder, place, prompts = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
sys.path.insert(0, str(folder / "loop.pyz"))
from jaxllm.elastic.slo import Slo
from jaxllm.sampling_state import Sampling
from serving.device.opening import open_device
from serving.device.service import DeviceService
from serving.request import GenerationConfig
from serving.speculation.options import SpeculationOptions
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
    return DeviceService.open(folder, threads=1, contexts=place, budget_bytes=3 * chunk_bytes)
service = opened()
answer = service.call("the hello there", slo=Slo.parse("<60,60>"), max_tokens=4).result()
out["plan"] = [answer.plan.level, answer.plan.source]
names, turns = [], prompts[9:12]
for turn in turns:
    context = service.new_context("app")
    context.generate(turn, config=config).result()
    names.append(context.name)
out["resident"] = service.contexts.memory.resident_bytes <= 3 * chunk_bytes
service.close()
service = opened()
answers = [service.context("app", each).generate([5, 6, 7], config=config).result() for each in names]
out["second"] = [each.tokens for each in answers]
out["read"] = [each.restored.read for each in answers]
service.close()
out["jax"] = [each for each in sys.modules if each.partition(".")[0] in ("jax", "jaxlib", "flax", "chex")]
out["sources"] = sys.modules["serving.engine"].__file__
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def folder(subject, tmp_path_factory):
    path = tmp_path_factory.mktemp("programs") / "device"
    export_tflite(subject, path, PLAN, beside=write_loop)
    return path


@pytest.fixture(scope="module")
def said(folder, tmp_path_factory):
    """What a device says of all prompts."""
    place = tmp_path_factory.mktemp("place")
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(folder), str(place / "store"), json.dumps(PROMPTS)],
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
    assert said["jax"] == []
    assert said["sources"].startswith(str(folder / LOOP))
    assert said["new_buffers"] == 0


def test_a_call_has_a_plan(said):
    level, source = said["plan"]
    assert level in (40, WHOLE)
    assert source in ("whole", "fallback", "nearest")


def test_contexts_are_swapped_and_outlive_the_process(said, live_engine):
    wanted = []
    for turn in PROMPTS[9:12]:
        sequence = [*turn, *live_engine.generate(turn, CONFIG).tokens, 5, 6, 7]
        wanted.append(live_engine.generate(sequence, CONFIG).tokens)
    assert said["second"] == wanted
    assert said["resident"]
    assert said["read"] == [16, 32, 32]


def test_the_folder_runs_by_itself(folder, tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", str(folder), "generate", "--json", "-p", "the hello", "--max-tokens", "4"],
        cwd=tmp_path, env={"JAXLLM_CACHE": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)["answers"]
    assert len(answer["tokens"]) <= 4


def test_the_manifest_lists_the_loop(folder):
    assert {LOOP, "__main__.py", FILE} <= set(Manifest.read(folder).files)


def test_the_loop_has_what_a_device_imports_where_it_is_used():
    modules = loop_modules()
    assert {"serving/programs/litert.py", "serving/programs/drafts.py", "jaxllm/text/child_worker.py"} <= set(
        modules
    )
    assert not any(b"\nimport jax\n" in text for text in modules.values())


def test_a_missing_signature_is_named(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    facts = json.loads((other / MANIFEST).read_text())
    more = {"kind": "verify", "tokens": 16, "level": WHOLE, "cache_tokens": 0, "file": FILE}
    facts["signatures"].append(more)
    (other / MANIFEST).write_text(json.dumps(facts))
    with pytest.raises(ProgramError, match="lacks the signatures verify_16, which"):
        Engine.open_program(other)


def test_a_model_of_another_export(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "other")
    raw = bytearray((other / FILE).read_bytes())
    raw[-1] ^= 1
    (other / FILE).write_bytes(raw)
    with pytest.raises(ProgramError, match="the checksum is wrong"):
        Engine.open_program(other)
