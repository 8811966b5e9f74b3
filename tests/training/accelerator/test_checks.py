"""The checks for accelerators run on a CPU, at sizes that nobody measures."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.quant import dequantize
from training.accelerator import __main__ as script
from training.accelerator import attention, steps
from training.accelerator.rows import Row
from training.accelerator.subjects import four_bit_params, random_batch, size_of


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
    found = values(attention.check_attention(256, 4, 2, 16, 1))
    assert found["gradient_across_borders"] == 0
    assert all(0 < found[f"relative_error_{name}"] < 0.02 for name in ("output", "dq", "dk", "dv"))
    assert found["step_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "check",
    [
        lambda: steps.measure_lora("tiny", "int4", 1),
        lambda: steps.measure_importance("tiny", 1),
        lambda: steps.measure_joint("tiny", True, 1),
    ],
)
def test_steps_are_measured(check):
    found = values(check())
    assert found["train_tokens_per_s"] > 0
    assert found["peak_memory_bytes"] > 1e6


def test_a_check_that_fails_is_told_and_the_others_run(monkeypatch, tmp_path, capsys):
    ran = []

    def run(words, **_):
        ran.append(words[-1])
        row = Row("case", "mfu", 0.5).line()
        return script.subprocess.CompletedProcess(words, int("350m" in words[-1]), stdout=row)

    monkeypatch.setattr(script.subprocess, "run", run)
    out = tmp_path / "rows.jsonl"
    assert script.main(["--tiny", "--only", "pretrain", "--out", str(out)]) == 1
    assert ran == ["pretrain-350m", "pretrain-350m-dots", "pretrain-60m", "pretrain-60m-muon"]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row.get("failed") for row in rows] == ["1", "1", None, None]
    assert "failed or left out: pretrain-350m, pretrain-350m-dots" in capsys.readouterr().err
    assert script.main(["--only", "none of them"]) == 2
    assert jax.default_backend() == "cpu"
