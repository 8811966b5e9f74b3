"""Tests when drafting is given up, and tried again."""

from jaxllm.serving.speculation.payoff import Payoff


def tried(payoff, *, draft_ms, verify_ms, tokens, plain_ms):
    """The first passes, and the plain tokens that are tried after them."""
    passes = 0
    while payoff.worthwhile:
        payoff.drafted(draft_ms=draft_ms, verify_ms=verify_ms, tokens=tokens)
        passes += 1
    assert passes == 3
    assert payoff.pays is None
    assert payoff.paused_tokens == 4
    payoff.plain(took_ms=4 * plain_ms, tokens=4)
    assert payoff.worthwhile


def test_drafts_that_pay_go_on():
    payoff = Payoff()
    tried(payoff, draft_ms=2, verify_ms=10, tokens=3, plain_ms=9)
    assert payoff.pays
    assert payoff.rate == 250
    for _ in range(50):
        payoff.drafted(draft_ms=2, verify_ms=10, tokens=3)
        assert payoff.worthwhile


def test_fewer_plain_tokens_are_tried_where_each_takes_long():
    tried = []
    for verify_ms in (5, 15, 30, 140):
        payoff = Payoff()
        while payoff.worthwhile:
            payoff.drafted(draft_ms=20, verify_ms=verify_ms, tokens=9)
        tried.append(payoff.paused_tokens)
    assert tried == [4, 2, 1, 1]


def test_drafts_that_cost_more_than_they_bring_pause_for_ever_longer():
    payoff, pauses = Payoff(), []
    tried(payoff, draft_ms=5, verify_ms=10, tokens=1, plain_ms=10)
    for turn in range(4):
        rounds = 0
        while payoff.worthwhile:
            payoff.drafted(draft_ms=5, verify_ms=10, tokens=1)
            rounds += 1
        # The first decision follows the passes that were there.
        assert rounds == (3 if turn else 1)
        assert not payoff.pays
        pause = 0
        while not payoff.worthwhile:
            payoff.plain(took_ms=10, tokens=1)
            pause += 1
        pauses.append(pause)
    assert pauses == [8, 16, 32, 64]
    assert payoff.rate == 100


def test_plain_tokens_never_take_longer_than_verifications():
    payoff = Payoff()
    # A stall made plain tokens look slow.
    tried(payoff, draft_ms=8, verify_ms=10, tokens=1, plain_ms=50)
    payoff.drafted(draft_ms=8, verify_ms=10, tokens=1)
    assert not payoff.worthwhile
