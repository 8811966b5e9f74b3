"""Metrics: what is counted comes out, labels are bounded, and figures that are missing are no error. The page
that reads them: who may, and what it never does. Access records: every request has one, with its calls, its
end and its name. Logs: one object a line, with the request that it belongs to, and nothing that was said."""

import asyncio
import contextlib
import dataclasses
import html
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from jaxllm.serving.server import logs
from jaxllm.serving.server import metrics as metrics_of
from jaxllm.serving.server.api.errors import ApiError, api_error, error_response, openai_body
from jaxllm.serving.server.calls import Scored
from jaxllm.serving.server.job import Dispatch
from jaxllm.serving.server.logs import (
    AccessLogged,
    Served,
    access_record,
    request_id_of,
)
from jaxllm.serving.server.metrics import Metrics, metric_routes
from jaxllm.serving.server.pages import FILES, FOLDER, POLICY
from tests.serving.server.services import ENDED, FIGURES, STARTED, running


def values(metrics):
    """Sample name and labels -> value."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def used(snapshot=dict):
    """Metrics of a service that one call has used, and others that did not end well."""
    metrics = Metrics(snapshot)
    metrics.count("calls_accepted", "mail")
    metrics.report(STARTED, "mail")
    metrics.report(Dispatch(kind="decode", rows=3, took_ms=40.0, tokens=12))
    metrics.report(Dispatch(kind="prefill", rows=1, took_ms=9.0, chunk_tokens=64, mode="int8"))
    metrics.report(ENDED, "mail")
    metrics.count("calls_refused", "mail", "full")
    metrics.count("calls_failed", "mail", "ContextGone")
    metrics.count("calls_cancelled", "mail")
    metrics.report(Scored(9), "mail")
    metrics.add_request({"app": "mail", "status": 400, "code": "unknown_field", "param": "x"})
    return metrics


def test_a_call_from_its_first_to_its_last_event():
    got, app, decoding = values(used()), ("app", "mail"), ("kind", "decode")
    assert values(Metrics(dict)) == {}, "services share nothing"
    wanted = {
        ("calls_accepted_total", app): 1, ("calls_refused_total", app, ("reason", "full")): 1,
        ("calls_failed_total", app, ("kind", "ContextGone")): 1, ("calls_cancelled_total", app): 1,
        ("calls_ended_total", app, ("finish_reason", "stop")): 1,
        ("objectives_total", app, ("met", "true")): 1,
        ("plans_total", ("level", "70"), ("source", "proposed")): 1, ("prompt_tokens_total", app): 120,
        ("kept_tokens_total", app): 96, ("reused_tokens_total", app): 64, ("answer_tokens_total", app): 21,
        ("drafted_tokens_total", app): 10, ("scored_tokens_total", app): 9, ("ttft_seconds_sum", app): 0.2,
        ("ttft_seconds_bucket", app, ("le", "0.2")): 1, ("ttft_seconds_bucket", app, ("le", "0.1")): 0,
        ("engine_ttft_seconds_sum", app): 0.18, ("tpot_seconds_sum", app): 0.03,
        ("queue_wait_seconds_sum", app): 0.012, ("batch_rows_sum", decoding): 3,
        ("dispatch_seconds_sum", decoding): 0.04, ("dispatched_tokens_total", decoding): 12,
        ("prefill_chunks_total", ("mode", "int8"), ("tokens", "64")): 1,
    }  # fmt: skip
    wanted = {(f"jaxllm_{name}", *labels): value for (name, *labels), value in wanted.items()}
    assert {key: got[key] for key in wanted} == pytest.approx(wanted)
    assert not [key for key in got if key[0] == "jaxllm_prefill_chunks_total" and ("tokens", "0") in key]
    # Answers without an objective, and of one token.
    metrics = Metrics(dict)
    metrics.report(dataclasses.replace(ENDED, met=None, tokens=1), "mail")
    names = {key[0] for key in values(metrics)}
    assert "jaxllm_ttft_seconds_count" in names
    assert not names & {"jaxllm_objectives_total", "jaxllm_tpot_seconds_count"}


def test_figures_become_gauges():
    got, app = values(Metrics(lambda: FIGURES)), ("app", "mail")
    wanted = {
        ("queue_calls",): 2, ("queue_oldest_seconds",): 0.084, ("running_calls", app, ("level", "70")): 2,
        ("memory_bytes",): 1710 << 20, ("memory_limit_bytes",): 2048 << 20,
        ("holding_size_bytes", ("holding", "weights")): 912 << 20,
        ("holding_limit_bytes", ("holding", "contexts")): 256 << 20, ("contexts", app): 14,
        ("context_stored_bytes", app): 88 << 20, ("context_chunks", app, ("bits", "2")): 301,
        ("expert_visits_total",): 120_400, ("expert_hit_rate",): 109_322 / 120_400,
        ("read_bytes_total", ("what", "contexts")): 310 << 20, ("grammars_total", ("outcome", "ended")): 2,
    }  # fmt: skip
    wanted = {(f"jaxllm_{name}", *labels): value for (name, *labels), value in wanted.items()}
    assert {key: got[key] for key in wanted} == pytest.approx(wanted)
    assert ("jaxllm_holding_limit_bytes", ("holding", "weights")) not in got
    # What is missing is no error, nor is no visit.
    none = values(Metrics(lambda: {"experts": {"visits": 0, "hits": 0}}))
    assert "jaxllm_expert_hit_rate" not in {key[0] for key in none}


def test_apps_and_kinds_beyond_the_limit_are_one_label_and_names_are_escaped(monkeypatch):
    figures = {
        "running": {f"app {at}": {100: 1} for at in range(5)},
        "contexts": {f"app {at}": {"contexts": 2, "chunks": {"8": 3}} for at in range(5)},
    }
    monkeypatch.setattr(metrics_of, "_MOST_APPS", 2)
    metrics = Metrics(lambda: figures)
    for at in range(5):
        metrics.count("calls_accepted", f"app {at}")
    got = values(metrics)
    assert got["jaxllm_calls_accepted_total", ("app", "app 1")] == 1
    assert got["jaxllm_calls_accepted_total", ("app", "other")] == 3
    assert got["jaxllm_running_calls", ("app", "other"), ("level", "100")] == 3
    assert got["jaxllm_contexts", ("app", "other")] == 6
    assert got["jaxllm_context_chunks", ("app", "other"), ("bits", "8")] == 9
    # Kinds of errors are bounded, too, and names are escaped.
    metrics = Metrics(dict)
    for at in range(100):
        metrics.count("calls_failed", 'a"\n{}', f"Error{at}")
    assert len({key for key in values(metrics) if key[0] == "jaxllm_calls_failed_total"}) == 17


def test_the_guide_names_metrics_that_exist():
    guide = (Path(__file__).parents[3] / "docs/guides/dashboard.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(jaxllm_\w+)`", guide))
    assert len(named) > 20
    known = {key[0] for key in values(used(lambda: FIGURES))}
    assert {name for name in named if not {name, f"{name}_count"} & known} == set()


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = '<img src=x onerror="document.title=1">'


@contextlib.contextmanager
def serving(metrics, key=b"Bearer sesame"):
    """The address of a server whose operators have a key; empty for any caller."""
    routes = Starlette(routes=metric_routes(metrics))

    async def app(scope, receive, send):
        scope["jaxllm.operator"] = not key or (b"authorization", key) in scope["headers"]
        await routes(scope, receive, send)

    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        running(app, [listening], timeout_graceful_shutdown=1),
    ):
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_operators_read_metrics_and_anyone_loads_the_page():
    metrics = Metrics(dict)
    metrics.add_request({"app": "mail"})
    with serving(metrics) as address, httpx.Client(base_url=address, timeout=60) as client:
        for path in ("/metrics", "/requests"):
            refused = client.get(path)
            assert (refused.status_code, refused.headers["cache-control"]) == (403, "no-store")
            assert "--operator" in refused.json()["error"]["message"]
            told = client.get(path, headers={"Authorization": "Bearer sesame"})
            assert told.status_code == 200
        assert [each["app"] for each in told.json()["data"]] == ["mail"]
        for path in FILES:
            page = client.get(path)
            assert (page.status_code, page.headers["content-security-policy"]) == (200, POLICY)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_metrics_as_text(tmp_path):
    metrics = Metrics(lambda: FIGURES)
    metrics.report(STARTED, HOSTILE)
    metrics.report(ENDED, HOSTILE)
    request = {"app": HOSTILE, "method": "POST", "path": "/v1/x", "status": 400, "total_ms": 5.0}
    metrics.add_request({**request, "code": "odd", "param": "stop", "reason": HOSTILE})
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom")
    with serving(metrics, key=b"") as address:
        command = [CHROMIUM, *flags, f"--user-data-dir={tmp_path}", address]
        page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    for text in ("Ready", html.escape(HOSTILE, quote=False), "200 ms", "912.0 MiB", "odd: stop:"):
        assert text in page
    assert "<img" not in page


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_the_chat_shows_thoughts_in_a_fold_and_switches_them():
    """The page's script with elements and a service of this test: an answer with a thought, and one without
    because it was switched off."""
    script = """
      const chunk = (delta) => `data: ${JSON.stringify({ choices: [{ delta }] })}\n\n`;
      const bodies = [], made = [];
      const element = (tag) => ({
        tag, children: [], textContent: "", hidden: tag === "think-label", checked: true, value: "Why?",
        listeners: {}, open: undefined,
        append(...each) { this.children.push(...each); }, get lastChild() { return this.children.at(-1); },
        before(other) { made.push(other); }, scrollIntoView() {}, requestSubmit() {},
        addEventListener(name, on) { this.listeners[name] = on; },
      });
      const elements = {}, seen = [];
      globalThis.sessionStorage = { getItem: () => "sesame" };
      globalThis.document = {
        getElementById: (id) => (elements[id] ??= element(id)), createElement: element,
      };
      globalThis.fetch = async (path, { body, headers }) => {
        bodies.push([path, JSON.parse(body), headers.Authorization]);
        if (path === "/api/show") return { ok: true, json: async () => ({ capabilities: ["thinking"] }) };
        const thought = ["Bec", "ause."].map((each) => ({ reasoning_content: each }));
        const parts = JSON.parse(body).enable_thinking
          ? [...thought, { content: "So" }, { content: "!" }]
          : [{ content: "No" }];
        const bytes = (text) => new TextEncoder().encode(text);
        return { ok: true, body: new ReadableStream({
          async start(out) {
            for (const each of parts) {
              out.enqueue(bytes(chunk(each)));
              await new Promise((done) => setTimeout(done, 20));
              seen.push(made.map((fold) => [fold.open, fold.lastChild.textContent]));
            }
            out.close();
          } }) };
      };
      await import(process.argv[1]);
      const rest = (ms) => new Promise((done) => setTimeout(done, ms));
      await rest(50);
      const send = () => elements["chat-form"].listeners.submit({ preventDefault() {} });
      send(); await rest(300);
      elements.think.checked = false;
      elements.said.value = "And?";
      send(); await rest(300);
      const chat = elements.chat.children.map((each) => [each.className, each.textContent]);
      const folds = made.map((fold) => fold.children.map((each) => [each.tag, each.textContent]));
      console.log(JSON.stringify({ bodies, chat, folds, seen, offered: !elements["think-label"].hidden }));
    """
    command = ["node", "--input-type=module", "-e", script, str(FOLDER / "chat.js")]
    got = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert got["offered"]
    assert got["chat"] == [["user", "Why?"], ["assistant", "So!"], ["user", "And?"], ["assistant", "No"]]
    assert got["folds"] == [[["summary", "thinking"], ["p", "Because."]]]
    # Open while the thought comes, closed when the answer begins.
    assert got["seen"][:4] == [[[True, "Bec"]], [[True, "Because."]], *[[[False, "Because."]]] * 2]
    assert [key for *_, key in got["bodies"]] == ["Bearer sesame"] * 3
    (_, shown, _), (_, first, _), (_, second, _) = got["bodies"]
    assert (shown, first["enable_thinking"], second["enable_thinking"]) == ({"model": "default"}, True, False)
    assert second["messages"][1] == {"role": "assistant", "content": "So!", "reasoning_content": "Because."}


def test_the_page_needs_nothing_from_elsewhere():
    files = {path.name for path in FOLDER.iterdir()}
    assert files == {name for name, _ in FILES.values()}
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        addresses = set(re.findall(r"https?://[^\s\"'`<]+", text)) - {"http://www.w3.org/2000/svg"}
        assert addresses == set(), path.name
        # The policy forbids markup from text, inline scripts and inline styles.
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\sstyle=|\son\w+=", text
        )
    assert (FOLDER / "index.html").read_text(encoding="utf-8").count("<script") == 2


@pytest.fixture
def records(caplog):
    caplog.set_level(logging.INFO)
    return lambda: caplog.records


def run(app, *, path="/v1/models", headers=(), on_request=lambda record: None, **scope):
    """The messages that an app sends to a request."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.disconnect"}

    own = {"type": "http", "method": "GET", "path": path, "headers": list(headers), **scope}
    asyncio.run(AccessLogged(app, on_request)(own, receive, send))
    return sent


