"""Writes run in order, in their own thread; who needs one waits for that one alone."""

import threading

import pytest

from jaxllm.serving.contexts.background import WriteQueue


@pytest.fixture
def queue():
    made = WriteQueue(most=2)
    made.start()
    yield made
    made.close()


class Held:
    """A job that runs until it is let go."""

    def __init__(self):
        self.began, self.free = threading.Event(), threading.Event()

    def __call__(self):
        self.began.set()
        assert self.free.wait(30)


def test_too_many_wait_for_room(queue):
    held, taken = Held(), []
    queue.put("a", held, None)
    assert held.began.wait(30)

    def more():
        for number in range(3):
            queue.put("b", lambda: None, number)
            taken.append(number)

    other = threading.Thread(target=more)
    other.start()
    while len(taken) < 2:
        other.join(0.01)
    other.join(0.05)
    assert taken == [0, 1]
    held.free.set()
    other.join()
    assert taken == [0, 1, 2]


def test_a_signal_that_an_interrupt_took_is_given_again(queue):
    done = []
    queue._jobs.append(("a", lambda: done.append(1), None))
    queue.wait("a")
    assert done == [1]


def test_an_error_ends_one_job_alone(queue, caplog):
    done = []
    queue.put("a", lambda: 1 / 0, None)
    queue.put("a", lambda: done.append(queue.wait()), None)
    queue.wait("a")
    # A job waits for none: it would wait for itself.
    assert done == [None]
    assert "a job of the context a failed" in caplog.text


def test_what_never_started_waits_for_nothing():
    made = WriteQueue()
    made.wait()
    made.close()
