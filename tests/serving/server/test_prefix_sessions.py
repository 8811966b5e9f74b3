"""Tests which session a prompt goes on with, and what is copied of it."""

import threading

import numpy as np
import pytest

from jaxllm.serving.engine.request import Session
from jaxllm.serving.server.memory import PrefixSessions

SIZE = 100
SYSTEM = tuple(range(40))


class Runner:
    """Copies arrays of bytes."""

    lock = threading.RLock()

    def __init__(self, level=100):
        self.weights_version, self.forked = (level, 0), []

    def fork(self, cache, tokens):
        self.forked.append(tokens)
        return cache.copy()


@pytest.fixture
def runner():
    return Runner()


def chat(*tokens, size=SIZE):
    cache = np.zeros(size, np.uint8)
    return Session(list(tokens), cache, (100, 0))  # pyright: ignore[reportArgumentType]


def prompt(first, count=30):
    return (*SYSTEM, *range(first, first + count))


def test_a_conversation_that_goes_on_takes_its_session(runner):
    sessions, own = PrefixSessions(10 * SIZE), chat(*prompt(100))
    sessions.keep("mail", "", own)
    assert sessions.take("mail", "", (*prompt(100), 7), runner) is own
    assert (len(sessions), sessions.size_bytes, runner.forked) == (0, 0, [])
    # Also where its last tokens came back as others.
    sessions.keep("mail", "", own)
    assert sessions.take("mail", "", (*prompt(100, 20), 7, 8), runner) is own
    # Another conversation gets a copy of what both have.
    sessions.keep("mail", "", own)
    copied = sessions.take("mail", "", prompt(200), runner)
    assert (copied.tokens, copied.weights_version) == ([*SYSTEM], (100, 0))
    assert copied.cache is not own.cache
    assert (len(sessions), runner.forked) == (1, [len(SYSTEM)])
    assert sessions.take("mail", "", (*prompt(100), 7), runner) is own


def test_the_longest_prefix_is_taken_and_of_equal_ones_the_keys(runner):
    sessions = PrefixSessions(10 * SIZE)
    for key, first in (("a", 100), ("b", 200), ("c", 300)):
        sessions.keep("mail", key, chat(*prompt(first)))
    long = sessions.take("mail", "a", (*prompt(200, 5), 7), runner)
    assert long.tokens == [*prompt(200, 5)]
    # All three have the instruction; what was copied from last stays the longest.
    assert sessions.take("mail", "a", prompt(400), runner).tokens == [*SYSTEM]
    sessions.resize(SIZE)
    assert sessions.take("mail", "", (*prompt(100), 7), runner).tokens == [*prompt(100)]


def test_no_session_is_of_use_to_another_app_or_level(runner):
    sessions = PrefixSessions(10 * SIZE)
    sessions.keep("mail", "", chat(*prompt(100)))
    for mine in (prompt(100), prompt(200)):
        assert sessions.take("spy", "", mine, runner).cache is None
        assert sessions.take("mail", "", mine, Runner(50)).cache is None
    assert runner.forked == []
    # Too little in common is computed.
    assert sessions.take("mail", "", (*SYSTEM[:15], 7), runner).cache is None
    assert sessions.take("mail", "", (*SYSTEM[:16], 7), runner).tokens == [*SYSTEM[:16]]


def test_what_would_be_found_is_told_by_weights(runner):
    sessions = PrefixSessions(10 * SIZE)
    for tokens, level in ((prompt(100), 100), (prompt(200), 100), (prompt(100, 8), 50)):
        each = chat(*tokens)
        each.weights_version = (level, 0)
        sessions.keep("mail", "", each)
    asked = (*prompt(100), 7)
    found = sessions.reusable("mail", asked)
    assert found == {(100, 0): len(prompt(100)), (50, 0): len(SYSTEM) + 8}
    assert (sessions.reusable("news", asked), sessions.reusable("mail", tuple(range(500, 540)))) == ({}, {})
    for level in (100, 50):
        taken = sessions.take("mail", "", asked, Runner(level))
        assert len(taken.tokens) == found[level, 0]


def test_what_another_session_has_all_of_is_not_kept_twice(runner):
    sessions = PrefixSessions(10 * SIZE)
    sessions.keep("mail", "", chat(*prompt(100)))
    sessions.keep("spy", "", chat(*prompt(100)))
    for tokens in (30, 31):
        sessions.keep("mail", "", chat(*prompt(100, tokens)))
    assert len(sessions) == 2


def test_an_app_gives_up_its_own_prefixes_before_others(runner):
    sessions = PrefixSessions(450, lambda app: 250 if app == "small" else 0)
    sessions.keep("mail", "", chat(*range(20)))
    for first in (100, 200, 300):
        sessions.keep("small", "", chat(*range(first, first + 20)))
    assert (len(sessions), sessions.size_bytes) == (3, 300)
    assert sessions.take("small", "", tuple(range(100, 120)), runner).cache is None
    sessions.keep("small", "", chat(*range(400, 420), size=251))
    assert len(sessions) == 3
    for first in (500, 600):
        sessions.keep("mail", "", chat(*range(first, first + 20)))
    # Beyond the limit of all, the least recently used goes, whoever's it is.
    assert sessions.take("mail", "", tuple(range(20)), runner).cache is None
    assert sessions.size_bytes == 400
    sessions.resize(0)
    assert (len(sessions), sessions.size_bytes) == (0, 0)
