"""Logs: one object a line, the request that it belongs to, and nothing of what was said."""

import asyncio
import io
import json
import logging

import pytest

from jaxllm import GenerationConfig
from serving.server import logs
from serving.server.calls import Call
from serving.server.logs import Served


def served(request_id, app):
    return Served(request_id, {"jaxllm.app": app})


@pytest.fixture
def lines():
    stream = io.StringIO()
    handler = logs.write_logs(stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logs.stop_logs(handler)


def test_a_record_is_one_line(lines):
    with logs.request(served("r1", "mail")):
        logging.getLogger("serving.x").warning(
            "a\nforged: %s\x1b[0m\u2028", "b", extra={"chunks": 3, "time": 0}
        )
    logging.getLogger("jaxllm").info("later")
    logging.getLogger("jaxllm").debug("not written")
    first, second = lines()
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "warning", "logger": "serving.x", "message": "a\nforged: b\x1b[0m\u2028", "request_id": "r1",
        "app": "mail", "chunks": 3,
    }  # fmt: skip
    assert (second["message"], "request_id" in second) == ("later", False)


def test_errors_have_their_traceback_and_long_texts_an_end(lines):
    try:
        raise ValueError("x" * 50_000)
    except ValueError:
        logging.getLogger("jaxllm").exception("y" * 50_000)
    (line,) = lines()
    assert len(line["message"]) == 4000
    assert len(line["error"]) == 16_000
    assert lines()[0]["level"] == "error"


def test_tasks_have_each_their_request(lines):
    async def work(name):
        with logs.request(served(name, f"app of {name}")):
            await asyncio.sleep(0)
            logging.getLogger("serving").info("works")

    async def both():
        await asyncio.gather(work("r1"), work("r2"))

    asyncio.run(both())
    assert [(each["request_id"], each["app"]) for each in lines()] == [
        ("r1", "app of r1"),
        ("r2", "app of r2"),
    ]


def test_a_thread_names_the_calls_that_it_serves(lines):
    calls = [
        Call(app=app, request_id=name, prompt="my secret", config=GenerationConfig())
        for name, app in (("r1.a", "mail"), ("r1.b", "mail"), ("r2.a", "notes"))
    ]
    logging.getLogger("serving").error("failed", extra=logs.named(calls))
    (line,) = lines()
    assert (line["request_id"], line["app"]) == ("r1.a r1.b r2.a", "mail notes")
    assert logs.named([]) == {}


def test_loggers_are_left_as_they_were():
    stream = io.StringIO()
    logs.stop_logs(logs.write_logs(stream))
    logging.getLogger("serving").info("to nobody")
    assert stream.getvalue() == ""
    assert logging.getLogger("serving").propagate
