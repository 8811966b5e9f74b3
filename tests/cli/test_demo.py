"""`jaxllm demo`: its questions and its verdicts."""

import dataclasses
from pathlib import Path

import pytest

import jaxllm.serving.ground.bundles
from jaxllm.cli import demo
from jaxllm.cli.demo import STORY, TRANSLATOR, demo_prompts
from jaxllm.models.parameters import parameter_count
from jaxllm.tasks import TASKS
from tests.cli.outcome import Run, answer, succeeded
from tests.tiny import TINY, tiny_params, write_tiny_bundle
from tests.tiny_encdec import ENCODER, TINY_T5, write_bundle


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes whose window holds the longest question."""
    cfg = TINY.__class__.from_json(TINY.to_json() | {"window_tokens": 1024})
    path = tmp_path_factory.mktemp("demo") / "m.jaxllm"
    return write_tiny_bundle(path, cfg=cfg, params=tiny_params(cfg))


def test_prompts() -> None:
    prompts = demo_prompts()
    assert [len(examples) for examples in prompts.values()] == [3] * 7
    assert set(prompts) - set(TASKS) == {STORY}
    for task, examples in prompts.items():
        for example in examples:
            # Whatever can be judged has a right answer among several.
            assert bool(example.options) == (task != STORY and TASKS[task].score == "accuracy")
            assert bool(example.answer) == (task != STORY)
    answers = {example.answer for example in prompts["ui-step"]}
    assert answers == {"tap Settings", "type in Search notes", "finish"}


@pytest.mark.slow
def test_prompts_are_from_no_data_set(data_dir: Path) -> None:
    texts = {each.user for examples in demo_prompts().values() for each in examples}
    for name in ("sentiment", "news", "emotion", "ui-step", "api-choice", "shorten"):
        for split in ("train", "valid"):
            assert not texts & {each.user for each in TASKS[name].read(data_dir, split)}


@pytest.mark.slow
def test_demo(run: Run, roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxllm.serving.ground.bundles, "default_bundle", lambda: roomy)
    monkeypatch.setattr(jaxllm.serving.ground.bundles, "packaged_models", lambda: [])
    got = answer(run("demo", "-n", 3, "--json"))
    assert got["translations"] == []
    assert (got["model"], got["weights"]) == ("tiny", "f32")
    assert got["parameters"] == parameter_count(TINY)
    assert got["load_ms"] > 0
    assert (len(got["answers"]), got["judged"]) == (21, 15)
    assert got["right"] == sum(each["right"] is True for each in got["answers"])
    assert got["median_ttft_ms"] > 0
    out = succeeded(run("demo", "-n", 3, "-m", roomy))
    for each in got["answers"]:
        assert 0 < each["completion_tokens"] <= 3
        assert each["prompt"].splitlines()[0] in out
    assert f"{got['right']} of 15 right" in out


@pytest.mark.slow
def test_translations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = dataclasses.replace(ENCODER, window_tokens=256)
    cfg = dataclasses.replace(TINY_T5, encoder=encoder, window_tokens=256)
    write_bundle(tmp_path / f"{TRANSLATOR}.jaxllm", cfg=cfg)
    monkeypatch.setattr(jaxllm.serving.ground.bundles, "_assets", lambda: tmp_path)
    answers = demo._translations(3, aloud=True)
    assert [each["prompt"] for each in answers] == demo._data()[TRANSLATOR]
    assert all(0 < each["completion_tokens"] <= 3 for each in answers)
