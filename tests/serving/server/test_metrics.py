"""Metrics: what is counted comes out, labels are bounded, and figures that are missing are no error. The page
that reads them: who may, what it shows in a browser, and what it never does."""

import contextlib
import dataclasses
import re
import socket
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from jaxllm.serving.server.job import Dispatch
from jaxllm.serving.server.metrics import _FILES, _FOLDER, POLICY, Metrics, metric_routes
from tests.serving.server.browser import CHROMIUM, Browser
from tests.serving.server.fake_figures import ENDED, FIGURES, STARTED
from tests.serving.server.running import running


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
    return metrics


def test_a_call_from_its_first_to_its_last_event():
    got, app = values(used()), ("app", "mail")
    assert values(Metrics(dict)) == {}, "services share nothing"
    assert got["jaxllm_calls_accepted_total", app] == 1
    assert got["jaxllm_calls_refused_total", app, ("reason", "full")] == 1
    assert got["jaxllm_calls_failed_total", app, ("kind", "ContextGone")] == 1
    assert got["jaxllm_calls_cancelled_total", app] == 1
    assert got["jaxllm_calls_ended_total", app, ("finish_reason", "stop")] == 1
    assert got["jaxllm_objectives_total", app, ("met", "true")] == 1
    assert got["jaxllm_plans_total", ("level", "70"), ("source", "proposed")] == 1
    assert got["jaxllm_prompt_tokens_total", app] == 120
    assert got["jaxllm_kept_tokens_total", app] == 96
    assert got["jaxllm_reused_tokens_total", app] == 64
    assert got["jaxllm_answer_tokens_total", app] == 21
    assert got["jaxllm_drafted_tokens_total", app] == 10
    assert got["jaxllm_ttft_seconds_sum", app] == pytest.approx(0.2)
    assert got["jaxllm_ttft_seconds_bucket", app, ("le", "0.2")] == 1
    assert got["jaxllm_ttft_seconds_bucket", app, ("le", "0.1")] == 0
    assert got["jaxllm_engine_ttft_seconds_sum", app] == pytest.approx(0.18)
    assert got["jaxllm_tpot_seconds_sum", app] == pytest.approx(0.03)
    assert got["jaxllm_queue_wait_seconds_sum", app] == pytest.approx(0.012)
    assert got["jaxllm_batch_rows_sum", ("kind", "decode")] == 3
    assert got["jaxllm_dispatch_seconds_sum", ("kind", "decode")] == pytest.approx(0.04)
    assert got["jaxllm_dispatched_tokens_total", ("kind", "decode")] == 12
    assert got["jaxllm_prefill_chunks_total", ("mode", "int8"), ("tokens", "64")] == 1
    assert not [key for key in got if key[0] == "jaxllm_prefill_chunks_total" and ("tokens", "0") in key]


def test_answers_without_objective_and_of_one_token():
    metrics = Metrics(dict)
    metrics.report(dataclasses.replace(ENDED, met=None, tokens=1), "mail")
    names = {key[0] for key in values(metrics)}
    assert "jaxllm_ttft_seconds_count" in names
    assert not names & {"jaxllm_objectives_total", "jaxllm_tpot_seconds_count"}


def test_figures_become_gauges():
    got = values(Metrics(lambda: FIGURES))
    assert got["jaxllm_queue_calls",] == 2
    assert got["jaxllm_queue_oldest_seconds",] == pytest.approx(0.084)
    assert got["jaxllm_running_calls", ("app", "mail"), ("level", "70")] == 2
    assert got["jaxllm_memory_bytes",] == 1710 << 20
    assert got["jaxllm_memory_limit_bytes",] == 2048 << 20
    assert got["jaxllm_holding_size_bytes", ("holding", "weights")] == 912 << 20
    assert got["jaxllm_holding_limit_bytes", ("holding", "contexts")] == 256 << 20
    assert ("jaxllm_holding_limit_bytes", ("holding", "weights")) not in got
    assert got["jaxllm_contexts", ("app", "mail")] == 14
    assert got["jaxllm_context_stored_bytes", ("app", "mail")] == 88 << 20
    assert got["jaxllm_context_chunks", ("app", "mail"), ("bits", "2")] == 301
    assert got["jaxllm_expert_visits_total",] == 120_400
    assert got["jaxllm_expert_hit_rate",] == pytest.approx(109_322 / 120_400)
    assert got["jaxllm_read_bytes_total", ("what", "contexts")] == 310 << 20
    assert got["jaxllm_grammars_total", ("outcome", "ended")] == 2
    # What is missing is no error, nor is no visit.
    none = values(Metrics(lambda: {"experts": {"visits": 0, "hits": 0}}))
    assert "jaxllm_expert_hit_rate" not in {key[0] for key in none}