def answering(status, **more):
    async def app(scope, receive, send):
        scope.update(more)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return app


def job(outcome="cancelled", tokens=0, started=None, ended=None):
    return SimpleNamespace(outcome=outcome, read_tokens=tokens, started=started, ended=ended)


def request_of(request_id, app):
    return Served(request_id, {"jaxllm.app": app})


def record_of(*calls, path="/", status=200, total_ms=1.0):
    served = request_of("r1", "mail")
    served.calls += calls
    return access_record(served, method="POST", path=path, status=status, total_ms=total_ms)


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
        told = records()[-1]
        assert (told.status, told.outcome, told.app) == (status, outcome, "notes")
        assert (b"x-request-id", told.request_id.encode()) in sent[0]["headers"]


def test_a_refusal_says_why_in_log_metrics_and_list(records):
    """Without the values that it quotes, which may be of prompts."""
    metrics = Metrics(dict)
    secret = "my secret prompt"
    errors = [
        ApiError(f"the field 'stop' is not {secret!r}, \"{secret}\" or `{secret}`", code="odd", param="stop"),
        ApiError("a key is missing; don't guess", status=401),
    ]

    async def refusing(scope, receive, send):
        scope["jaxllm.app"] = "mail"
        await error_response(api_error(errors[0]), openai_body)(scope, receive, send)

    async def late(scope, receive, send):
        await error_response(errors[1], openai_body)(scope, receive, send)

    for app in (refusing, late):
        run(lambda scope, receive, send, app=app: app(scope, receive, send), on_request=metrics.add_request)
    first, second = records()[-2:]
    assert (first.code, first.param, first.reason) == (
        "odd",
        "stop",
        "the field 'stop' is not ..., ... or ...",
    )
    assert (second.code, second.reason) == ("invalid_api_key", "a key is missing; don't guess")
    assert not hasattr(second, "param")
    newest, oldest = metrics.requests()
    assert (oldest["app"], oldest["status"], oldest["code"]) == ("mail", 400, "odd")
    assert newest["time_s"] >= oldest["time_s"] > 1e9
    assert secret not in repr(metrics.requests())
    found = values(metrics)
    labels = ("app", "mail"), ("code", "odd"), ("field", "stop"), ("status", "400")
    assert found["jaxllm_requests_refused_total", *labels] == 1
    # Clients name fields: kinds of refusals and the list are bounded.
    for at in range(1000):
        metrics.add_request({"app": "mail", "status": 400, "code": "unknown_field", "param": f"f{at}"})
    found = {key for key in values(metrics) if key[0] == "jaxllm_requests_refused_total"}
    assert len(found) <= 130
    assert len(metrics.requests()) == 200


