"""Work for contexts begins when no call has come for a while, and ends where it fails."""

from serving.server.idle_contexts import ContextIdleWork, InOrder


class Contexts:
    def __init__(self, left):
        self.left = left

    def idle(self):
        if self.left is None:
            raise ValueError("bug")
        self.left -= 1
        return self.left >= 0


def test_it_waits_for_quiet():
    now, contexts = [0.0], Contexts(2)
    work = ContextIdleWork(contexts, quiet_s=1.0, clock=lambda: now[0])
    assert not work.step()
    now[0] = 1.0
    assert work.step()
    work.interrupt()
    assert not work.step()
    now[0] = 2.0
    assert work.step()
    assert not work.step()


def test_answers_go_on_where_it_fails(caplog):
    work = ContextIdleWork(Contexts(None), quiet_s=0.0)
    assert not work.step()
    assert "bug" in caplog.text
    assert not work.step()
    assert len(caplog.records) == 1


def test_kinds_of_work_go_in_order():
    first, second = Contexts(1), Contexts(1)
    work = InOrder(*(ContextIdleWork(each, quiet_s=0.0) for each in (first, second)))
    assert (work.step(), first.left, second.left) == (True, 0, 1)
    assert (work.step(), second.left) == (True, 0)
    assert not work.step()
    work.interrupt()
