"""Access records: every request has one, with its calls, its end and its name, and no text."""

import asyncio
import logging

import pytest

from jaxllm.serving.server.logs import (
    Access,
    AccessLog,
    AccessLogged,
    CallRecord,
    Served,
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


def test_a_record(records):
    call = CallRecord(started=STARTED, ended=ENDED, tokens=21, outcome="ended")
    AccessLog().write(
        Access(served=served(call), method="POST", path="/v1/completions", status=200, total_ms=812.44)
    )
    assert fields(records()[0]) == {
        "request_id": "r1", "app": "mail", "method": "POST", "path": "/v1/completions", "status": 200,
        "outcome": "ended", "total_ms": 812.4, "tokens": 21, "level_percent": 70, "plan": "proposed",
        "prompt_tokens": 120, "kept_tokens": 96, "reused_tokens": 64, "queued_ms": 12.0,
        "finish_reason": "stop", "ttft_ms": 200.0, "tpot_ms": 30.0, "met": True,
    }  # fmt: skip


def test_several_calls_and_one_that_was_cut_short(records):
    calls = (CallRecord(started=STARTED, tokens=5), CallRecord(tokens=2, outcome="NotFinite"))
    AccessLog().write(Access(served=served(*calls), method="POST", path="/", status=200, total_ms=1))
    told = fields(records()[0])
    assert (told["calls"], told["tokens"]) == (2, 7)
    assert told["outcome"] == "NotFinite"
    assert "finish_reason" not in told


@pytest.mark.parametrize(("status", "outcome"), [(200, "cancelled"), (429, "refused"), (499, "cancelled")])
def test_a_call_that_was_cancelled(records, status, outcome):
    """By its client, or because another of the request was refused."""
    AccessLog().write(Access(served=served(CallRecord()), method="POST", path="/", status=status, total_ms=1))
    assert fields(records()[0])["outcome"] == outcome


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(200, "ended"), (404, "refused"), (503, "refused"), (500, "failed"), (499, "cancelled")],
)
def test_requests_without_calls(records, status, outcome):
    sent = run(answering(status, **{"jaxllm.app": "notes"}))
    told = fields(records()[0])
    assert (told["status"], told["outcome"], told["app"]) == (status, outcome, "notes")
    assert (b"x-request-id", told["request_id"].encode()) in sent[0]["headers"]


def test_probes_are_told_to_who_debugs(records, caplog):
    for path in ("/health", "/ready", "/metrics"):
        run(answering(200), path=path)
    assert [each.path for each in records()] == ["/metrics"]
    caplog.set_level(logging.DEBUG)
    run(answering(503), path="/ready")
    assert records()[-1].status == 503


def test_parts_of_a_path_that_clients_choose_are_not_told(records):
    run(answering(200, path_params={"name": "my diary"}), path="/v1/contexts/my diary/pin")
    run(answering(404), path="/" + 999 * "x")
    assert [each.path for each in records()] == ["/v1/contexts/{name}/pin", "/" + 199 * "x"]


def test_an_error_that_nobody_answers_is_told_and_raised(records):
    async def failing(scope, receive, send):
        assert current_request().request_id == scope["state"]["request_id"]
        raise OSError("secret")

    with pytest.raises(OSError, match="secret"):
        run(failing)
    assert (records()[0].outcome, records()[0].status) == ("OSError", 0)
    assert current_request() is None


@pytest.mark.parametrize("given", [b"", b"a b", b"x" * 65, b"a\r\nb", "ä".encode(), b'a"b'])
def test_names_that_are_not_clean_are_replaced(given):
    assert request_id_of({"headers": [(b"x-request-id", given)]}) != given.decode("latin-1")


def test_a_clean_name_is_kept():
    name = (b"x-request-id", b"Mail-7.a_b")
    assert request_id_of({"headers": [name]}) == "Mail-7.a_b"
    assert request_id_of({"headers": [name, name]}) != "Mail-7.a_b"
