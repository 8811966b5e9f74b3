"""`jaxllm eval` and `jaxllm demo`: perplexity, tasks, questions and verdicts, for people and programs."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import jaxllm.serving.ground.bundles
from jaxllm.cli import demo
from jaxllm.cli.demo import STORY, TRANSLATOR, demo_prompts
from jaxllm.models.parameters import parameter_count
from jaxllm.tasks import TASKS
from jaxllm.text.tokenizer import Tokenizer
from tests.cli.outcome import WINDOW, Run, answer, failed, succeeded
from tests.tasks.writing import write_lines
from tests.tiny import TINY, tiny_params, tiny_tokenizer, write_tiny_bundle
from tests.tiny_encdec import ENCODER, TINY_T5, write_bundle


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Small tasks in texts short enough for the window of the tiny model."""
    folder = tmp_path / "data"
    reviews = [{"text": f"t{n}", "label": ("positive", "negative")[n % 3 == 0]} for n in range(12)]
    write_lines(folder / "tasks/sst2/valid.jsonl", *reviews, {"text": "long " * 40, "label": "positive"})
    write_lines(folder / "tasks/lambada/valid.jsonl", *({"text": f"a b {n}"} for n in range(3)))
    question = {"stem": "Q", "choices": [{"text": t, "label": t} for t in ("a", "b", "cc")]}
    write_lines(folder / "tasks/arc_easy/valid.jsonl", {"question": question, "answerKey": "b"})
    return folder


def test_perplexity(run: Run, bundle: Path, tmp_path: Path) -> None:
    text = "hello the hello. " * 8
    (tmp_path / "text").write_text(text)
    base = ("eval", "perplexity", tmp_path / "text", "-m", bundle)
    got = answer(run(*base, "--json"))
    tokens = len(Tokenizer(tiny_tokenizer()).encode(text)) - 1
    assert (got["model"], got["weights"]) == ("tiny", "f32")
    assert (got["tokens"], got["documents"], got["window_tokens"]) == (tokens, 1, WINDOW)
    assert succeeded(run(*base)) == (
        f"perplexity {got['perplexity']:.4f}, {got['bits_per_byte']:.4f} bits/byte over {tokens} tokens in "
        f"1 documents (windows of {WINDOW} tokens)\n"
    )
    # Documents are scored apart; the last, blank one does not count.
    split = answer(run(*base, "--separator", ". ", "--window", 16, "--json"))
    assert (split["documents"], split["window_tokens"]) == (8, 16)
    assert split["tokens"] == 8 * (len(Tokenizer(tiny_tokenizer()).encode("hello the hello")) - 1)
    assert answer(run("eval", "perplexity", "-", "-m", bundle, "--json", stdin=text.encode())) == got


def test_tasks(run: Run, home: Path, data: Path, tmp_path: Path) -> None:
    said = tmp_path / "said.jsonl"
    base = ("eval", "tasks", "-m", home / "base.jaxllm", "--data", data)
    got = answer(run(*base, "--json", "--predictions", said))
    assert {"news", "shorten"} < set(got["missing"])
    sentiment, arc, lambada = got["tasks"]
    assert (sentiment["task"], arc["task"], lambada["task"]) == ("sentiment", "arc-easy", "lambada")
    assert (sentiment["examples"], sentiment["skipped"], sentiment["chance"]) == (12, 1, 0.5)
    assert sentiment["majority"] == pytest.approx(8 / 12)
    assert arc["chance"] == pytest.approx(1 / 3)
    assert ("accuracy_per_byte" in arc, "accuracy_per_byte" in sentiment) == (True, False)
    assert (lambada["examples"], lambada["chance"], lambada["majority"]) == (3, None, None)
    lines = [json.loads(line) for line in said.read_text().splitlines()]
    assert [line["task"] for line in lines] == ["sentiment"] * 12 + ["arc-easy"] + ["lambada"] * 3
    for result in got["tasks"]:
        measure = "exact_match" if result["task"] == "lambada" else "accuracy"
        mine = [line[measure] for line in lines if line["task"] == result["task"]]
        assert result[measure] == pytest.approx(sum(mine) / len(mine))
    first = lines[0]
    best = max(range(2), key=first["log_probabilities"].__getitem__)
    assert first["prediction"] == first["options"][best]
    out = succeeded(run(*base))
    assert "1 questions are longer than the context and were skipped." in out
    assert "No files of: news, " in out


