"""The folder of a device: it answers as the live service does, where JAX is not installed, and without these
sources."""

import json
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest

from jaxllm import Engine
from jaxllm.config import FULL_LEVEL
from jaxllm.errors import ProgramError
from jaxllm.export.folder import loop_modules
from jaxllm.export.folder_format.manifest import LOOP, MANIFEST, Manifest
from jaxllm.export.loop_modules import ABSENT
from jaxllm.export.programs.model import open_program
from jaxllm.serving.engine.request import GenerationConfig
from tests.export.conftest import PLAN
from tests.export.models import CFG, OPTIONS

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")

from jaxllm.export.folder import write_loop
from jaxllm.export.tflite import FILE, export_tflite

CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)
MOST_BYTES = 60 << 20  # Above weights and caches, at the peak of a later start.
_DRAW = np.random.default_rng(3)
PROMPTS = [_DRAW.integers(0, CFG.vocab_size, 1 + 2 * n).tolist() for n in range(20)]
# What a device does, in an environment without JAX; prints one JSON object.
SCRIPT = """
import importlib.util, json, sys
from pathlib import Path
folder, prompts = Path(sys.argv[1]), json.loads(sys.argv[2])
sys.path.insert(0, str(folder / "loop.pyz"))
from jaxllm.sampling_state import Sampling
from jaxllm.export.device.opening import open_device
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.speculation_options import SpeculationOptions
config = GenerationConfig(max_tokens=12, ignore_eos=True)
drafts = SpeculationOptions(drafter="ngram", pausing=False)
engine = open_device(folder, threads=1)
out = {}
out["plain"] = {
    level: [engine.stream(each, config, level=level).result().tokens for each in prompts]
    for level in engine.levels
}
for sampling in (Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=3, top_p=0.9, min_p=0.1)):
    engine.generate(prompts[3], GenerationConfig(max_tokens=5, sampling=sampling))
drafted = open_device(folder, threads=1, drafts=drafts)
out["drafted"] = [drafted.generate(each, config).tokens for each in prompts]
out["verifications"] = drafted.speculation.counts.verifications
by = open_device(folder, threads=1, drafts=SpeculationOptions(model=folder, pausing=False))
out["folder"] = [by.generate(each, config).tokens for each in prompts[:8]]
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
    """The Python of an environment without JAX: its packages are links to those that run the tests."""
    place = tmp_path_factory.mktemp("bare") / "environment"
    venv.create(place, symlinks=True)
    schemes = {"base": str(place), "platbase": str(place)}
    site = Path(sysconfig.get_path("purelib", scheme="venv", vars=schemes))
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if each.name.partition("-")[0] not in (*ABSENT, "__pycache__") and each.suffix != ".pth":
            (site / each.name).symlink_to(each)
    return Path(sysconfig.get_path("scripts", scheme="venv", vars=schemes)) / "python"


@pytest.fixture(scope="module")
def said(python, folder, tmp_path_factory):
    """What a device says of all prompts."""
    place = tmp_path_factory.mktemp("place")
    done = subprocess.run(
        [str(python), "-P", "-c", SCRIPT, str(folder), json.dumps(PROMPTS)],
        cwd=place, env={"JAXLLM_CACHE": str(place / "cache")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def live_engine(elastic):
    return Engine.open(elastic, options=OPTIONS)


def test_twenty_prompts_token_for_token(said, folder, live_engine):
    for level in (40, FULL_LEVEL):
        wanted = [live_engine.stream(each, CONFIG, level=level).result().tokens for each in PROMPTS]
        assert said["plain"][str(level)] == wanted
    assert said["drafted"] == said["plain"][str(FULL_LEVEL)]
    assert said["verifications"] > 0
    assert said["folder"] == said["drafted"][:8]
    # Nothing of JAX or of the sources.
    assert said["installed"] == []
    assert said["sources"].startswith(str(folder / LOOP))


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


def test_the_loop_has_what_a_device_imports_where_it_is_used(folder):
    assert {LOOP, "__main__.py", FILE} <= set(Manifest.read(folder).files)
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
    more = {"kind": "verify", "tokens": 16, "level": FULL_LEVEL, "cache_tokens": 0, "file": FILE}
    facts["signatures"].append(more)
    (other / MANIFEST).write_text(json.dumps(facts))
    with pytest.raises(ProgramError, match="lacks the signatures verify_16, which"):
        open_program(other)
