"""Logs: one object a line, the request that it belongs to, and nothing of what was said."""

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
import threading
import warnings

import pytest

from jaxllm import GenerationConfig
from jaxllm.serving.server import logs
from jaxllm.serving.server.calls import Call
from jaxllm.serving.server.logs import Served


def served(request_id, app):
    return Served(request_id, {"jaxllm.app": app})


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch):
    """Whose threads may run late."""
    monkeypatch.setattr(logs, "_FLUSH_S", 120.0)


@pytest.fixture
def lines():
    stream = io.StringIO()
    handler = logs.write_logs(stream)

    def written():
        handler.flush()
        return [json.loads(line) for line in stream.getvalue().splitlines()]

    yield written
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


def test_errors_and_warnings_are_lines_and_long_texts_have_an_end(lines):
    try:
        raise ValueError("x" * 50_000)
    except ValueError:
        logging.getLogger("jaxllm").exception("y" * 50_000)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("of a library", stacklevel=1)
    line, told = lines()
    assert (len(line["message"]), len(line["error"]), line["level"]) == (4000, 16_000, "error")
    assert (told["logger"], told["level"]) == ("py.warnings", "warning")
    assert "of a library" in told["message"]


def test_tasks_and_threads_name_the_calls_that_they_serve(lines):
    async def work(name):
        with logs.request(served(name, f"app of {name}")):
            await asyncio.sleep(0)
            logging.getLogger("serving").info("works")

    async def both():
        await asyncio.gather(work("r1"), work("r2"))

    asyncio.run(both())
    told = [(each["request_id"], each["app"]) for each in lines()]
    assert told == [("r1", "app of r1"), ("r2", "app of r2")]
    calls = [
        Call(app=app, request_id=name, prompt="my secret", config=GenerationConfig())
        for name, app in (("r1.a", "mail"), ("r1.b", "mail"), ("r2.a", "notes"))
    ]
    logging.getLogger("serving").error("failed", extra=logs.named(calls))
    line = lines()[-1]
    assert (line["request_id"], line["app"]) == ("r1.a r1.b r2.a", "mail notes")
    assert logs.named([]) == {}


def test_loggers_are_left_as_they_were():
    stream = io.StringIO()
    logs.stop_logs(logs.write_logs(stream))
    logging.getLogger("serving").info("to nobody")
    assert stream.getvalue() == ""
    assert logging.getLogger("serving").propagate


def test_nobody_waits_for_a_log_that_is_not_read():
    """A full pipe, as of a supervisor that has stopped: calls go on, and the reader learns what it missed."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as out, os.fdopen(writing, "w") as stream:
        handler = logs.write_logs(stream)
        handler._most_bytes = 64 << 10
        # Nobody reads yet: one that waited would wait for ever.
        for number in range(2000):
            logging.getLogger("serving").info("x" * 200, extra={"number": number})
        assert 0 < handler.dropped < 2000
        found = [json.loads(out.readline()) for _ in range(2)]
        reader = threading.Thread(target=lambda: found.extend(json.loads(line) for line in out))
        reader.start()
        logs.stop_logs(handler)
        stream.close()
        reader.join(20)
    missed = [each for each in found if "dropped" in each]
    written = [each["number"] for each in found if "number" in each]
    assert written == sorted(written)
    assert len(written) + sum(each["dropped"] for each in missed) == 2000
    assert "were dropped" in missed[0]["message"]


def test_a_log_that_is_never_read_does_not_stop_the_end():
    code = """
import logging, sys
from jaxllm.serving.server import logs
handler = logs.write_logs(sys.stderr)
for _ in range(1000):
    logging.getLogger("serving").info("x" * 1000)
logs.stop_logs(handler)
print("ends", flush=True)
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        try:
            assert process.wait(60) == 0
            assert process.communicate()[0] == "ends\n"
        finally:
            process.kill()


def test_a_reader_that_leaves_costs_its_lines_alone():
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        handler = logs.write_logs(stream)
        os.close(reading)
        logging.getLogger("serving").info("to nobody")
        logs.stop_logs(handler)
    assert handler.dropped == 1
