"""Tests when drafting is given up, and tried again."""

from serving.speculation.payoff import Payoff


def test_drafts_that_pay_go_on():
    payoff = Payoff()
    for _ in range(50):
        payoff.drafted(draft_ms=2, verify_ms=10, tokens=3)
        assert payoff.worthwhile


def test_drafts_that_cost_more_than_they_bring_pause_for_ever_longer():
    payoff, pauses = Payoff(), []
    for _ in range(4):
        rounds = 0
        while payoff.worthwhile:
            payoff.drafted(draft_ms=5, verify_ms=10, tokens=1)
            rounds += 1
        assert rounds == 3
        pause = 0
        while not payoff.worthwhile:
            payoff.plain(took_ms=10, tokens=1)
            pause += 1
        pauses.append(pause)
    assert pauses == [8, 16, 32, 64]


def test_what_plain_tokens_take_is_learnt():
    payoff = Payoff()
    # A tree takes far longer than a token, which is known only after one: two tokens a round are too few.
    for _ in range(3):
        payoff.drafted(draft_ms=0, verify_ms=10, tokens=2)
    assert payoff.worthwhile
    payoff.plain(took_ms=2, tokens=1)
    payoff.drafted(draft_ms=0, verify_ms=10, tokens=2)
    assert not payoff.worthwhile
