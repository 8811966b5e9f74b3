"""Outcomes judged by hand; their rows and figures."""

import json
import math

import pytest

from benchmarks.service.figures import draw
from benchmarks.service.intervals import BLOCK_CALLS, LEAST_BLOCKS, lead, said
from benchmarks.service.load import NOT_ANSWERED
from benchmarks.service.outcomes import Window, figures, judged
from benchmarks.service.reference import Reference
from benchmarks.service.rows import Cell, load_rows, memory_rows
from benchmarks.service.run import Measured, write_outcomes
from benchmarks.service.workload import Request

REQUEST = Request(app=3, prompt=tuple(range(16, 116)), answer_tokens=11)


def outcome(due_s=1.0, *, first_s: float | None = 1.1, last_s=2.1, tokens=11, limits=(150.0, 100.0), **more):
    raw = {
        "number": 0, "due_s": due_s, "sent_s": due_s + 0.001, "first_s": first_s, "last_s": last_s,
        "ended_s": last_s, "tokens": tokens, "status": 200, "error": None,
        "cached_tokens": None, "jaxllm": {"level": 60, "kept_tokens": 50, "reused_tokens": 25}, **more,
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
        ({"error": NOT_ANSWERED, "status": 0, "first_s": None}, "failed", False),
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
    found = figures([window])
    assert found["goodput_per_s"] == pytest.approx(1 / 5)
    assert found["requests_per_s"] == pytest.approx(2 / 5)
    assert found["slo_met"] == found["slo_met of <40,70>"] == found["refused"] == pytest.approx(1 / 3)
    # Half of the tokens of the first answer, and those of the second.
    assert found["decode_tokens_per_s"] == pytest.approx((5.5 + 11) / 5)
    assert found["ttft_ms_p50"] == pytest.approx((100 + 4000) / 2)
    assert (found["level"], found["kept"], found["reused"]) == (60, 0.5, 0.25)
    # A peer tells in the usage what its cache had.
    peer = figures([Window(1.0, 6.0, [outcome(jaxllm=None, cached_tokens=75)])])
    assert peer["reused"] == 0.75
    assert not {"level", "kept"} & set(peer)
    assert "ttft_ms_p50" not in figures([Window(1.0, 6.0, [refused])])
    # Repeated loads are judged together.
    again = figures([window, window])
    assert all(again[name] == pytest.approx(found[name]) for name in found if "_p" not in name)
    twice = figures([window, Window(1.0, 6.0, [refused])])
    assert twice["goodput_per_s"] == pytest.approx(1 / 10)
    assert twice["slo_met"] == pytest.approx(1 / 4)


def test_what_is_given_up_was_waited_for():
    """Else the percentiles of a server that answers few calls would be those of its quick answers."""
    slow = outcome(error=NOT_ANSWERED, status=200, first_s=None, ended_s=31.0)
    begun = outcome(error=NOT_ANSWERED, status=200, first_s=3.0, last_s=4.0, ended_s=31.0)
    assert (slow.ttft_ms, begun.ttft_ms) == (pytest.approx(30_000), pytest.approx(2000))
    assert not slow.met
    assert not begun.met
    assert outcome(error="broken in the middle").ttft_ms == 0
    found = figures([Window(0.0, 6.0, [outcome(), begun, slow])])
    assert found["ttft_ms_p50"] == pytest.approx(2000)
    assert found["failed"] == pytest.approx(2 / 3)


def windows(met, count=BLOCK_CALLS * LEAST_BLOCKS):
    """A load of two repetitions, one call a second, in time where `met` says so of its number."""
    half = count // 2
    return [
        Window(0.0, half, [
            outcome(due, first_s=due + (0.1 if met(run * half + due) else 0.2), last_s=due + 0.3)
            for due in range(half)
        ])
        for run in range(2)
    ]  # fmt: skip


def test_intervals_are_of_blocks_of_calls():
    every, none = windows(lambda _: True), windows(lambda _: False)
    assert said(every) == "95 % in [1, 1] of 50 calls"
    # Two of each block, whichever blocks are drawn.
    some = windows(lambda number: number % BLOCK_CALLS < 2)
    assert said(some) == "95 % in [0.4, 0.4] of 50 calls"
    assert lead(every, some) == "ours paired 95 % in [2.50x, 2.50x]"
    assert lead(every, none) == "ours paired 95 % in [infx, infx]"
    assert lead(none, none) == "ours paired 95 % in [1.00x, 1.00x]"
    # Blocks that differ make an interval around the share.
    half = windows(lambda number: number % (2 * BLOCK_CALLS) < BLOCK_CALLS)
    low, high = (float(each.strip("[],")) for each in (said(half) or "").split()[3:5])
    assert 0.1 < low < 0.5 < high < 0.9
    assert said(windows(lambda _: True, count=20)) is None
    assert lead(windows(lambda _: True, count=20), none) is None


def test_limits_are_shares_of_the_idle_whole_model():
    reference = Reference((50, 150), (20.0, 40.0), 5.0)
    assert reference.limits(REQUEST, 2.0) == pytest.approx((0.4 * 2 * 30, 0.7 * 2 * 5))
    assert reference.answer_s(REQUEST) == pytest.approx(0.03 + 10 * 0.005)
    assert "20.0 ms at 50" in reference.note


def test_rows_and_figures(tmp_path):
    missed = outcome(first_s=1.4, last_s=2.4)
    runs = {
        "jaxllm": ([outcome(), outcome()], [outcome(), missed]),
        "jaxllm-no-planning": ([missed] * 2, [outcome()] * 2),
    }
    cells = [
        Cell("m, load 1", system, [Window(0.0, 2.0, each) for each in outcomes])
        for system, outcomes in runs.items()
    ]
    rows = load_rows(cells, objectives=True)
    found = {(row.case, row.system, row.metric): row for row in rows}
    ours = found["m, load 1", "jaxllm", "goodput_per_s"]
    assert (ours.value, ours.ratio, ours.baseline, ours.note) == (
        0.75, 1.5, "jaxllm-no-planning", "runs 0.5 to 1",
    )  # fmt: skip
    quicker = found["m, load 1, percentile 50", "jaxllm", "ttft_ms"]
    assert (quicker.value, quicker.ratio) == pytest.approx((100, 2.5))
    assert found["m, load 1, app <40,70>", "jaxllm", "slo_met"].value == 0.75
    assert found["m, load 1", "jaxllm", "level"].ratio is None
    # Intervals where there are enough calls.
    many = [
        Cell("m, load 1", system, windows(lambda number, every=every: number % every == 0))
        for system, every in (("jaxllm", 1), ("jaxllm-no-planning", BLOCK_CALLS))
    ]
    notes = {
        row.system: row.note for row in load_rows(many, objectives=True) if row.metric == "goodput_per_s"
    }
    assert notes == {
        "jaxllm": "95 % in [1, 1] of 50 calls; runs 1 to 1",
        "jaxllm-no-planning": "95 % in [0.2, 0.2] of 50 calls; ours paired 95 % in [5.00x, 5.00x]; "
        "runs 0.2 to 0.2",
    }
    clients = load_rows([Cell("m, 8 clients", "jaxllm", [Window(0.0, 2.0, [outcome()])])], objectives=False)
    assert not {"goodput_per_s", "slo_met"} & {row.metric for row in clients}
    (only,) = (row for row in clients if row.metric == "decode_tokens_per_s")
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
