"""The dashboard in a browser: no errors, the feed fills it, the chat answers, and app names stay text."""

import json
import re
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from serving.server.calls import Refused
from serving.server.metrics import Metrics
from serving.server.watching import _FILES, _FOLDER, allow_operators
from tests.serving.server.browser import CHROMIUM, Browser
from tests.serving.server.fake_service import (
    ANSWER,
    ENDED,
    STARTED,
    FakeBackend,
    application,
    metrics_with_a_past,
)

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
slow = pytest.mark.slow
HOSTILE = '<img src=x onerror="document.title=1">'
TEXT = "document.getElementById('{}').textContent"


def start(app):
    """A server; (its address, what stops it)."""
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/"

    def stop():
        server.should_exit = True
        thread.join()
        listening.close()

    return address, stop


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def past():
    backend = FakeBackend()
    address, stop = start(application(backend, metrics_with_a_past(backend)))
    yield address
    stop()


@pytest.fixture
def service():
    """A service without a past, whose figures tests set."""
    backend = FakeBackend({})
    metrics = Metrics(backend.snapshot)
    address, stop = start(application(backend, metrics))
    yield SimpleNamespace(backend=backend, metrics=metrics, address=address)
    stop()


def open_page(browser, address, state="Ready"):
    # What the former page says of its service, which has ended, is not of this one.
    browser.open("about:blank")
    browser.wait("location.href === 'about:blank'")
    browser.problems.clear()
    browser.open(address)
    browser.wait(f"document.readyState === 'complete' && {TEXT.format('state')} === {json.dumps(state)}")


@slow
@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_the_feed_fills_the_page(browser, past, tmp_path, width, dark):
    browser.view(width, 844, dark=dark)
    open_page(browser, past)
    browser.wait("document.querySelectorAll('.mark').length > 20")
    assert browser.value(TEXT.format("model")) == "jaxllm-1b-int8"
    assert browser.value(TEXT.format("tile-running")) == "4"
    assert browser.value("document.querySelectorAll('#apps tbody tr').length") == 5
    assert browser.value("document.querySelectorAll('#memory-parts li').length") == 7
    assert browser.value("document.querySelectorAll('#contexts .widths').length") == 3
    assert not browser.value("document.getElementById('experts-panel').hidden")
    # Nothing is wider than the page, and the styles came.
    assert browser.value("document.documentElement.scrollWidth") == width
    colour = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", colour)[:3])) < 200) is dark
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")
    assert browser.problems == []


@slow
@needs_browser
def test_the_chat_answers_and_tells_its_plan(browser, past):
    browser.view(1280, 900)
    open_page(browser, past)
    browser.value("document.getElementById('chat-text').value = 'Is this a complaint?'")
    browser.value("document.getElementById('chat-send').click()")
    browser.wait("document.querySelector('.told') !== null")
    turns = browser.value("[...document.querySelectorAll('.turn')].map((each) => each.textContent)")
    assert turns[0] == "Is this a complaint?"
    assert turns[1] == ANSWER
    told = browser.value("document.querySelector('.told').textContent")
    assert told == (
        "level 70 % · plan proposed · kept 31 of 38 tokens · reused 12 · first token 182 ms · 27 ms per "
        "token · 27 tokens · in time"
    )
    browser.value("document.getElementById('chat-clear').click()")
    assert browser.value("document.querySelectorAll('.turn').length") == 0
    assert browser.problems == []


@slow
@needs_browser
def test_calls_are_reached_by_keys(browser, past):
    browser.view(1280, 900)
    open_page(browser, past)
    browser.wait("document.querySelectorAll('.mark').length > 20")
    press = "document.getElementById('calls').dispatchEvent(new KeyboardEvent('keydown', {key: '%s'}))"
    browser.value(press % "ArrowLeft")
    assert "first token" in browser.value(TEXT.format("call"))
    first = browser.value(TEXT.format("call"))
    browser.value(press % "ArrowLeft")
    assert browser.value(TEXT.format("call")) != first
    browser.value(press % "Escape")
    assert "in five minutes" in browser.value(TEXT.format("call"))


