"""Work in the engine's thread beside answers: in order, bounded for each app, told of its errors."""

import threading
import time

import pytest

from jaxllm.errors import ConfigError
from jaxllm.serving.server.calls import Refused
from jaxllm.serving.server.executor import EngineWork


def failing():
    raise ConfigError("no")


def test_functions_run_in_order_and_tell_their_errors_and_long_ones_alone():
    work, done = EngineWork(), []
    first = work.add("a", lambda: done.append(1) or threading.get_ident())
    second = work.add("b", failing)
    left = work.add("b", lambda: done.append(3))
    assert left.cancel()
    while len(work):
        took_ms = work.run()
        assert set(took_ms) <= {"a", "b"}
    assert first.result(0) == threading.get_ident()
    with pytest.raises(ConfigError, match="no"):
        second.result(0)
    assert done == [1]
    # One that takes long is the only one of its turn.
    for app in ("a", "b"):
        work.add(app, lambda: time.sleep(0.03))
    assert [*work.run()] == ["a"]
    assert [*work.run()] == ["b"]
    assert work.run() == {}


def test_an_app_has_a_bounded_number_waiting():
    work = EngineWork()
    futures = [work.add("a", lambda: 1) for _ in range(16)]
    with pytest.raises(Refused, match="16 requests"):
        work.add("a", lambda: 1)
    futures.append(work.add("b", lambda: 1))
    work.fail(Refused("stopping", reason="draining"))
    for each in futures:
        with pytest.raises(Refused, match="stopping"):
            each.result(0)
    assert not len(work)
