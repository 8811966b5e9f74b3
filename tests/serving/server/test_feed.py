"""The feed and the routes of watching: events, slow readers, limits, and who may read."""

import asyncio
import json

import httpx
import pytest
from starlette.responses import PlainTextResponse

from serving.server.calls import Refused
from serving.server.feed import Feed, event
from serving.server.metrics import Metrics
from serving.server.watching import EventStream, allow_operators
from tests.serving.server.fake_service import ENDED, MODEL, STARTED, FakeBackend, application


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def metrics(backend):
    return Metrics(backend.snapshot)


def parsed(data):
    name, text = data.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(text.removeprefix("data: "))


async def take(reader, count):
    events = reader.events()
    return [parsed(await asyncio.wait_for(anext(events), 20)) for _ in range(count)]


def test_a_reader_gets_the_past_and_then_what_comes(backend, metrics):
    async def go():
        metrics.ended("mail", ENDED, STARTED)
        feed = Feed(backend, metrics, interval_s=0.01)
        with feed.reader() as reader:
            hello, snapshot = await take(reader, 2)
            metrics.ended("notes", ENDED, STARTED)
            later = await take(reader, 2)
            while later[-2][0] != "calls":
                later += await take(reader, 1)
            with feed.reader() as other:
                ((_, known), _) = await take(other, 2)
        return hello, snapshot, later[-2:], known

    hello, (name, snapshot), (calls, after), known = asyncio.run(go())
    assert hello[0] == "hello"
    assert [each["app"] for each in hello[1]["calls"]] == ["mail"]
    assert name == "snapshot"
    assert snapshot["model"]["name"] == MODEL.name
    assert snapshot["health"]["ready"] is True
    assert snapshot["figures"] == backend.figures
    assert snapshot["history"]["apps"]["mail"]["met"] == 1
    assert (calls[0], [each["app"] for each in calls[1]]) == ("calls", ["notes"])
    assert (after[0], after[1]["history"]["apps"]["notes"]["met"]) == ("snapshot", 1)
    assert [each["app"] for each in known["calls"]] == ["mail", "notes"]


def test_a_slow_reader_is_dropped_and_others_stay(backend, metrics):
    async def go():
        feed = Feed(backend, metrics, interval_s=0.001)
        with feed.reader() as slow, feed.reader() as quick:
            events = quick.events()
            while not slow.dropped.done():
                await asyncio.wait_for(anext(events), 20)
            assert not quick.dropped.done()
            assert feed._readers == {quick}
        assert feed._readers == set()
        assert feed._ticking is None

    asyncio.run(go())


def test_as_many_readers_as_may_be(backend, metrics):
    async def go():
        feed = Feed(backend, metrics, most_readers=1)
        with feed.reader() as first:
            with pytest.raises(Refused, match="1 dashboards are open") as refused, feed.reader():
                pass
            assert refused.value.reason == "full"
            feed.close()
            assert first.dropped.done()
        with feed.reader():
            pass

    asyncio.run(go())


def test_the_feed_outlives_a_snapshot_that_cannot_be_made(backend, metrics, caplog):
    async def go():
        feed = Feed(backend, metrics, interval_s=0.01)
        with feed.reader() as reader:
            await take(reader, 2)
            backend.figures = None
            while "could not be made" not in caplog.text:
                await asyncio.sleep(0.01)
            backend.figures = {}
            return await take(reader, 1)

    assert asyncio.run(go())[0][1]["figures"] == {}


def test_a_model_that_is_loading(backend, metrics):
    backend.refusal = Refused("still loading", reason="loading")

    async def go():
        return Feed(backend, metrics).snapshot()

    snapshot = asyncio.run(go())
    assert (snapshot["model"], snapshot["health"]["ready"]) == (None, False)


def test_an_event_is_two_lines():
    assert event("calls", {"text": "a\n\nb\u2028"}) == b'event: calls\ndata: {"text":"a\\n\\nb\\u2028"}\n\n'


def stream(feed, receive):
    """Runs an event stream; returns what it sent."""
    sent = []

    async def send(message):
        sent.append(message)

    async def go():
        await asyncio.wait_for(EventStream(feed())({"type": "http"}, receive, send), 20)

    asyncio.run(go())
    return sent


def test_a_client_that_leaves(backend, metrics):
    async def receive():
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    sent = stream(lambda: Feed(backend, metrics, interval_s=0.01), receive)
    headers = dict(sent[0]["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream")
    assert headers[b"cache-control"] == b"no-store"
    assert b"content-length" not in headers
    assert parsed(sent[1]["body"])[0] == "hello"


def test_a_client_that_never_reads_is_let_go(backend, metrics):
    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def go():
        feed = Feed(backend, metrics, interval_s=0.001)
        await asyncio.wait_for(EventStream(feed)({"type": "http"}, asyncio.Event().wait, send), 20)
        assert feed._readers == set()

    asyncio.run(go())


def test_one_dashboard_too_many_is_told(backend, metrics):
    async def receive():
        await asyncio.Event().wait()

    sent = stream(lambda: Feed(backend, metrics, most_readers=0), receive)
    assert sent[0]["status"] == 503
    assert json.loads(sent[1]["body"])["error"]["type"] == "full"


def get(app, *paths, **headers):
    async def go():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.get(path, headers=headers) for path in paths]

    return asyncio.run(go())


def test_pages_and_metrics(backend, metrics):
    metrics.taken("mail")
    paths = (
        "/",
        "/dashboard/style.css",
        "/dashboard/main.js",
        "/dashboard/icon.svg",
        "/metrics",
        "/dashboard/no.js",
    )
    page, style, script, icon, figures, missing = get(application(backend, metrics), *paths)
    assert page.headers["content-type"].startswith("text/html")
    assert style.headers["content-type"].startswith("text/css")
    assert script.headers["content-type"].startswith("text/javascript")
    assert icon.headers["content-type"] == "image/svg+xml"
    for each in (page, style, script, icon):
        assert "script-src 'self'" in each.headers["content-security-policy"]
        assert "unsafe" not in each.headers["content-security-policy"]
        assert each.headers["x-content-type-options"] == "nosniff"
    assert 'jaxllm_calls_taken_total{app="mail"} 1.0' in figures.text
    assert figures.headers["content-type"].startswith("text/plain")
    assert missing.status_code == 404


def test_who_may_not_read_gets_the_page_alone(backend, metrics):
    def allow(request):
        return None if request.headers.get("authorization") == "Bearer k" else PlainTextResponse("key", 401)

    app = application(backend, metrics, allow=allow)
    assert [each.status_code for each in get(app, "/", "/metrics", "/dashboard/events")] == [200, 401, 401]
    assert get(app, "/metrics", authorization="Bearer k")[0].status_code == 200


def test_apps_are_told_what_operators_need(backend, metrics):
    app = application(backend, metrics, allow=allow_operators(lambda scope: False))
    page, figures, events = get(app, "/", "/metrics", "/dashboard/events")
    assert page.status_code == 200
    for refused in (figures, events):
        assert refused.status_code == 403
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("permission_error", "not_operator")
        assert "jaxllm keys add NAME --operator" in error["message"]
