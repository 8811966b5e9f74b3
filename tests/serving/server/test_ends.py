"""Ends of a service that does not end well, and readers that do not read."""

import contextlib
import json
import re
import signal
import socket
import time

import httpx
import pytest

from tests.serving.server.daemons import MAIN, Process
from tests.serving.server.hard_clients import raw_request
from tests.tiny import write_tiny_bundle

# Each dispatch takes a while, so that answers run when something happens; where the file is there, the
# engine's thread dies. The daemon sees it once another file is there, so that calls until then can be tested.
SLOWLY = (
    """
import asyncio, os, time
from jaxllm.serving.engine import step as batch
from jaxllm.serving.server import daemon, executor
watch = daemon.Daemon._watch
async def watch_once_told(self):
    while not os.path.exists(os.environ["WATCH"]):
        await asyncio.sleep(0.05)
    await watch(self)
daemon.Daemon._watch = watch_once_told
def slow(dispatch):
    def slowly(*arguments):
        time.sleep(0.3)
        dispatch(*arguments)
    return slowly
batch.decode_together, executor.step = slow(batch.decode_together), slow(executor.step)
choose = executor.next_action
def choose_or_die(*arguments):
    if os.path.exists(os.environ["DEATH"]):
        raise MemoryError("the test says so")
    return choose(*arguments)
executor.next_action = choose_or_die
"""
    + MAIN
)
OPTIONS = """
http = "127.0.0.1:0"
context_tokens = 128
batch_rows = [2]
drain_s = {}
"""
CALL = {"prompt": "hello", "max_tokens": 100, "logit_bias": {"262": -100}, "temperature": 0, "stream": True}


class Service:
    """A slow service of a tiny model."""

    def __init__(self, folder, drain_s):
        self.death, self.watch, config = folder / "death", folder / "watch", folder / "service.toml"
        config.write_text(OPTIONS.format(drain_s))
        model = write_tiny_bundle(folder / "tiny.jaxllm", "int4")
        self.process = Process(
            folder, "--model", model, "--config", config, script=SLOWLY,
            environment={"DEATH": str(self.death), "WATCH": str(self.watch)},
        )  # fmt: skip
        found = self.process.until(lambda: re.search(r"listening on (http://[\d.:]+)", self.process.text()))
        self.url = found[1]
        self.process.until(lambda: httpx.get(self.url + "/ready", timeout=60).status_code == 200)

    @contextlib.contextmanager
    def stream(self):
        """The lines of an answer that has begun."""
        with (
            httpx.Client(base_url=self.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=CALL) as response,
        ):
            assert response.status_code == 200
            lines = response.iter_lines()
            next(lines)
            yield lines


@pytest.fixture
def service(tmp_path, request):
    made = Service(tmp_path, drain_s=request.param)
    try:
        yield made
    finally:
        made.process.kill()


def error_of(lines):
    """The error that ended a stream."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "error" in events[-1], events[-1]
    return events[-1]["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("service", [0.5], indirect=True)
def test_a_reader_that_never_reads_holds_up_no_other(service):
    """And, as the last of this service, what does not end in time is ended when it drains."""
    host, port = service.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            deaf = stack.enter_context(socket.socket())
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            deaf.connect((host, int(port)))
            deaf.sendall(raw_request(CALL, {}))
        answer = httpx.post(
            service.url + "/v1/completions", json=CALL | {"max_tokens": 5, "stream": False}, timeout=60
        )
        assert answer.json()["usage"]["completion_tokens"] == 5
    with service.stream() as lines:
        service.process.signal(signal.SIGTERM)
        assert "stopped in the middle" in error_of(lines)
    assert service.process.ended() == 0, service.process.text()


@pytest.mark.slow
@pytest.mark.parametrize("service", [60], indirect=True)
def test_a_second_signal_ends_it_at_once(service):
    with service.stream() as lines:
        service.process.signal(signal.SIGTERM)
        service.process.until(lambda: "draining" in service.process.text())
        service.process.signal(signal.SIGTERM)
        assert service.process.ended() == 1
        with pytest.raises(httpx.HTTPError):
            list(lines)
    assert "at once" in service.process.text()


@pytest.mark.slow
@pytest.mark.parametrize("service", [60], indirect=True)
def test_the_death_of_the_engine_is_told(service):
    with service.stream() as lines:
        service.death.touch()
        told = error_of(lines)
    assert re.search("the engine has failed.*send the request again", told)
    health = httpx.get(service.url + "/health", timeout=60)
    assert health.status_code == 503, health.text
    assert httpx.get(service.url + "/ready", timeout=60).status_code == 503
    refused = httpx.post(service.url + "/v1/completions", json=CALL, timeout=60)
    assert refused.status_code == 503, refused.text
    service.watch.touch()
    assert service.process.ended() == 1
    assert "the test says so" in service.process.text()


def test_a_model_that_cannot_be_opened_ends_it(tmp_path):
    broken = tmp_path / "broken.jaxllm"
    broken.write_bytes(b"no bundle")
    for model in (broken, tmp_path / "nothing.jaxllm"):
        process = Process(tmp_path, "--model", model, "--socket", tmp_path / "s")
        try:
            began = time.monotonic()
            assert process.ended() == 1, process.text()
            assert time.monotonic() - began < 60
            assert "jaxllm" in process.text().splitlines()[-1]
            assert "Traceback" not in process.text()
        finally:
            process.kill()
