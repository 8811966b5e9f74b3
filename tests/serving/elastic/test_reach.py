"""Tests the report of objectives that cannot be met."""

import pytest

from jaxllm.elastic.slo import SLOS, Slo
from jaxllm.serving.elastic.objectives import Latency
from jaxllm.serving.elastic.reach import described, unmet

PROFILED = (16, 64, 512)


class Knows:
    """A planner that misses what it is told to."""

    def __init__(self, missed):
        self.missed, self.answers = missed, set()

    def lengths_missed(self, objective, *, answer_tokens):
        self.answers.add(answer_tokens)
        return self.missed.get(objective, ())


def test_only_what_is_missed_somewhere_is_told():
    planner = Knows({SLOS[3]: (16,), SLOS[5]: PROFILED})
    assert unmet(planner) == {SLOS[3]: (16,), SLOS[5]: PROFILED}
    assert unmet(planner, [SLOS[0], SLOS[3]], answer_tokens=7) == {SLOS[3]: (16,)}
    assert 7 in planner.answers


@pytest.mark.parametrize(
    ("missed", "words"),
    [
        ((16,), "up to 16 tokens"),
        ((16, 64), "up to 64 tokens"),
        (PROFILED, "any length"),
        ((512,), "512 tokens and more"),
        ((64,), "64 tokens"),
        ((16, 512), "16, 512 tokens"),
    ],
)
def test_lengths_in_words(missed, words):
    assert described({Slo(ttft=0.4, tpot=0.7): missed}, PROFILED) == f"<40,70> for prompts of {words}"


def test_several_and_none():
    told = described({SLOS[5]: PROFILED, Latency(ttft_ms=1, tpot_ms=2): (16,)}, PROFILED)
    assert told == (
        "<20,50> for prompts of any length; 1 ms to the first token, 2 ms per token for prompts of up to 16 "
        "tokens"
    )
    assert described({}, PROFILED) == ""
