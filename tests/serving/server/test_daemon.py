"""The service as a process: started by systemd's means, called by real clients, drained, restarted, and ended
when it does not end well."""

import asyncio
import contextlib
import json
import queue
import re
import signal
import socket
import threading
from types import SimpleNamespace

import httpx
import pytest

from jaxllm.checkpoints.peft import write_adapter
from jaxllm.client import Client
from jaxllm.errors import ConfigError
from jaxllm.models.lora import LoraConfig
from jaxllm.serving.contexts.store import ContextStore
from jaxllm.serving.server.api.stored_responses import RESPONSES
from jaxllm.serving.server.daemon import Daemon, Notifier
from jaxllm.serving.server.identity import Identity, add_key
from jaxllm.serving.server.service_options import ServerOptions
from tests.models.test_lora import random_adapter
from tests.serving.server.daemons import MAIN, Process, raw_request
from tests.tiny import END_ID, TINY, write_tiny_bundle

# Each dispatch takes a while, so that answers run when something happens; where the file is there, the
# engine's thread dies. The daemon sees it once another file is there, so that calls until then can be tested.
SLOWLY = (
    """
import asyncio, os, time
from jaxllm.serving.server import daemon, executor
watch = daemon.Daemon._watch
async def watch_once_told(self):
    while not os.path.exists(os.environ["WATCH"]):
        await asyncio.sleep(0.05)
    await watch(self)
daemon.Daemon._watch = watch_once_told
def slow(dispatch):
    def slowly(*arguments):
        time.sleep(float(os.environ["DISPATCH_S"]))
        dispatch(*arguments)
    return slowly
executor.decode_together, executor.step = slow(executor.decode_together), slow(executor.step)
choose = executor.next_dispatch
def choose_or_die(*arguments):
    if os.path.exists(os.environ["DEATH"]):
        raise MemoryError("the test says so")
    return choose(*arguments)
executor.next_dispatch = choose_or_die
"""
    + MAIN
)
# The model is never there.
LOADING = (
    """
import time
from jaxllm.serving.server import opening
def loading(options, drafts, progress):
    progress("compile", 1, 4)
    time.sleep(3600)
opening.open_service = loading
"""
    + MAIN
)
CALL = {"prompt": "hello", "max_tokens": 100, "logit_bias": {str(END_ID): -100}, "temperature": 0}
STREAM = CALL | {"stream": True}
OPTIONS = 'http = "127.0.0.1:0"\ncontext_tokens = 128\nbatch_rows = []\n'


class Service:
    """A slow service of a tiny model; answers operators over its socket `s`."""

    def __init__(self, folder, config, *arguments, model=None, dispatch_s=0.3, **more):
        self.config, self.path = folder / "service.toml", folder / "s"
        self.death, self.watch = folder / "death", folder / "watch"
        self.config.write_text(config)
        own = {"DEATH": str(self.death), "WATCH": str(self.watch), "DISPATCH_S": str(dispatch_s)}
        model = model or write_tiny_bundle(folder / "tiny.jaxllm", "int4")
        self.process = Process(
            folder, "--model", model, "--config", self.config, *arguments, script=SLOWLY,
            environment=own | more.pop("environment", {}), **more,
        )  # fmt: skip
        self.url = ""

    def __enter__(self):
        """Waits until it answers over HTTP."""
        self.url = self.process.ready()
        return self

    def __exit__(self, *_):
        self.process.kill()

    def post(self, **more):
        return httpx.post(self.url + "/v1/completions", json=CALL | more, timeout=60)

    def read_again(self, text, told="limits were read"):
        """Lets it read other options."""
        before = self.process.text().count(told)
        self.config.write_text(text)
        self.process.signal(signal.SIGHUP)
        self.process.until(lambda: self.process.text().count(told) > before)

    @contextlib.contextmanager
    def streams(self, count=1):
        """The lines of answers that have begun."""
        with httpx.Client(base_url=self.url, timeout=60) as client, contextlib.ExitStack() as stack:
            begun = []
            for _ in range(count):
                response = stack.enter_context(client.stream("POST", "/v1/completions", json=STREAM))
                assert response.status_code == 200
                begun.append(response.iter_lines())
                next(begun[-1])
            yield begun


class Systemd:
    """Listens to what a service tells it, and passes it its sockets."""

    def __init__(self, folder):
        self.name = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.name))
        # Read all the time: ten unread states are all that the system keeps.
        self._states: queue.Queue[str] = queue.Queue()
        self._listening = threading.Thread(target=self._listen)
        self._listening.start()

    def _listen(self):
        while told := self._socket.recv(1000).decode():
            self._states.put(told)

    def close(self):
        self._socket.sendto(b"", str(self.name))
        self._listening.join()
        self._socket.close()

    def told(self, state):
        """Waits until it has been told of a state."""
        while state not in self._states.get(timeout=60):
            pass


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a model and adapters."""
    folder = tmp_path_factory.mktemp("service")
    write_tiny_bundle(folder / "tiny.jaxllm", "int4")
    for seed, name in enumerate(("formal", "terse")):
        lora = LoraConfig(rank=2, alpha=16)
        write_adapter(folder / "adapters" / name, TINY, lora, random_adapter(TINY, lora, seed))
    return folder


@pytest.fixture(scope="module")
def systemd(root):
    with contextlib.closing(Systemd(root)) as made:
        yield made


def options(root, in_flight=8, app="other"):
    """Options of the shared service."""
    return f"""
