"""`jaxllm eval`: perplexity, tasks, and what it writes for people and programs."""

import json
import sys
from pathlib import Path

import pytest

from jaxllm.text.tokenizer import Tokenizer
from tests.cli.outcome import WINDOW, Run, answer, failed, succeeded
from tests.tasks.writing import write_lines
from tests.tiny import tiny_tokenizer


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
    assert list(got) == [
        "model", "weights", "perplexity", "bits_per_byte", "tokens", "documents", "window_tokens",
    ]  # fmt: skip
    assert (got["model"], got["weights"]) == ("tiny", "f32")
    assert (got["tokens"], got["documents"], got["window_tokens"]) == (tokens, 1, WINDOW)
    assert 1 < got["perplexity"] < 1e9
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
    assert list(got) == ["model", "weights", "tasks", "missing"]
    assert {"news", "shorten"} < set(got["missing"])
    sentiment, arc, lambada = got["tasks"]
    assert (sentiment["task"], arc["task"], lambada["task"]) == ("sentiment", "arc-easy", "lambada")
    assert (sentiment["examples"], sentiment["skipped"], sentiment["chance"]) == (12, 1, 0.5)
    assert sentiment["majority"] == pytest.approx(8 / 12)
    assert arc["chance"] == pytest.approx(1 / 3)
    assert {"accuracy", "accuracy_per_byte"} < set(arc)
    assert "accuracy_per_byte" not in sentiment
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


@pytest.mark.parametrize(
    "line",
    [
        "tasks --task sentiment", "tasks --task chess --data .", "tasks --task news --data . --limit 0",
        "tasks --task news --data . --window 8", "perplexity x --predictions y", "perplexity x --separator=",
        "perplexity x --prefill int8", "perplexity", "agreement x", "routing",
    ],
)  # fmt: skip
def test_usage(run: Run, bundle: Path, line: str) -> None:
    assert run("eval", *line.split(), "-m", bundle).code == 2


def test_faults(run: Run, bundle: Path, data: Path, tmp_path: Path) -> None:
    base = ("eval", "tasks", "-m", bundle, "--data", data)
    failed(run(*base, "--task", "news"), "agnews", "No such file")
    failed(run("eval", "tasks", "-m", bundle, "--data", tmp_path / "no"), "files of no task")
    failed(run(*base, "--task", "sentiment", "--predictions", tmp_path / "no" / "x"), "--predictions")
    (data / "tasks/sst2/valid.jsonl").write_text("{}\n{")
    failed(run(*base), "valid.jsonl, line 1")


def test_without_rouge_the_extra_is_named(
    run: Run, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxllm.tasks import rouge

    monkeypatch.setitem(sys.modules, "rouge_score", None)
    rouge._scorer.cache_clear()
    write_lines(tmp_path / "tasks/samsum/valid.jsonl", {"dialogue": "a", "summary": "b"})
    failed(run("eval", "tasks", "-m", bundle, "--data", tmp_path, "--task", "chat-summary"), "jaxllm[eval]")
    rouge._scorer.cache_clear()