@slow
@needs_browser
def test_a_service_without_calls_has_words_for_it(browser, service):
    browser.view(390, 844)
    open_page(browser, service.address)
    assert "No app has called yet" in browser.value(TEXT.format("apps"))
    assert "No calls in the last five minutes" in browser.value(TEXT.format("calls"))
    assert "keeps no contexts" in browser.value(TEXT.format("contexts"))
    assert "does not say" in browser.value(TEXT.format("memory-bar"))
    assert browser.value("document.getElementById('experts-panel').hidden")
    assert browser.value("document.documentElement.scrollWidth") == 390
    assert browser.problems == []


@slow
@needs_browser
def test_names_of_apps_are_text(browser, service):
    service.metrics.taken(HOSTILE)
    service.metrics.started(HOSTILE, STARTED)
    service.metrics.ended(HOSTILE, ENDED, STARTED)
    service.backend.figures = {
        "running": [{"app": HOSTILE, "level": 70, "count": 1}],
        "contexts": {HOSTILE: {"contexts": 1, "stored_bytes": 1, "chunks": {"8": 1}}},
        "memory": {"process_bytes": 10, "limit_bytes": 20, "holdings": {HOSTILE: {"size_bytes": 5}}},
    }
    open_page(browser, service.address)
    browser.wait(f"{TEXT.format('apps')}.includes('onerror')")
    assert browser.value(TEXT.format("note-running")) == HOSTILE
    assert browser.value("document.querySelectorAll('main img').length") == 0
    assert browser.value("document.title") != "1"
    assert browser.problems == []


@slow
@needs_browser
def test_it_tells_what_is_wrong_and_recovers(browser, service):
    service.backend.refusal = Refused("still loading", reason="loading")
    open_page(browser, service.address, state="still loading")
    service.backend.refusal = None
    browser.wait(f"{TEXT.format('state')} === 'Ready' && {TEXT.format('model')} !== ''")
    address, stop = start(application(service.backend, service.metrics))
    open_page(browser, address)
    stop()
    browser.wait(f"{TEXT.format('state')} === 'Reconnecting'")
    assert browser.value("document.getElementById('main').className") == "stale"


@slow
@needs_browser
def test_it_asks_for_a_key(browser):
    def allow(request):
        allowed = request.headers.get("authorization") == "Bearer sesame"
        return None if allowed else PlainTextResponse("key", 401)

    backend = FakeBackend()
    address, stop = start(application(backend, Metrics(backend.snapshot), allow=allow))
    open_page(browser, address, state="Key needed")
    for key, state in (("wrong", "Key needed"), ("sesame", "Ready")):
        browser.wait("!document.getElementById('key-form').hidden")
        browser.value(f"document.getElementById('key').value = '{key}'")
        browser.value("document.querySelector('#key-form button').click()")
        browser.wait(f"{TEXT.format('state')} === '{state}'")
    assert browser.value("document.getElementById('key-form').hidden")
    stop()


@slow
@needs_browser
def test_it_tells_an_app_that_it_is_for_operators(browser):
    allow = allow_operators(lambda scope: (b"authorization", b"Bearer sesame") in scope["headers"])
    backend = FakeBackend()
    address, stop = start(application(backend, Metrics(backend.snapshot), allow=allow))
    open_page(browser, address, state="Operator's key needed")
    assert "--operator" in browser.value(TEXT.format("key-label"))
    browser.value("document.getElementById('key').value = 'sesame'")
    browser.value("document.querySelector('#key-form button').click()")
    browser.wait(f"{TEXT.format('state')} === 'Ready'")
    stop()


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
        assert len(text.splitlines()) <= 400
    assert Path(_FOLDER / "index.html").read_text(encoding="utf-8").count("<script") == 1
