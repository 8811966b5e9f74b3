"""Access records: every request has one, with its calls, its end and its name. Logs: one object a line, with
the request that it belongs to. Neither has anything of what was said."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from types import SimpleNamespace

import pytest

from jaxllm import GenerationConfig
from jaxllm.serving.server import logs
from jaxllm.serving.server.calls import Call
from jaxllm.serving.server.logs import (
    AccessLogged,
    Served,
    access_record,
    current_request,
    request_id_of,
)
from tests.serving.server.fake_figures import ENDED, STARTED


@pytest.fixture
def records(caplog):
    caplog.set_level(logging.INFO)
    return lambda: caplog.records


def served(*calls, app="mail"):
    made = Served("r1", {"jaxllm.app": app})
    made.calls += calls
    return made


def fields(record):
    known = vars(logging.makeLogRecord({}))
    return {name: value for name, value in vars(record).items() if name not in (*known, "message")}


def run(app, *, path="/v1/models", headers=(), **scope):
    """The messages that an app sends to a request."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.disconnect"}

    own = {"type": "http", "method": "GET", "path": path, "headers": list(headers), **scope}
    asyncio.run(AccessLogged(app)(own, receive, send))
    return sent


def answering(status, **more):
    async def app(scope, receive, send):
        scope.update(more)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return app


def job(outcome="cancelled", tokens=0, started=None, ended=None):
    return SimpleNamespace(outcome=outcome, read_tokens=tokens, started=started, ended=ended)


def record_of(*calls, path="/", status=200, total_ms=1.0):
    return access_record(served(*calls), method="POST", path=path, status=status, total_ms=total_ms)


def test_a_record_and_one_of_several_calls_of_which_one_was_cut_short():
    whole = record_of(job("ended", 21, STARTED, ENDED), path="/v1/completions", total_ms=812.44)
    assert whole == {
        "request_id": "r1", "app": "mail", "method": "POST", "path": "/v1/completions", "status": 200,
        "outcome": "ended", "total_ms": 812.4, "tokens": 21, "level_percent": 70, "plan": "proposed",
        "prompt_tokens": 120, "kept_tokens": 96, "reused_tokens": 64, "queued_ms": 12.0,
        "finish_reason": "stop", "ttft_ms": 200.0, "tpot_ms": 30.0, "met": True,
    }  # fmt: skip
    told = record_of(job(tokens=5, started=STARTED), job("NotFinite", 2))
    assert (told["calls"], told["tokens"], told["outcome"]) == (2, 7, "NotFinite")
    assert "finish_reason" not in told


def test_outcomes(records):
    for status, outcome in ((200, "cancelled"), (429, "refused"), (499, "cancelled")):
        # A call that was cancelled: by its client, or because another of the request was refused.
        assert record_of(job(), status=status)["outcome"] == outcome
    ends = {200: "ended", 404: "refused", 503: "refused", 500: "failed", 499: "cancelled"}
    for status, outcome in ends.items():
        # A request without calls.
        sent = run(answering(status, **{"jaxllm.app": "notes"}))
        told = fields(records()[-1])
        assert (told["status"], told["outcome"], told["app"]) == (status, outcome, "notes")
        assert (b"x-request-id", told["request_id"].encode()) in sent[0]["headers"]


def test_probes_are_told_to_who_debugs_and_what_clients_choose_in_paths_to_nobody(records, caplog):
    run(answering(200, path_params={"name": "my diary"}), path="/v1/contexts/my diary/pin")
    run(answering(404), path="/" + 999 * "x")
    assert [each.path for each in records()] == ["/v1/contexts/{name}/pin", "/" + 199 * "x"]
    for path in ("/health", "/ready", "/metrics"):
        run(answering(200), path=path)
    assert [each.path for each in records()[2:]] == ["/metrics"]
    caplog.set_level(logging.DEBUG)
    run(answering(503), path="/ready")
    assert records()[-1].status == 503


def test_an_error_is_answered_and_raised_where_the_answer_has_begun(records):
    begins = False

    async def failing(scope, receive, send):
        assert current_request().request_id == scope["state"]["request_id"]
        if begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise OSError("secret")

    start, body = run(failing)
    assert (start["status"], b"secret" in body["body"]) == (500, False)
    assert (records()[-1].outcome, records()[-1].status) == ("failed", 500)
    begins = True
    with pytest.raises(OSError, match="secret"):
        run(failing)
    assert (records()[-1].outcome, records()[-1].status) == ("OSError", 200)
    assert current_request() is None


def test_names_that_are_not_clean_are_replaced():
    name = (b"x-request-id", b"Mail-7.a_b")
    assert request_id_of({"headers": [name]}) == "Mail-7.a_b"
    assert request_id_of({"headers": [name, name]}) != "Mail-7.a_b"
    for given in (b"", b"a b", b"x" * 65, b"a\r\nb", "ä".encode(), b'a"b'):
        assert request_id_of({"headers": [(b"x-request-id", given)]}) != given.decode("latin-1")


def request_of(request_id, app):
    return Served(request_id, {"jaxllm.app": app})


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch):
    """Whose threads may run late."""
    monkeypatch.setattr(logs, "_FLUSH_S", 120.0)


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "log"
    with path.open("w") as stream, logs.writing_logs(stream) as handler:

        def written():
            handler.flush()
            return [json.loads(line) for line in path.read_text().splitlines()]

        yield written


def test_a_record_is_one_line(lines):
    with logs.request(request_of("r1", "mail")):
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
        with logs.request(request_of(name, f"app of {name}")):
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


def test_loggers_are_left_as_they_were(tmp_path):
    path = tmp_path / "log"
    with path.open("w") as stream:
        with logs.writing_logs(stream):
            pass
        logging.getLogger("serving").info("to nobody")
    assert path.read_text() == ""
    assert logging.getLogger("serving").propagate


def test_nobody_waits_for_a_log_that_is_not_read():
    """A full pipe, as of a supervisor that has stopped: calls go on, and the reader learns what it missed."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as out, os.fdopen(writing, "w") as stream:
        with logs.writing_logs(stream) as handler:
            handler._most_bytes = 64 << 10
            # Nobody reads yet: one that waited would wait for ever.
            for number in range(2000):
                logging.getLogger("serving").info("x" * 200, extra={"number": number})
            assert 0 < handler.dropped < 2000
            found = [json.loads(out.readline()) for _ in range(2)]
            reader = threading.Thread(target=lambda: found.extend(json.loads(line) for line in out))
            reader.start()
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
with logs.writing_logs(sys.stderr):
    for _ in range(1000):
        logging.getLogger("serving").info("x" * 1000)
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
    with os.fdopen(writing, "w") as stream, logs.writing_logs(stream) as handler:
        os.close(reading)
        logging.getLogger("serving").info("to nobody")
    assert handler.dropped == 1
