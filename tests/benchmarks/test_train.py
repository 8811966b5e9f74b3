"""The checks for accelerators on a CPU, at sizes that nobody measures, and the projection of costs."""

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.harness.report import row
from benchmarks.train import steps
from benchmarks.train.projection import MODELS, as_markdown, stages
from jaxllm.cli.main import cli


def values(rows):
    return {row.metric: row.value for row in rows}


@pytest.mark.slow
def test_attention_is_compared_and_no_gradient_crosses_a_border():
    found = values(steps.check_attention(256, 4, 2, 16, 1))
    assert found["gradient_across_borders"] == 0
    assert all(0 < found[f"relative_error_{name}"] < 0.02 for name in ("output", "dq", "dk", "dv"))
    assert found["step_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        lambda: steps.measure_importance("tiny", 1),
        pytest.param(lambda: steps.measure_lora("tiny", "int4", 1), marks=pytest.mark.campaign),
        pytest.param(lambda: steps.measure_joint("tiny", True, 1), marks=pytest.mark.campaign),
    ],
    ids=["importance", "lora", "joint"],
)
def test_steps_are_measured(check):
    found = values(check())
    assert found["train_tokens_per_s"] > 0
    assert found["peak_memory_bytes"] > 1e6


def test_a_check_that_fails_is_reported_and_the_others_run(monkeypatch, tmp_path):
    ran = []

    def run(words, **_):
        ran.append(words[-1])
        line = json.dumps(dataclasses.asdict(row("case", "mfu", 0.5))) + "\n"
        return subprocess.CompletedProcess(words, int("350m" in words[-1]), stdout=line)

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "rows.jsonl"
    asked = ("train", "--full", "--json", "--only", "pretrain", "--out", str(out))
    got = CliRunner().invoke(cli, ("bench", *asked))
    assert "failed or not begun: pretrain-350m, pretrain-350m-dots" in str(got.exception)
    assert ran == ["pretrain-350m", "pretrain-350m-dots", "pretrain-60m", "pretrain-60m-muon"]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [each.get("failed") for each in rows] == ["1", "1", None, None]
    printed = json.loads(got.stdout)
    assert (printed["bench"], [each["system"] for each in printed["rows"]]) == ("train", ["jaxllm"] * 2)
    assert CliRunner().invoke(cli, ["bench", "train", "--only", "none of them"]).exit_code == 2


PAGE = (Path(__file__).parents[2] / "docs" / "results" / "scale.md").read_text()


@pytest.mark.parametrize("model", MODELS)
def test_the_page_has_the_projection(model):
    assert as_markdown(stages(MODELS[model]), ["A40", "H100"]) in PAGE
