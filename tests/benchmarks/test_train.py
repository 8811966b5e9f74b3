"""The checks for accelerators on a CPU, at sizes that nobody measures, and the projection of costs."""

import dataclasses
import json
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.harness.report import row
from benchmarks.train import steps
from benchmarks.train.projection import MODELS, Counts, as_markdown, measured_shares, stages
from benchmarks.train.steps import four_bit_params, random_batch, size_of
from jaxllm.cli.main import cli
from jaxllm.errors import ConfigError
from jaxllm.quant import dequantize


def values(rows):
    return {row.metric: row.value for row in rows}


def test_documents_are_rows_of_their_own_losses():
    size = size_of("tiny")
    batch = random_batch(dataclasses.replace(size, row_tokens=2048))
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    # A document's last token has no target of its own.
    ends = batch.starts[:, 1:] != batch.starts[:, :-1]
    assert 0 < ends.sum() == (batch.weights == 0).sum()
    with pytest.raises(ConfigError, match="no size 'huge'; choose among tiny, 60m"):
        size_of("huge")


def test_four_bits_are_of_order_one():
    cfg = size_of("tiny").cfg
    params = four_bit_params(cfg, stack=False)
    up = dequantize(params["layers.0.ffn.up"], jnp.dtype(jnp.float32))
    assert up.shape == (cfg.ffn_size, cfg.hidden_size)
    assert 0.5 < float(np.std(up)) * cfg.hidden_size**0.5 < 2
    assert params["layers.0.ffn.up"].bits == 4
    assert params["embed.tokens"].bits == 8


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


def test_a_check_that_fails_is_told_and_the_others_run(monkeypatch, tmp_path):
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
    assert as_markdown(stages(MODELS[model], Counts()), ["A40", "H100"]) in PAGE


def test_measured_shares_replace_assumed_ones():
    rows = [
        {"case": "importance 1b", "metric": "mfu", "value": 0.5},
        {"case": "importance 1b", "metric": "train_tokens_per_s", "value": 9.0},
        {"case": "lora-8b-int4", "failed": "1"},
    ]
    shares = measured_shares(map(json.dumps, rows))
    assert shares == {"importance": 0.5}
    assumed, measured = (stages(MODELS["llama-7b"], Counts(), each) for each in ({}, shares))
    assert [stage.measured for stage in measured] == [True, False, False, False]
    assert measured[0].hours(1e12) == pytest.approx(assumed[0].hours(1e12) * assumed[0].utilization / 0.5)
    assert measured[1:] == assumed[1:]


def test_operations_by_hand():
    cfg = MODELS["llama-7b"]
    few = Counts(calibration_tokens=1, recovery_tokens=1, questions=1, score_tokens=1)
    importance, recovery, labels, score = stages(cfg, few)
    parameters = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    attention = 2 * 32 * 4096 * 4096
    # Norms are products of no matrix: some 1e5 of 7e9.
    whole = 3 * (2 * parameters + attention)
    assert importance.flops == pytest.approx(whole * (1 + 33 / 3), rel=1e-4)
    assert recovery.flops == pytest.approx(8 * (2 * 2 * parameters + 3 * attention), rel=1e-4)
    lengths = sum(share * 300 + 100 for share in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0))
    assert labels.flops == pytest.approx(lengths * whole / 3 * (4.4 + 1), rel=1e-4)
    assert score.flops == 6 * 40e6
