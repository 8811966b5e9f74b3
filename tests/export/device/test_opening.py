"""Opens a device's folder, and refuses what it cannot run; its service plans by a profile of this device, and
its command answers."""

import dataclasses
import importlib.metadata
import json
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner

from jaxllm.cli.device import command
from jaxllm.errors import BudgetExceeded, ConfigError, ObjectiveMissed, ProgramError
from jaxllm.export.device import opening
from jaxllm.export.device.opening import needed_bytes, open_device, require_memory, require_runtime
from jaxllm.export.device.service import ProgramService
from jaxllm.export.folder_format.manifest import Manifest
from jaxllm.export.programs.model import open_program
from jaxllm.sampling_state import Sampling
from jaxllm.serving.elastic.objectives import Latency
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from tests.export.sizes import CONFIG, CONTEXT, PROMPTS, answers, weights_file

DRAWN = dataclasses.replace(CONFIG, sampling=Sampling(temperature=0.9, top_p=0.9, seed=5))


def test_answers_are_those_of_the_live_executor_with_drafts_too(folder, engine):
    pytest.importorskip("jax")
    live = open_program(folder)
    drafted = open_device(folder, drafts=SpeculationOptions(drafter="ngram", pausing=False))
    for level in (40, 100):
        assert answers(engine.at(level)) == answers(live.at(level))
    for prompt in PROMPTS:
        wanted = live.generate(prompt, DRAWN).tokens
        assert engine.generate(prompt, DRAWN).tokens == drafted.generate(prompt, DRAWN).tokens == wanted


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


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))


def test_golden_answers_are_compared_at_the_first_start(folder, cache, tmp_path, monkeypatch, caplog):
    manifest = Manifest.read(folder)
    assert [each.level for each in manifest.golden] == [40, 100]
    place = tmp_path / "copy"
    shutil.copytree(folder, place)
    golden = manifest.golden[-1]
    others = tuple(token ^ 1 if place == 2 else token for place, token in enumerate(golden.tokens))
    wrong = dataclasses.replace(golden, tokens=others)
    dataclasses.replace(manifest, golden=(wrong,)).write(place)
    for _ in range(2):
        with pytest.raises(
            ProgramError, match=rf"level 100 answers otherwise .* 3 is {golden.tokens[2]}, not"
        ):
            open_device(place)
    manifest.write(place)
    open_device(place)
    monkeypatch.setattr(opening, "require_golden", Mock(side_effect=ProgramError("again")))
    open_device(place)
    # An accelerator that ended a process is not tried again.
    dataclasses.replace(manifest, made_with={**manifest.made_with, "jaxllm": "0"}, name="other").write(place)
    real, begun = opening.open_program_model, []

    def opened(*args, accelerator, **options):
        if accelerator == "gpu":
            begun.extend((tmp_path / "cache").rglob("*.begun"))
            raise ProgramError("no driver")
        return real(*args, **options)

    monkeypatch.setattr(opening, "open_program_model", opened)
    open_device(place, accelerator="gpu")
    assert "the GPU is not used, but the CPU: no driver" in caplog.text
    (mark,) = begun
    assert not mark.exists()
    mark.touch()
    open_device(place, accelerator="gpu")
    assert f"it has ended a process that tried it; to try it again, remove {mark}" in caplog.text
    assert begun == [mark]


# The service


def test_a_call_takes_the_level_that_is_in_time(engine, profile):
    service = ProgramService(engine, profile)
    relaxed = service.call("one two", slo=Latency(ttft_ms=1e6, tpot_ms=1e6), max_tokens=3).result()
    assert (relaxed.plan.level, relaxed.plan.source, relaxed.met) == (100, "whole", True)
    hasty = service.call("one two", slo=Latency(ttft_ms=1e-6, tpot_ms=1e-6), max_tokens=3).result()
    assert (hasty.plan.source, hasty.met) == ("nearest", False)
    with pytest.raises(ObjectiveMissed):
        service.call("one two", slo=Latency(ttft_ms=1e-6, tpot_ms=1e-6), strict=True)