def test_limit_is_a_sample_that_does_not_hang_on_the_order(run: Run, home: Path, data: Path) -> None:
    said = data / "said.jsonl"
    base = ("eval", "tasks", "-m", home / "base.jaxllm", "--data", data, "--task", "sentiment", "--limit", 4)
    asked = []
    path = data / "tasks/sst2/valid.jsonl"
    for _ in range(2):
        (result,) = answer(run(*base, "--json", "--predictions", said))["tasks"]
        assert result["examples"] + result["skipped"] == 4
        asked.append([json.loads(line)["question"] for line in said.read_text().splitlines()])
        path.write_text("\n".join(path.read_text().splitlines()[::-1]))
    assert asked[0] == asked[1] != [f"t{n}" for n in range(4)]


def test_faults(run: Run, bundle: Path, data: Path, tmp_path: Path) -> None:
    for line in (
        "tasks --task chess --data .",
        "tasks --task news --data . --limit 0",
        "perplexity x --separator=",
    ):
        assert run("eval", *line.split(), "-m", bundle).code == 2, line
    base = ("eval", "tasks", "-m", bundle, "--data", data)
    failed(run(*base, "--task", "news"), "agnews", "No such file")
    failed(run(*base, "--task", "sentiment", "--predictions", tmp_path / "no" / "x"), "--predictions")
    (data / "tasks/sst2/valid.jsonl").write_text("{}\n{")
    failed(run(*base), "valid.jsonl, line 1")


# `jaxllm demo`


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
def test_demo(run: Run, roomy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxllm.serving.ground.bundles, "default_bundle", lambda: roomy)
    monkeypatch.setattr(jaxllm.serving.ground.bundles, "packaged_models", lambda: [])
    monkeypatch.setattr(demo, "SMOLLM2", "no_such_package")
    monkeypatch.setattr(demo, "PACKAGES", ("no_such_service",))
    ended = run("demo", "-n", 3, "--json")
    notes = ended.err.splitlines()
    assert "packaged models answer instead" in notes[0]
    assert notes[1:] == ["no service: no_such_service is missing; pip install 'jaxllm[serve,client]'"]
    got = json.loads(ended.out)
    assert (got["translations"], got["service"]) == ([], None)
    assert (got["model"], got["weights"], got["parameters"]) == ("tiny", "f32", parameter_count(TINY))
    assert (len(got["answers"]), got["judged"]) == (21, 15)
    assert got["right"] == sum(each["right"] is True for each in got["answers"])
    out = run("demo", "-n", 3).out
    for each in got["answers"]:
        assert 0 < each["completion_tokens"] <= 3
        assert each["prompt"].splitlines()[0] in out
    assert f"{got['right']} of 15 right" in out


@pytest.mark.slow
def test_demo_of_a_chat_model(run: Run, roomy: Path) -> None:
    """A conversation, its speed beside the memory, and the answer of a real service."""
    out = succeeded(run("demo", "-m", roomy))
    assert all(text in out for text in demo._data()["chat"])
    assert re.search(r"a token reads 0\.\d MB of weights: .* GB/s of this machine's memory\n", out)
    assert re.search(r"(not )?met  \[first after .* ms, then .* ms per token\]\n$", out)
    got = answer(run("demo", "-m", roomy, "--json"))
    spent = got["step_bytes"] * got["median_decode_tokens_per_s"]
    assert got["bandwidth_share"] == pytest.approx(spent / got["memory_bytes_per_s"])
    assert [each["prompt"] for each in got["answers"]] == demo._data()["chat"]
    assert got["service"]["level"] == 100
    assert got["service"]["text"]


@pytest.mark.slow
def test_translations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = dataclasses.replace(ENCODER, window_tokens=256)
    cfg = dataclasses.replace(TINY_T5, encoder=encoder, window_tokens=256)
    write_bundle(tmp_path / f"{TRANSLATOR}.jaxllm", cfg=cfg)
    monkeypatch.setattr(jaxllm.serving.ground.bundles, "_assets", lambda: tmp_path)
    answers = demo._translations(3, aloud=True)
    assert [each["prompt"] for each in answers] == demo._data()[TRANSLATOR]
    assert all(0 < each["completion_tokens"] <= 3 for each in answers)
