"""`jaxllm profile`, `trace` and `--level`: elastic bundles on the command line."""

import json
from pathlib import Path

import pytest

from benchmarks.traces import read_trace
from jaxllm.bundle.levels import elastic_parts
from jaxllm.elastic.ladder import Ladder
from jaxllm.serving.elastic.profile import load_profile
from tests.cli.outcome import CFG, PARAMS, Run, answer, failed, succeeded
from tests.tiny import write_tiny_bundle


@pytest.fixture(scope="module")
def elastic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parts = elastic_parts(Ladder(levels=(50, 100), anchors=(1,)))
    return write_tiny_bundle(
        tmp_path_factory.mktemp("elastic") / "e.jaxllm", cfg=CFG, params=PARAMS, parts=parts
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "tasks" / "sst2").mkdir(parents=True)
    records = [{"text": f"film {n}", "label": ("positive", "negative")[n % 2]} for n in range(4)]
    path = tmp_path / "tasks" / "sst2" / "valid.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return tmp_path


def test_a_level_answers_differently(run: Run, elastic: Path, bundle: Path) -> None:
    texts = {
        answer(run("generate", "-m", elastic, "-p", "ab", "-n", 8, "--ignore-eos", "--json", *level))["text"]
        for level in ((), ("--level", 100), ("--level", 50))
    }
    assert len(texts) == 2
    failed(run("generate", "-m", elastic, "-p", "ab", "--level", 60), "there are 50, 100")
    facts = answer(run("info", elastic, "--json"))
    assert (facts["levels"], facts["anchors"], facts["tiny_lm"]) == ([50, 100], [1], False)
    failed(run("generate", "-m", bundle, "-p", "ab", "--level", 50), "has no levels")


def test_every_level_is_evaluated(run: Run, elastic: Path, bundle: Path, data: Path) -> None:
    (data / "text").write_text("hello the hello. " * 8)
    base = ("eval", "tasks", "--data", data, "--task", "sentiment", "--each-level")
    found = answer(run(*base, "-m", elastic, "--text", data / "text", "--json"))
    assert (
        [each["level"] for each in found["tasks"]] == [each["level"] for each in found["texts"]] == [100, 50]
    )
    whole, half = found["texts"]
    for level, each in ((100, whole), (50, half)):
        alone = answer(run("eval", "perplexity", data / "text", "-m", elastic, "--level", level, "--json"))
        assert alone["perplexity"] == pytest.approx(each["perplexity"])
        assert each["interval"][0] <= each["perplexity"] <= each["interval"][1]
    assert whole["perplexity"] != half["perplexity"]
    assert "Level 50: perplexity" in succeeded(run(*base, "-m", elastic, "--text", data / "text"))
    failed(run(*base, "-m", bundle), "has no levels")
    failed(run(*base, "-m", elastic, "--level", 50), "leave --level 50 out")


def test_profile(run: Run, elastic: Path, tmp_path: Path) -> None:
    facts = answer(run("profile", elastic, "--repeats", 1, "--json"))
    assert facts["levels"] == [50, 100]
    assert Path(facts["profile"]).exists()
    assert "<20,50>" in facts["unmet"]
    energy = tmp_path / "energy.json"
    energy.write_text(json.dumps({"prefill_joules": [1, 2], "decode_joules": [3, 4]}))
    shown = succeeded(run("profile", elastic, "--repeats", 1, "--energy", energy))
    assert "50 %" in shown
    assert "no choice meets here: " in shown
    kept = load_profile(Path(facts["profile"]))
    assert kept is not None
    assert kept.energy is not None
    assert kept.energy.decode_joules == (3, 4)
    energy.write_text("[]")
    failed(run("profile", elastic, "--repeats", 1, "--energy", energy), "prefill_joules")


def test_a_trace_is_made_and_replayed(run: Run, elastic: Path, data: Path, tmp_path: Path) -> None:
    path, asked = tmp_path / "trace.jsonl", ("--task", "sentiment")
    told = succeeded(run("bench", "trace", "make-slo", "--data", data, "-o", path, "-n", 9, *asked))
    assert "9 requests" in told
    assert len(read_trace(path)) == 9
    facts = answer(run("bench", "trace", "replay", path, "-m", elastic, "--limit", 4, "-n", 2, "--json"))
    assert facts["all"]["requests"] == 4
    assert sum(each["requests"] for each in facts["by_slo"].values()) == 4
    free = facts["by_slo"].get("<100,100>", {"requests": 0})["requests"]
    assert facts["limited"]["requests"] == 4 - free
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0].replace("film", "film " * 2000), lines[1]]))
    told = succeeded(run("bench", "trace", "replay", path, "-m", elastic, "-n", 2))
    assert "1 calls failed: the prompt has" in told
