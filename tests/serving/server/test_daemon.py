"""The service as a process: started by systemd's means, called by real clients, drained, restarted."""

import contextlib
import json
import queue
import re
import signal
import socket
import threading

import httpx
import openai
import pytest

from jaxllm.serving.server.identity import add_key
from tests.serving.server.daemons import MAIN, Process
from tests.tiny import write_tiny_bundle

# Each dispatch takes a while, so that answers run when signals come.
SLOWLY = (
    """
import time
from jaxllm.serving.engine import step as batch
from jaxllm.serving.server import executor
def slow(dispatch):
    def slowly(*arguments):
        time.sleep(0.1)
        dispatch(*arguments)
    return slowly
batch.decode_together, executor.step = slow(batch.decode_together), slow(executor.step)
"""
    + MAIN
)
# The model is never there.
LOADING = (
    """
import time
from jaxllm.serving.server import daemon
daemon.open_service = lambda *_, **__: time.sleep(3600)
"""
    + MAIN
)
LIMITS = "[limits]\nin_flight = {}\n"
CALL = {"prompt": "hello", "max_tokens": 100, "logit_bias": {"262": -100}, "temperature": 0}


class Service:
    """The service that the tests of this module share, and both of its ends."""

    def __init__(self, folder):
        self.config, self.path = folder / "service.toml", folder / "s"
        self.config.write_text("context_tokens = 128\nbatch_rows = [2]\nmemory = '8GB'\n" + LIMITS.format(8))
        with contextlib.ExitStack() as stack:
            tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            unix = stack.enter_context(socket.socket(socket.AF_UNIX))
            unix.bind(str(self.path))
            unix.listen()
            self.systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self.systemd.bind(str(folder / "notify"))
            # Read all the time, as systemd does: ten unread states are all that the system keeps.
            self._states: queue.Queue[str] = queue.Queue()
            self._listening = threading.Thread(target=self._listen)
            self._listening.start()
            self.url = f"http://127.0.0.1:{tcp.getsockname()[1]}"
            self.process = Process(
                folder, "--model", write_tiny_bundle(folder / "tiny.jaxllm", "int4"), "--config", self.config,
                script=SLOWLY, passed=(tcp, unix),
                environment={"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "3000000"},
            )  # fmt: skip

    def _listen(self):
        with contextlib.suppress(OSError):
            while told := self.systemd.recv(1000).decode():
                self._states.put(told)

    def close(self):
        self.systemd.sendto(b"", self.systemd.getsockname())
        self._listening.join()
        self.systemd.close()

    def told(self, state):
        """Waits until systemd has been told of a state."""
        while state not in self._states.get(timeout=60):
            pass

    def streams(self, count=1):
        """Answers that have begun, as their streams, and what closes them."""
        client = httpx.Client(base_url=self.url, timeout=60)
        stack = contextlib.ExitStack()
        stack.enter_context(client)
        begun = []
        for _ in range(count):
            response = stack.enter_context(
                client.stream("POST", "/v1/completions", json=CALL | {"stream": True})
            )
            assert response.status_code == 200
            lines = response.iter_lines()
            next(lines)
            begun.append(lines)
        return begun, stack


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    made = Service(tmp_path_factory.mktemp("service"))
    try:
        yield made
    finally:
        made.process.kill()
        made.close()


def test_it_is_ready_when_warm_and_tells_systemd(service):
    # A client may connect, and is answered, from the start on.
    assert httpx.get(service.url + "/health", timeout=60).json()["status"] == "ok"
    service.told("WATCHDOG=1")
    service.told("READY=1")
    assert httpx.get(service.url + "/ready").status_code == 200
    assert httpx.get(service.url + "/health").json()["profile"]["kind"] in {"coarse", "whole"}
    service.told("WATCHDOG=1")


def test_the_openai_client(service):
    with openai.OpenAI(base_url=service.url + "/v1", api_key="none") as client:
        name = client.models.list().data[0].id
        said = [{"role": "user", "content": "hello"}]
        answer = client.chat.completions.create(model=name, messages=said, max_tokens=4)  # pyright: ignore
        assert answer.usage.completion_tokens <= 4
        text = "".join(
            each.choices[0].text
            for each in client.completions.create(
                model=name, prompt="hello", max_tokens=16, temperature=0, stream=True
            )
            if each.choices
        )
        assert text


def test_over_the_socket_an_app_is_known_by_its_user(service):
    transport = httpx.HTTPTransport(uds=str(service.path))
    with httpx.Client(transport=transport, base_url="http://service") as client:
        assert client.post("/v1/completions", json=CALL | {"max_tokens": 2}).status_code == 200
        figures = client.get("/metrics").text
    # The kinds of what the engine did, and its memory against the budget.
    assert 'jaxllm_dispatched_tokens_total{kind="prefill"}' in figures
    assert "jaxllm_memory_limit_bytes 8e+09" in figures
    assert 'jaxllm_holding_limit_bytes{holding="prefixes"} 2.68435456e+08' in figures
    assert re.search(r'jaxllm_calls_ended_total\{app="uid-\d+",\w+="\w+"\} 1.0', figures), figures


def test_strange_hosts_and_pages_are_refused(service):
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        assert httpx.get(service.url + "/v1/models", headers=headers).status_code == 403
    assert "<html" in httpx.get(service.url + "/").text


def test_each_request_has_a_record_and_nothing_of_what_was_said(service):
    body = {"prompt": "my secret", "max_tokens": 3, "logit_bias": {"262": -100}}
    headers = {"X-Request-Id": "mine-1", "Authorization": "Bearer sesame"}
    answer = httpx.post(service.url + "/v1/completions?q=hidden", json=body, headers=headers)
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    refused = httpx.get(
        service.url + "/v1/models", headers={"Host": "evil.example", "X-Request-Id": "no good"}
    )
    name = refused.headers["x-request-id"]
    service.process.until(lambda: name in service.process.text())
    log = service.process.text()
    records = [json.loads(line) for line in log.splitlines() if '"jaxllm.access"' in line]
    by_id = {each["request_id"]: each for each in records}
    own = by_id["mine-1"]
    assert (own["method"], own["path"], own["status"]) == ("POST", "/v1/completions", 200)
    assert (own["app"], own["outcome"], own["tokens"], own["plan"]) == ("local", "ended", 3, "unplanned")
    assert (own["level_percent"], own["met"]) == (100, None)
    assert own["total_ms"] >= own["ttft_ms"] > 0
    assert (by_id[name]["status"], by_id[name]["outcome"], by_id[name]["app"]) == (403, "refused", "")
    for secret in ("my secret", "sesame", "hidden", answer.json()["choices"][0]["text"] or "?"):
        assert secret not in log


def test_limits_are_read_again_and_counted(service):
    log = service.process
    log.until(lambda: "ready:" in log.text())
    service.config.write_text(LIMITS.format(1))
    log.signal(signal.SIGHUP)
    log.until(lambda: "limits were read" in log.text())
    (first,), stack = service.streams()
    with stack:
        refused = httpx.post(service.url + "/v1/completions", json=CALL)
        assert refused.status_code == 429
        assert "Retry-After" in refused.headers
        # The end gives back what the call took.
        assert [*first][-2].startswith("data: [DONE]")
    assert httpx.post(service.url + "/v1/completions", json=CALL | {"max_tokens": 1}).status_code == 200
    (left,), stack = service.streams()
    del left
    # And so does a client that leaves.
    stack.close()
    log.until(lambda: 'calls_cancelled_total{app="local"} 1.0' in httpx.get(service.url + "/metrics").text)
    assert httpx.post(service.url + "/v1/completions", json=CALL | {"max_tokens": 1}).status_code == 200
    service.config.write_text("limits = 1")
    log.signal(signal.SIGHUP)
    log.until(lambda: "limits stay as they are" in log.text())
    service.config.write_text(LIMITS.format(8))
    log.signal(signal.SIGHUP)
    log.until(lambda: log.text().count("limits were read") == 2)


def test_it_drains_at_sigterm(service):
    """The last of the shared service."""
    lines, stack = service.streams(2)
    with stack:
        service.process.signal(signal.SIGTERM)
        service.told("STOPPING=1")
        refused = httpx.post(service.url + "/v1/completions", json=CALL)
        assert refused.status_code == 503, refused.text
        assert httpx.get(service.url + "/ready").status_code == 503
        for each in lines:
            assert "data: [DONE]" in [*each]
    assert service.process.ended() == 0, service.process.text()


def test_it_answers_and_stops_while_it_loads(tmp_path):
    path = tmp_path / "own"
    app, _ = add_key(tmp_path / "keys.json", "mail")
    operator, _ = add_key(tmp_path / "keys.json", "admin", operator=True)
    process = Process(tmp_path, "--socket", path, "--http", "127.0.0.1:0", script=LOADING)
    try:
        url = process.until(lambda: re.search(r"listening on (http://127[^\s\"]+)", process.text()))[1]
        for key, status in ((app, 403), (operator, 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.get(url + "/metrics", headers=headers).status_code == status
            assert httpx.get(url + "/v1/models", headers=headers).status_code == 503
        assert httpx.get(url + "/metrics").status_code == 401
        process.until(lambda: "listening on unix:" in process.text())
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://service", timeout=60
        ) as client:
            assert client.get("/health").status_code == 200
            assert client.get("/ready").status_code == 503
            refused = client.post("/v1/completions", json=CALL)
            assert refused.status_code == 503
            assert "loading" in refused.text
        process.signal(signal.SIGINT)
        assert process.ended() == 0, process.text()
        assert not path.exists()
    finally:
        process.kill()