context_tokens = 128
batch_rows = [2]
memory = "8GB"
adapters = "adapters"
contexts = "contexts"
context_keys = "{root}/keys"
[adapter]
formal = "adapters/formal"
[objectives]
{app} = "<40,70>"
[limits]
in_flight = {in_flight}
"""


@pytest.fixture(scope="module")
def service(root, systemd):
    """The service that the tests of this module share."""
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(str(root / "s"))
        unix.listen()
        made = Service(
            # Before those of the file.
            root, options(root), "--adapter", f"terse={root / 'adapters/terse'}", model=root / "tiny.jaxllm",
            dispatch_s=0.1, passed=(tcp, unix),
            environment={"NOTIFY_SOCKET": str(systemd.name), "WATCHDOG_USEC": "3000000"},
        )  # fmt: skip
        made.watch.touch()
        made.url = f"http://127.0.0.1:{tcp.getsockname()[1]}"
    yield made
    made.process.kill()


def test_it_is_ready_when_warm_and_tells_systemd(service, systemd):
    # A client may connect, and is answered, from the start on.
    assert httpx.get(service.url + "/health", timeout=60).json()["status"] == "ok"
    for state in ("WATCHDOG=1", "READY=1"):
        systemd.told(state)
    assert httpx.get(service.url + "/ready").status_code == 200
    assert httpx.get(service.url + "/health").json()["profile"]["kind"] in {"coarse", "whole"}
    systemd.told("WATCHDOG=1")


def test_over_the_socket_an_app_is_known_by_its_user(service):
    with Client(socket=service.path) as client:
        assert client.complete("hello", max_tokens=2).result().text is not None
        figures = client.http.get("/metrics").text
    # The kinds of what the engine did, and its memory against the budget.
    assert 'jaxllm_dispatched_tokens_total{kind="prefill"}' in figures
    assert "jaxllm_memory_limit_bytes 8e+09" in figures
    assert 'jaxllm_holding_limit_bytes{holding="prefixes"} 2.68435456e+08' in figures
    assert re.search(r'jaxllm_calls_ended_total\{app="uid-\d+",\w+="\w+"\} \d', figures), figures


def test_each_request_has_a_record_and_nothing_of_what_was_said(service):
    body = {"prompt": "my secret", "max_tokens": 3, "logit_bias": {str(END_ID): -100}}
    headers = {"X-Request-Id": "mine-1", "Authorization": "Bearer sesame"}
    answer = httpx.post(service.url + "/v1/completions?q=hidden", json=body, headers=headers)
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    refused = httpx.get(service.url + "/v1/models", headers={"Host": "evil.example"})
    name = refused.headers["x-request-id"]
    assert "<html" in httpx.get(service.url + "/").text
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


def test_limits_are_read_again_and_counted(service, root):
    log = service.process
    log.until(lambda: "ready:" in log.text())
    service.read_again(options(root, in_flight=1, app=f"uid-{root.stat().st_uid}"))
    with Client(socket=service.path) as client:
        assert client.objective()["slo"] == "<40,70>"
    with service.streams() as (first,):
        refused = service.post()
        assert refused.status_code == 429
        assert "Retry-After" in refused.headers
        # The end gives back what the call took.
        assert [*first][-2].startswith("data: [DONE]")
    assert service.post(max_tokens=1).status_code == 200
    # And so does a client that leaves.
    with service.streams():
        pass
    log.until(lambda: 'calls_cancelled_total{app="local"} 1.0' in httpx.get(service.url + "/metrics").text)
    assert service.post(max_tokens=1).status_code == 200
    service.read_again("limits = 1", "limits stay as they are")
    service.read_again(options(root))


@pytest.mark.slow
def test_it_drains_and_its_contexts_outlive_it_and_the_death_of_an_engine_is_told(
    service, systemd, root, tmp_path
):
    """The last of the shared service; the next one has its contexts, and is the one whose engine dies."""
    with Client(socket=service.path) as client:
        # By an option before the file, one of the file is not there; others are loaded at any time.
        body = {"name": "formal"}
        assert client.http.post("/v1/adapters", json=body).status_code == 201
        listed = client.http.get("/v1/adapters").json()["data"]
        assert [each["id"] for each in listed] == ["terse", "formal"]
        context = client.new_context()
        told = context.generate("my secret is swordfish", max_tokens=8).result().facts
        body = {"input": "my secret", "max_output_tokens": 2}
        response = client.http.post("/v1/responses", json=body).json()
    (root / "second").mkdir()
    with Process(root / "second", "--model", root / "tiny.jaxllm", "--config", service.config) as second:
        assert second.ended() == 1
        assert "contexts is in use by another process" in second.text()
    with service.streams(2) as streams:
        service.process.signal(signal.SIGTERM)
        systemd.told("STOPPING=1")
        refused = service.post()
        assert refused.status_code == 503, refused.text
        assert httpx.get(service.url + "/ready").status_code == 503
        for each in streams:
            assert "data: [DONE]" in [*each]
    assert service.process.ended() == 0, service.process.text()
    with ContextStore(root / "contexts") as store:
        assert store.records() == []
        assert "is encrypted" in store.damage()[0].reason
    assert b"my secret" not in (root / "contexts" / RESPONSES).read_bytes()

    config = f'{OPTIONS}attend_quantized_kv = true\ncontext_keys = "{root}/keys"\ncontext_budget = "1MB"\n'
    third = Service(
        tmp_path, config, "--socket", tmp_path / "s", "--contexts", root / "contexts",
        model=root / "tiny.jaxllm",
    )  # fmt: skip
    with third:
        third.read_again(config.replace("1MB", "2MB"), "contexts may take 2,000,000 bytes")
        with Client(socket=third.path) as client:
            assert client.http.get(f"/v1/responses/{response['id']}").json() == response
            (there,) = client.contexts()
            assert (there.name, there.facts["tokens"]) == (context.name, told["context_tokens"])
            assert there.generate("and?", max_tokens=4).result().facts["reused_tokens"] >= 16
            there.delete()
            assert client.contexts() == []
        with third.streams() as (lines,):
            third.death.touch()
            assert re.search("the engine has failed.*send the request again", error_of(lines))
        health = httpx.get(third.url + "/health", timeout=60)
        assert health.status_code == 503, health.text
        assert httpx.get(third.url + "/ready", timeout=60).status_code == 503
        refused = third.post()
        assert refused.status_code == 503, refused.text
        third.watch.touch()
        assert third.process.ended() == 1
        assert "the test says so" in third.process.text()


def error_of(lines):
    """The error that ended a stream."""
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "error" in events[-1], events[-1]
    return events[-1]["error"]["message"]


@pytest.mark.slow
def test_a_reader_that_never_reads_holds_up_no_other(tmp_path):
    """And, as the last of this service, what does not end in time is ended when it drains."""
    with Service(tmp_path, OPTIONS + "drain_s = 0.5\n") as service:
        host, port = service.url.removeprefix("http://").split(":")
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                deaf = stack.enter_context(socket.socket())
                deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
                deaf.connect((host, int(port)))
                deaf.sendall(raw_request(STREAM, {}))
            assert service.post(max_tokens=5).json()["usage"]["completion_tokens"] == 5
        with service.streams() as (lines,):
            service.process.signal(signal.SIGTERM)
            assert "stopped in the middle" in error_of(lines)
        assert service.process.ended() == 0, service.process.text()


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(tmp_path):
    with Service(tmp_path, OPTIONS + "drain_s = 60\n") as service:
        with service.streams() as (lines,):
            service.process.signal(signal.SIGTERM)
            service.process.until(lambda: "draining" in service.process.text())
            service.process.signal(signal.SIGTERM)
            assert service.process.ended() == 1
            with pytest.raises(httpx.HTTPError):
                list(lines)
        assert "at once" in service.process.text()


def test_a_model_that_cannot_be_opened_ends_it(tmp_path):
    (tmp_path / "broken.jaxllm").write_bytes(b"no bundle")
    with Process(tmp_path, "--model", tmp_path / "broken.jaxllm", "--socket", tmp_path / "s") as process:
        assert process.ended() == 1, process.text()
        assert "jaxllm" in process.text().splitlines()[-1]
        assert "Traceback" not in process.text()


def test_an_error_after_the_engines_thread_has_begun_stops_it_before_contexts_close():
    ended = []

    class Opened:
        service = SimpleNamespace(contexts=None)

        def start(self, backend):
            backend.executor = SimpleNamespace(stop=lambda within_s: ended.append("stopped"), alive=True)
            raise ConfigError("the test says so")

        def close(self):
            ended.append("closed")

    async def serve():
        with socket.create_server(("127.0.0.1", 0)) as listening:
            await Daemon(ServerOptions(), lambda _: Opened(), Identity(), Notifier({})).serve([listening])

    with pytest.raises(ConfigError, match="the test says so"):
        asyncio.run(serve())
    assert ended == ["stopped", "closed"]


def test_it_answers_and_stops_while_it_loads(tmp_path):
    path = tmp_path / "own"
    app, _ = add_key(tmp_path / "keys.json", "mail")
    operator, _ = add_key(tmp_path / "keys.json", "admin", operator=True)
    with Process(tmp_path, "--socket", path, "--http", "127.0.0.1:0", script=LOADING) as process:
        url = process.listens()
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
            process.until(
                lambda: "start" in client.get("/ready").json() and client.get("/ready").json()["start"]
            )
            waits = client.get("/ready")
            assert waits.status_code == 503
            told = waits.json()["start"]
            assert (told["stage"], told["done"], told["total"]) == ("compiling buckets", 1, 4)
            refused = client.post("/v1/completions", json=CALL)
            assert refused.status_code == 503
            assert "loading" in refused.text
        process.signal(signal.SIGINT)
        assert process.ended() == 0, process.text()
        assert not path.exists()
