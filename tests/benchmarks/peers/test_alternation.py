"""The alternate, with children whose times are written down."""

import pytest

from benchmarks.peers import alternation
from benchmarks.peers.alternation import System, alternate, prompt_ids


class Scripted:
    """A child that takes the given (prefill_ms, decode_ms) per setting; 1000 when disturbed."""

    def __init__(self, times, disturbed=(), log=None, name=""):
        self.times, self._disturbed = times, list(disturbed)
        self.disturbed = False
        self.log, self.name = [] if log is None else log, name

    def answer(self, prompt, tokens, setting, *, repeats):
        self.disturbed = bool(self._disturbed) and self._disturbed.pop(0)
        self.log.append((self.name, len(prompt), setting))
        prefill, decode = self.times[setting]
        if self.disturbed:
            prefill, decode = 1000.0, 1000.0
        return {"prefill_ms": prefill * len(prompt), "decode_ms": decode * tokens, "ids": []}

    def wait_until_asleep(self):
        pass


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(alternation, "wait_for_quiet", lambda: None)


def run(*systems, prompts=((0,) * 10,), rounds=3, patience_s=60.0):
    return alternate(
        systems, prompts, decode_tokens=4, rounds=rounds, patience_s=patience_s, progress=lambda *_: None
    )


def test_each_phase_keeps_its_fastest_setting():
    child = Scripted({"x": (10.0, 30.0), "y": (20.0, 25.0)})
    result = run(System("peer", child, ("x", "y")))["peer", 10]
    assert (result.prefill_ms, result.prefill_setting) == (100.0, "x")
    assert (result.decode_ms, result.decode_setting) == (100.0, "y")


def test_a_setting_without_a_choice_is_not_mentioned():
    result = run(System("ours", Scripted({"x": (1.0, 1.0)}), ("x",)))["ours", 10]
    assert (result.prefill_setting, result.decode_setting) == (None, None)
    assert (result.samples, result.disturbed) == (3, 0)


def test_systems_alternate_within_each_round_and_prompt():
    log = []
    a, b = (Scripted({"x": (200.0, 1.0)}, log=log, name=name) for name in "ab")
    run(System("a", a, ("x",)), System("b", b, ("x",)), prompts=((0,) * 10, (0,) * 20), rounds=2)
    timed = [(name, tokens) for name, tokens, _ in log[-8:]]
    first = [("b", 10), ("a", 10), ("b", 20), ("a", 20)]
    assert timed == [*first, ("a", 10), ("b", 10), ("a", 20), ("b", 20)]


def test_a_disturbed_sample_is_taken_again():
    # Two answers of the first round are disturbed, and two of the timed ones.
    child = Scripted({"x": (1.0, 1.0)}, [True, False, True, False, True, True, False])
    result = run(System("peer", child, ("x",)))["peer", 10]
    assert (result.prefill_ms, result.disturbed) == (10.0, 0)


def test_without_patience_disturbed_samples_stay_and_are_counted():
    child = Scripted({"x": (1.0, 1.0)}, [True] * 100)
    result = run(System("peer", child, ("x",)), patience_s=0.0)["peer", 10]
    assert (result.disturbed, result.samples) == (3, 3)
    # One clean sample says more than two disturbed ones.
    child = Scripted({"x": (1.0, 1.0)}, [True, True, True, False, True])
    result = run(System("peer", child, ("x",)), patience_s=0.0)["peer", 10]
    assert (result.prefill_ms, result.disturbed, result.samples) == (10.0, 0, 1)


def test_prompts_are_the_same_at_every_run_and_in_range():
    assert prompt_ids(50, 8) == prompt_ids(50, 8)
    assert prompt_ids(50, 200)[:8] == prompt_ids(50, 8)
    assert set(prompt_ids(50, 2000)) == set(range(50))


def test_memory_is_measured_before_and_after_each_sample():
    speeds = iter([10.0, 30.0, 50.0, 70.0])
    result = alternate(
        [System("ours", Scripted({"x": (1.0, 500.0)}), ("x",))], [[0] * 10],
        decode_tokens=4, rounds=2, patience_s=0.0, progress=lambda *_: None, bytes_per_s=lambda: next(speeds),
    )["ours", 10]  # fmt: skip
    # Two seconds at 20 bytes a second, and at 60.
    assert result.readable_bytes == pytest.approx((40 + 120) / 2)
    with pytest.raises(StopIteration):
        next(speeds)
