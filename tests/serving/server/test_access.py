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


def test_a_record_and_one_of_several_calls_of_which_one_was_cut_short(records):
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
    calls = (CallRecord(started=STARTED, tokens=5), CallRecord(tokens=2, outcome="NotFinite"))
    AccessLog().write(Access(served=served(*calls), method="POST", path="/", status=200, total_ms=1))
    told = fields(records()[1])
    assert (told["calls"], told["tokens"], told["outcome"]) == (2, 7, "NotFinite")
    assert "finish_reason" not in told


def test_outcomes(records):
    for status, outcome in ((200, "cancelled"), (429, "refused"), (499, "cancelled")):
        # A call that was cancelled: by its client, or because another of the request was refused.
        AccessLog().write(
            Access(served=served(CallRecord()), method="POST", path="/", status=status, total_ms=1)
        )
        assert fields(records()[-1])["outcome"] == outcome
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


def test_an_error_that_nobody_answers_is_told_and_raised(records):
    async def failing(scope, receive, send):
        assert current_request().request_id == scope["state"]["request_id"]
        raise OSError("secret")

    with pytest.raises(OSError, match="secret"):
        run(failing)
    assert (records()[0].outcome, records()[0].status) == ("OSError", 0)
    assert current_request() is None


def test_names_that_are_not_clean_are_replaced():
    name = (b"x-request-id", b"Mail-7.a_b")
    assert request_id_of({"headers": [name]}) == "Mail-7.a_b"
    assert request_id_of({"headers": [name, name]}) != "Mail-7.a_b"
    for given in (b"", b"a b", b"x" * 65, b"a\r\nb", "ä".encode(), b'a"b'):
        assert request_id_of({"headers": [(b"x-request-id", given)]}) != given.decode("latin-1")
