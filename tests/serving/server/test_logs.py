"""Logs: one object a line, the request that it belongs to, and nothing of what was said."""

import asyncio
import io
import json
import logging

import pytest

from serving.server import logs
from serving.server.logs import Access, AccessLog
from tests.serving.server.fake_service import ENDED, STARTED

ACCESS = Access(
    request_id="r1", app="mail", path="/v1/chat/completions", status=200, total_ms=812.44,
    started=STARTED, ended=ENDED, prompt="my secret", answer="your secret",
)  # fmt: skip


@pytest.fixture
def lines():
    stream = io.StringIO()
    handler = logs.write_logs(stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logs.stop_logs(handler)


def test_a_record_is_one_line(lines):
    with logs.request("r1", "mail"):
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
        with logs.request(name, f"app of {name}"):
            await asyncio.sleep(0)
            logging.getLogger("serving").info("works")

    async def both():
        await asyncio.gather(work("r1"), work("r2"))

    asyncio.run(both())
    assert [(each["request_id"], each["app"]) for each in lines()] == [
        ("r1", "app of r1"),
        ("r2", "app of r2"),
    ]


def test_an_access_record(lines):
    AccessLog().write(ACCESS)
    (line,) = lines()
    del line["time"]
    assert line == {
        "level": "info", "logger": "jaxllm.access", "message": "call", "request_id": "r1", "app": "mail",
        "path": "/v1/chat/completions", "status": 200, "outcome": "ended", "total_ms": 812.4,
        "level_percent": 70, "plan": "proposed", "prompt_tokens": 120, "kept_tokens": 96, "reused_tokens": 64,
        "queued_ms": 12.0, "finish_reason": "stop", "tokens": 21, "ttft_ms": 200.0, "tpot_ms": 30.0,
        "met": True,
    }  # fmt: skip


def test_what_was_said_is_written_only_where_asked(lines):
    AccessLog(texts=True).write(ACCESS)
    AccessLog(texts=True).write(
        Access(request_id="r2", app="", path="/v1/models", status=401, total_ms=1, outcome="KeyError")
    )
    said, refused = lines()
    assert (said["prompt"], said["answer"]) == ("my secret", "your secret")
    assert not {"prompt", "tokens", "level_percent"} & set(refused)


def test_loggers_are_left_as_they_were():
    stream = io.StringIO()
    logs.stop_logs(logs.write_logs(stream))
    logging.getLogger("serving").info("to nobody")
    assert stream.getvalue() == ""
    assert logging.getLogger("serving").propagate
