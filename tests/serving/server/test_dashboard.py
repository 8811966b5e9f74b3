"""The page that reads /metrics: who reads them, what it shows in a browser, and what it never does."""

import contextlib
import re
import socket

import httpx
import pytest
from starlette.applications import Starlette

from jaxllm.serving.server.metrics import _FILES, _FOLDER, POLICY, Metrics, metric_routes
from tests.serving.server.browser import CHROMIUM, Browser
from tests.serving.server.fake_figures import ENDED, FIGURES, STARTED
from tests.serving.server.running import running

HOSTILE = '<img src=x onerror="document.title=1">'


@contextlib.contextmanager
def serving(metrics):
    """The address of a server whose operators have the key `sesame`."""
    routes = metric_routes(
        metrics, operates=lambda scope: (b"authorization", b"Bearer sesame") in scope["headers"]
    )
    app = Starlette(routes=routes)
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
    metrics.accepted(HOSTILE)
    metrics.started(HOSTILE, STARTED)
    metrics.ended(HOSTILE, ENDED)
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
