"""When drafting is given up, and tried again."""

from serving.speculative.thrift import Thrift


def test_drafts_that_pay_go_on():
    thrift = Thrift()
    for _ in range(50):
        thrift.drafted(draft_ms=2, verify_ms=10, tokens=3)
        assert thrift.worthwhile


def test_drafts_that_cost_more_than_they_bring_pause_for_ever_longer():
    thrift, pauses = Thrift(), []
    for _ in range(4):
        rounds = 0
        while thrift.worthwhile:
            thrift.drafted(draft_ms=5, verify_ms=10, tokens=1)
            rounds += 1
        assert rounds == 3
        pause = 0
        while not thrift.worthwhile:
            thrift.plain(took_ms=10, tokens=1)
            pause += 1
        pauses.append(pause)
    assert pauses == [8, 16, 32, 64]


def test_what_plain_tokens_take_is_learnt():
    thrift = Thrift()
    # A tree takes far longer than a token, which is known only after one: two tokens a round are too few.
    for _ in range(3):
        thrift.drafted(draft_ms=0, verify_ms=10, tokens=2)
    assert thrift.worthwhile
    thrift.plain(took_ms=2, tokens=1)
    thrift.drafted(draft_ms=0, verify_ms=10, tokens=2)
    assert not thrift.worthwhile