def test_a_profile_is_kept_and_measured_anew_on_another_device(engine, cache, monkeypatch):
    first = opening.device_profile(engine)
    assert first.coarse
    assert first.levels == (40, 100)
    assert first.tokens[-1] < CONTEXT
    marked = dataclasses.replace(first, tpot_ms=tuple(tuple(1e3 for _ in row) for row in first.tpot_ms))
    opening.save_profile(marked, opening.profile_path(engine))
    assert opening.device_profile(engine) == marked
    # One thread is another device, and so is another processor.
    assert opening.profile_path(engine, threads=64) != opening.profile_path(engine)
    monkeypatch.setattr(opening, "cpu_features", lambda: ["another processor"])
    assert opening.device_profile(engine) != marked


def test_contexts_of_a_service(folder, cache, tmp_path):
    def opened():
        return ProgramService.open(open_device(folder), contexts=tmp_path / "contexts", budget_bytes=1 << 20)

    service = opened()
    context = service.new_context("mail")
    text = context.generate([1, 2, 3]).result().text
    service.close()
    again = opened()
    tokens = again.context("mail", context.name).tokens
    assert tokens[:3] == (1, 2, 3)
    assert again.engine.tokenizer.decode(tokens[3:]).startswith(text)
    again.close()


# The command


@pytest.fixture
def run(engine, profile, folder, monkeypatch):
    """Runs a command on the engine that is open already."""

    def serve(choice, *stored):
        assert stored[0] is None
        return ProgramService(engine, profile)

    monkeypatch.setattr(command._Choice, "open", lambda choice, level=100: engine.at(level))
    monkeypatch.setattr(command._Choice, "serve", serve)
    return lambda *arguments: CliRunner().invoke(command.device, [str(folder), *arguments])


def test_prompts_are_continued_and_calls_planned(run, folder):
    asked = ("-p", "the hello", "-p", "there", "--max-tokens", "4", "--ignore-eos")
    said = json.loads(run("generate", *asked, "--json").stdout)
    texts = [each["text"] for each in said["answers"]]
    assert [len(each["tokens"]) for each in said["answers"]] == [4, 4]
    assert run("generate", *asked).stdout == "".join(f"{text}\n" for text in texts)
    small = json.loads(run("generate", *asked, "--json", "--level", "40").stdout)
    assert [each["text"] for each in small["answers"]] != texts
    said = json.loads(run("call", "-p", "the", "--slo", "<90,90>", "--max-tokens", "3", "--json").stdout)
    assert (said["level"] in (40, 100), said["met"] in (True, False)) == (True, True)
    facts, manifest = json.loads(run("facts", "--json").stdout), Manifest.read(folder)
    assert (
        facts["planned_bytes"] > facts["weights_bytes"] == manifest.files[weights_file(manifest)].size_bytes
    )
    served = json.loads(run("facts", "--calls", "9", "--json").stdout)
    assert served["peak_memory_bytes"] >= facts["proportional_bytes"] > facts["cache_bytes"] > 0


def test_wrong_usage(run):
    for arguments, said in (
        (["call", "-p", "the", "--context", "new"], "--contexts and --context go together"),
        (["call", "--contexts", "c", "--context", "new", "--slo", "<9,9>", "-p", "a"], "keeps its level"),
    ):
        done = run(*arguments)
        assert (done.exit_code, said in done.stderr) == (2, True)


def test_a_folder_of_its_own_needs_no_name_and_errors_are_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"], folder=tmp_path)
    said = capsys.readouterr().out
    assert said.startswith(f"Usage: python {tmp_path}")
    assert "FOLDER" not in said.partition("\n")[0]
    for arguments, folder, message in (
        ([], tmp_path, "not a folder of programs"),
        ([str(tmp_path / "missing"), "facts"], None, "no such folder"),
    ):
        with pytest.raises(SystemExit) as ended:
            command.main(arguments, folder=folder)
        said = capsys.readouterr().err
        assert (ended.value.code, said.count("\n")) == (1, 1)
        assert said.startswith("error: ")
        assert message in said