def test_probes_are_told_to_who_debugs_and_what_clients_choose_in_paths_to_nobody(records, caplog):
    run(answering(200, path_params={"name": "my diary"}), path="/v1/contexts/my diary/pin")
    run(answering(404), path="/" + 999 * "x")
    assert [each.path for each in records()] == ["/v1/contexts/{name}/pin", "/" + 199 * "x"]
    for path in ("/health", "/ready", "/metrics", "/requests"):
        run(answering(200), path=path)
    run(answering(403), path="/metrics")
    assert [(each.path, each.status) for each in records()[2:]] == [("/metrics", 403)]
    caplog.set_level(logging.DEBUG)
    run(answering(503), path="/ready")
    assert records()[-1].status == 503


def test_an_error_is_answered_and_raised_where_the_answer_has_begun(records):
    begins = False

    async def failing(scope, receive, send):
        assert logs.CURRENT.get().request_id == scope["state"]["request_id"]
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
    assert logs.CURRENT.get() is None

    # Names that are not clean are replaced.
    name = (b"x-request-id", b"Mail-7.a_b")
    assert request_id_of({"headers": [name]}) == "Mail-7.a_b"
    assert request_id_of({"headers": [name, name]}) != "Mail-7.a_b"
    for given in (b"", b"a b", b"x" * 65, b"a\r\nb", "ä".encode(), b'a"b'):
        assert request_id_of({"headers": [(b"x-request-id", given)]}) != given.decode("latin-1")


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


