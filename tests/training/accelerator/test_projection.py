"""The page of projections is what the projection prints; measured shares take the place of assumed ones."""

import json
from pathlib import Path

import pytest

from training.accelerator.projection import MODELS, Counts, as_markdown, measured_shares, stages

PAGE = (Path(__file__).parents[3] / "docs" / "results" / "scale.md").read_text()


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
