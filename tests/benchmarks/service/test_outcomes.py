"""Outcomes judged by hand; their rows and figures."""

import json
import math

import pytest

from benchmarks.service.figures import draw
from benchmarks.service.outcomes import Window, judged
from benchmarks.service.reference import Reference
from benchmarks.service.rows import Cell, load_rows, memory_rows
from benchmarks.service.run import Measured, write_outcomes
from benchmarks.service.workload import Request

REQUEST = Request(app=3, prompt=tuple(range(16, 116)), answer_tokens=11)


def outcome(due_s=1.0, *, first_s: float | None = 1.1, last_s=2.1, tokens=11, limits=(150.0, 100.0), **more):
    raw = {
        "number": 0, "due_s": due_s, "sent_s": due_s + 0.001, "first_s": first_s, "last_s": last_s,
        "tokens": tokens, "status": 200, "error": None, "jaxllm": {"level": 60, "reused_tokens": 25}, **more,
    }  # fmt: skip
    return judged(raw, REQUEST, limits)


def test_an_answer_in_time():
    found = outcome()
    assert (found.status, found.met, found.level) == ("answered", True, 60)
    assert found.ttft_ms == pytest.approx(100)
    assert found.tpot_ms == pytest.approx(100)


@pytest.mark.parametrize(
    ("changed", "status", "met"),
    [
        ({"limits": (99.0, 101.0)}, "answered", False),
        ({"limits": (101.0, 99.0)}, "answered", False),
        ({"limits": (math.inf, math.inf), "last_s": 900.0}, "answered", True),
        # One token has no time per further one.
        ({"limits": (101.0, 1e-3), "tokens": 1, "last_s": 1.1}, "answered", True),
        ({"error": "queue", "status": 429, "first_s": None}, "refused", False),
        ({"error": "loading", "status": 503, "first_s": None}, "refused", False),
        ({"error": "not answered", "status": 0, "first_s": None}, "failed", False),
        ({"error": "broken in the middle"}, "failed", False),
        ({"first_s": None, "last_s": None, "tokens": 0}, "failed", False),
    ],
)
def test_other_ends(changed, status, met):
    found = outcome(**changed)
    assert (found.status, found.met) == (status, met)
    assert json.loads(json.dumps(found.to_json()))["app"] == "app-4"


def test_a_window_counts_what_was_due_in_it():
    late = outcome(5.0, first_s=9.0, last_s=9.5)
    refused = outcome(4.0, error="no", status=429, first_s=None)
    window = Window(1.0, 6.0, [outcome(0.5, first_s=0.5, last_s=1.5), outcome(), late, refused])
    found = window.figures()
    assert found["goodput_per_s"] == pytest.approx(1 / 5)
    assert found["requests_per_s"] == pytest.approx(2 / 5)
    assert found["slo_met"] == found["slo_met of <40,70>"] == found["refused"] == pytest.approx(1 / 3)
    # Half of the tokens of the first answer, and those of the second.
    assert found["decode_tokens_per_s"] == pytest.approx((5.5 + 11) / 5)
    assert found["ttft_ms_p50"] == pytest.approx((100 + 4000) / 2)
    assert (found["level"], found["reused"]) == (60, 0.25)
    assert "ttft_ms_p50" not in Window(1.0, 6.0, [refused]).figures()


def test_limits_are_shares_of_the_idle_whole_model():
    reference = Reference((50, 150), (20.0, 40.0), 5.0)
    assert reference.limits(REQUEST, 2.0) == pytest.approx((0.4 * 2 * 30, 0.7 * 2 * 5))
    assert reference.answer_s(REQUEST) == pytest.approx(0.03 + 10 * 0.005)
    assert "20.0 ms at 50" in reference.note


def test_rows_and_figures(tmp_path):
    cells = [
        Cell("m, load 1", system, [{"goodput_per_s": value, "ttft_ms_p95": 10 * value, "level": 80.0},
                                   {"goodput_per_s": value + 1, "slo_met of <40,70>": 0.5}])
        for system, value in (("jaxllm", 4.0), ("jaxllm-no-planning", 2.0))
    ]  # fmt: skip
    rows = load_rows(cells, objectives=True)
    found = {(row.case, row.system, row.metric): row for row in rows}
    ours = found["m, load 1", "jaxllm", "goodput_per_s"]
    assert (ours.value, ours.ratio, ours.baseline, ours.note) == (
        4.5, 4.5 / 2.5, "jaxllm-no-planning", "4 to 5",
    )  # fmt: skip
    slower = found["m, load 1, percentile 95", "jaxllm", "ttft_ms"]
    assert (slower.value, slower.ratio) == (40.0, 0.5)
    assert found["m, load 1, app <40,70>", "jaxllm", "slo_met"].value == 0.5
    assert found["m, load 1", "jaxllm", "level"].ratio is None
    clients = [Cell("m, 8 clients", "jaxllm", [{"decode_tokens_per_s": 9.0, "goodput_per_s": 1.0}])]
    (only,) = load_rows(clients, objectives=False)
    assert only.metric == "decode_tokens_per_s"
    (mine, *_, other) = memory_rows("m", {"jaxllm": [30, 10, 20], "llama-server": [10]}, {"jaxllm": 5 << 20})
    assert (mine.value, mine.ratio, other.system) == (20, 0.5, "llama-server")
    assert mine.note == "proportional share at the end 5 MB"
    kept = [Measured("m, load 1", "jaxllm", 0, Window(0.0, 6.0, [outcome()]))]
    draw([*rows, only], tmp_path, kept)
    assert {each.name for each in tmp_path.iterdir()} == {
        "service_goodput.png", "service_clients.png", "service_ttft.png",
    }  # fmt: skip
    write_outcomes(tmp_path / "outcomes.jsonl", kept)
    line = json.loads((tmp_path / "outcomes.jsonl").read_text())
    assert (line["system"], line["slo"], line["met"], line["repetition"]) == ("jaxllm", "<40,70>", True, 0)