def test_a_record_an_error_or_a_warning_is_one_line_and_long_texts_have_an_end(lines):
    token = logs.CURRENT.set(request_of("r1", "mail"))
    logging.getLogger("serving.x").warning("a\nforged: %s\x1b[0m\u2028", "b", extra={"chunks": 3, "time": 0})
    logs.CURRENT.reset(token)
    logging.getLogger("jaxllm").info("later")
    logging.getLogger("jaxllm").debug("not written")
    try:
        raise ValueError("x" * 50_000)
    except ValueError:
        logging.getLogger("jaxllm").exception("y" * 50_000)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("of a library", stacklevel=1)
    first, second, error, told = lines()
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "warning", "logger": "serving.x", "message": "a\nforged: b\x1b[0m\u2028", "request_id": "r1",
        "app": "mail", "chunks": 3,
    }  # fmt: skip
    assert (second["message"], "request_id" in second) == ("later", False)
    assert (len(error["message"]), len(error["error"]), error["level"]) == (4000, 16_000, "error")
    assert (told["logger"], told["level"]) == ("py.warnings", "warning")
    assert "of a library" in told["message"]


def test_tasks_and_threads_name_the_calls_that_they_serve(lines):
    async def work(name):
        logs.CURRENT.set(request_of(name, f"app of {name}"))
        await asyncio.sleep(0)
        logging.getLogger("serving").info("works")

    async def both():
        await asyncio.gather(work("r1"), work("r2"))

    asyncio.run(both())
    told = [(each["request_id"], each["app"]) for each in lines()]
    assert told == [("r1", "app of r1"), ("r2", "app of r2")]
    own = (("r1.a", "mail"), ("r1.b", "mail"), ("r2.a", "notes"))
    calls = [SimpleNamespace(app=app, call=SimpleNamespace(request_id=name)) for name, app in own]
    logging.getLogger("serving").error("failed", extra=logs.named(calls))
    line = lines()[-1]
    assert (line["request_id"], line["app"]) == ("r1.a r1.b r2.a", "mail notes")


def test_nobody_waits_for_a_log_that_is_not_read(monkeypatch):
    """A full pipe, as of a supervisor that has stopped: calls go on, and the reader learns what it missed."""
    monkeypatch.setattr(logs, "_MOST_WAITING", 200)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as out, os.fdopen(writing, "w") as stream:
        with logs.writing_logs(stream) as handler:
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
