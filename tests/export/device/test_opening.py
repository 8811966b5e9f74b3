"""Opens a device's folder, and refuses what it cannot run."""

import dataclasses
import importlib.metadata
import json
import shutil

import numpy as np
import pytest

from jaxllm.errors import BudgetExceeded, ConfigError, ProgramError
from jaxllm.export.device.opening import needed_bytes, open_device, require_memory, require_runtime
from jaxllm.export.folder_format.manifest import MANIFEST, Manifest
from jaxllm.export.programs.model import open_program
from jaxllm.sampling_state import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from tests.export.sizes import CONFIG, PROMPTS, answers, weights_file

DRAWN = dataclasses.replace(CONFIG, sampling=Sampling(temperature=0.9, top_p=0.9, seed=5))


def test_answers_are_those_of_the_live_executor(folder, engine):
    pytest.importorskip("jax")
    live = open_program(folder)
    for level in (40, 100):
        assert answers(engine.at(level)) == answers(live.at(level))
    for prompt in PROMPTS:
        assert engine.generate(prompt, DRAWN).tokens == live.generate(prompt, DRAWN).tokens


@pytest.mark.parametrize("config", [CONFIG, DRAWN])
def test_drafts_change_no_answer(folder, engine, config):
    drafted = open_device(folder, drafts=SpeculationOptions(drafter="ngram", pausing=False))
    for prompt in PROMPTS:
        assert drafted.generate(prompt, config).tokens == engine.generate(prompt, config).tokens


def test_nothing_is_compiled_after_warm_up(engine, request):
    pytest.importorskip("jax")
    compiles = request.getfixturevalue("compiles")
    samplings = [
        Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1),
        Sampling(repetition_penalty=1.2, logit_bias=((3, 1.0),)),
    ]  # fmt: skip
    with compiles() as count:
        for sampling in samplings:
            for prompt in PROMPTS:
                for level in engine.levels:
                    config = GenerationConfig(max_tokens=12, ignore_eos=True, sampling=sampling)
                    engine.stream(prompt, config, level=level).result()
    assert count() == 0


def test_memory_is_bound(folder):
    manifest = Manifest.read(folder)
    needed = needed_bytes(manifest)
    require_memory(folder, manifest, needed)
    require_memory(folder, manifest, 0)
    with pytest.raises(BudgetExceeded, match=rf"{needed:,} bytes .* {needed - 1:,} are allowed"):
        require_memory(folder, manifest, needed - 1)
    caches = sum(np.prod(each) for each in manifest.cache_shapes(100, manifest.context_tokens).values())
    assert needed > 4 * caches + (folder / weights_file(manifest)).stat().st_size


def test_a_runtime_must_be_there_and_not_older(folder, monkeypatch):
    made_with = {"ai-edge-litert": "2.3.0"}
    manifest = dataclasses.replace(Manifest.read(folder), format="tflite", made_with=made_with)
    for there in ("2.3.0", "2.10"):
        monkeypatch.setattr(importlib.metadata, "version", lambda _, there=there: there)
        require_runtime(folder, manifest)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.2.9")
    with pytest.raises(ProgramError, match=r"tried with ai-edge-litert 2\.3\.0, and 2\.2\.9 here is older"):
        require_runtime(folder, manifest)

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ConfigError, match="ai-edge-litert, which is not installed"):
        require_runtime(folder, manifest)


def test_what_is_no_folder(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        open_device(tmp_path / "missing")
    with pytest.raises(ProgramError, match="not a folder of programs"):
        open_device(tmp_path)


def test_files_of_two_exports(folder, tmp_path):
    pytest.importorskip("jax")
    mixed = shutil.copytree(folder, tmp_path / "mixed")
    facts = json.loads((mixed / MANIFEST).read_text())
    facts["model"] = "0" * 64
    (mixed / MANIFEST).write_text(json.dumps(facts))
    with pytest.raises(ProgramError, match="weights of another bundle"):
        open_device(mixed)


def test_a_level_that_was_not_exported(folder):
    with pytest.raises(ConfigError, match="level 70 was not exported, only 40, 100"):
        open_device(folder, level=70)