def test_apps_beyond_the_limit_are_one_label():
    figures = {
        "running": {f"app {at}": {100: 1} for at in range(5)},
        "contexts": {f"app {at}": {"contexts": 2, "chunks": {"8": 3}} for at in range(5)},
    }
    metrics = Metrics(lambda: figures, most_apps=2)
    for at in range(5):
        metrics.count("calls_accepted", f"app {at}")
    got = values(metrics)
    assert got["jaxllm_calls_accepted_total", ("app", "app 1")] == 1
    assert got["jaxllm_calls_accepted_total", ("app", "other")] == 3
    assert got["jaxllm_running_calls", ("app", "other"), ("level", "100")] == 3
    assert got["jaxllm_contexts", ("app", "other")] == 6
    assert got["jaxllm_context_chunks", ("app", "other"), ("bits", "8")] == 9


def test_kinds_of_errors_are_bounded_and_names_are_escaped():
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


HOSTILE = '<img src=x onerror="document.title=1">'


@contextlib.contextmanager
def serving(metrics):
    """The address of a server whose operators have the key `sesame`."""
    routes = Starlette(routes=metric_routes(metrics))

    async def app(scope, receive, send):
        scope["jaxllm.operator"] = (b"authorization", b"Bearer sesame") in scope["headers"]
        await routes(scope, receive, send)

    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        running(app, [listening], timeout_graceful_shutdown=1),
    ):
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_operators_read_metrics_and_anyone_loads_the_page():
    with serving(Metrics(dict)) as address, httpx.Client(base_url=address, timeout=60) as client:
        refused = client.get("/metrics")
        assert (refused.status_code, refused.headers["cache-control"]) == (403, "no-store")
        assert "--operator" in refused.json()["error"]["message"]
        assert client.get("/metrics", headers={"Authorization": "Bearer sesame"}).status_code == 200
        for path in _FILES:
            page = client.get(path)
            assert (page.status_code, page.headers["content-security-policy"]) == (200, POLICY)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_it_asks_for_a_key_and_shows_metrics_as_text(tmp_path):
    metrics, browser = Metrics(lambda: FIGURES), Browser(tmp_path)
    metrics.count("calls_accepted", HOSTILE)
    metrics.report(STARTED, HOSTILE)
    metrics.report(ENDED, HOSTILE)
    with serving(metrics) as address:
        browser.view(390, 844)
        browser.open(address)
        browser.wait("document.getElementById('key-form')?.hidden === false")
        browser.value("document.getElementById('key').value = 'sesame'")
        browser.value("document.querySelector('#key-form button').click()")
        browser.wait("document.getElementById('state').textContent === 'Ready'")
        assert browser.value("document.getElementById('key-form').hidden")
        assert HOSTILE in browser.value("document.getElementById('apps').textContent")
        assert "200 ms" in browser.value("document.getElementById('apps').textContent")
        assert "912.0 MiB" in browser.value("document.getElementById('memory').textContent")
        assert browser.value("document.querySelectorAll('main img').length") == 0
        assert browser.value("document.title") != "1"
        assert browser.value("document.documentElement.scrollWidth") == 390
    browser.close()


def test_the_page_needs_nothing_from_elsewhere():
    files = {path.name for path in _FOLDER.iterdir()}
    assert files == {name for name, _ in _FILES.values()}
    for path in _FOLDER.iterdir():
        text = path.read_text(encoding="utf-8")
        addresses = set(re.findall(r"https?://[^\s\"'`<]+", text)) - {"http://www.w3.org/2000/svg"}
        assert addresses == set(), path.name
        # The policy forbids markup from text, inline scripts and inline styles.
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\sstyle=|\son\w+=", text
        )
    assert (_FOLDER / "index.html").read_text(encoding="utf-8").count("<script") == 1
