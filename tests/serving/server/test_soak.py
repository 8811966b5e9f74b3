"""The service under clients that ask, leave, flood, read slowly and send nonsense for some time: no stuck
call, no leak, the same answers at the end.

JAXLLM_SOAK_MINUTES sets how long; 45 seconds without it.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxllm.serving.server.identity import add_key
from tests.serving.server.daemons import MAIN, Process, raw_request

PROMPTS = ("Once upon a time", "The cat", "Is it so? " * 8, "A long story: " + "and then she said " * 20)
PAIR = {"ttft_ms": 500, "tpot_ms": 50}
SLOS: tuple[Any, ...] = ("<100,100>", "<60,80>", "<20,50>", PAIR, {"total_ms": 3000})
ENDED_WITHIN_S = 60.0
# What a request to a context may get where storage fails, besides a full queue and memory.
STORAGE_ERRORS = ("storage_failed", "budget_exceeded", "BUSY", "context_not_found")


class Clients:
    """All clients of one service.

    Args:
      url: of the service.
      keys: of its apps.
      store_fault: a file whose content names an error by which the service's storage fails while it is there.

    Attributes:
      seen: what came of their calls, by name.
      strange: outcomes that there must not be.
      texts: of unplanned answers without sampling, by prompt and length.
    """

    def __init__(self, url: str, keys: dict[str, str], store_fault: Path) -> None:
        self.url, self._keys, self._draw = url, keys, random.Random(0)
        self._store_fault = store_fault
        self._stop = False
        self.seen: Counter[str] = Counter()
        self.strange: list[str] = []
        self.texts: dict[tuple[str, int], set[str]] = {}

    async def run(self, seconds: float) -> None:
        """Lets all clients work for a time, and waits until each has ended."""
        self._stop = False
        kinds: list[tuple[Callable[[httpx.AsyncClient], Awaitable[None]], int, float]] = [
            (self.asks, 4, 0.1), (self.leaves, 2, 0.2), (self.floods, 1, 1.5), (self.reads_slowly, 1, 0.1),
            (self.never_reads, 1, 0.5), (self.sends_nonsense, 1, 0.2), (self.talks_in_a_context, 2, 0.3),
            (self.breaks_the_storage, 1, 1.0),
        ]  # fmt: skip
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=4)
        async with httpx.AsyncClient(base_url=self.url, timeout=ENDED_WITHIN_S, limits=limits) as client:
            tasks = [
                asyncio.create_task(self._again(kind, client, pause_s))
                for kind, number, pause_s in kinds
                for _ in range(number)
            ]
            await asyncio.sleep(seconds)
            self._stop = True
            await asyncio.gather(*tasks)

    async def _again(self, kind: Any, client: httpx.AsyncClient, pause_s: float) -> None:
        while not self._stop:
            try:
                await kind(client)
            except Exception as error:
                self.strange.append(f"{kind.__name__}: {type(error).__name__}: {error!s:.300}")
            await asyncio.sleep(self._draw.uniform(0, 2 * pause_s))

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._draw.choice(list(self._keys.values()))}"}

    def _call(self, **more: Any) -> dict[str, Any]:
        call = {
            "prompt": self._draw.choice(PROMPTS), "max_tokens": self._draw.choice((1, 8, 40)),
            "stream": self._draw.random() < 0.7, "temperature": self._draw.choice((0, 1)),
            "service_tier": self._draw.choice(("auto", "auto", "auto", "flex")),
        }  # fmt: skip
        if self._draw.random() < 0.7:
            call["slo"] = self._draw.choice(SLOS)
        return call | more

    async def asks(self, client: httpx.AsyncClient, **more: Any) -> None:
        """Reads a whole answer."""
        call = self._call(**more)
        async with client.stream("POST", "/v1/completions", json=call, headers=self._headers()) as response:
            body = (await response.aread()).decode()
        if response.status_code != 200:
            return self._refused(response.status_code, body)
        if call["stream"]:
            text, whole = _streamed(body)
        else:
            (choice,) = json.loads(body)["choices"]
            text, whole = choice["text"], bool(choice["finish_reason"])
        if not whole:
            self.strange.append(f"an answer that is not whole: {body[-300:]}")
            return None
        self.seen["answered"] += 1
        if "slo" not in call and call["temperature"] == 0:
            self.texts.setdefault((call["prompt"], call["max_tokens"]), set()).add(text)
        return None

    async def leaves(self, client: httpx.AsyncClient) -> None:
        """Closes the connection before the answer has begun, or in the middle of it."""
        call = self._call(max_tokens=100, stream=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._draw.uniform(0.0, 0.3)):
                own = {"json": call, "headers": self._headers()}
                async with client.stream("POST", "/v1/completions", **own) as got:
                    if got.status_code != 200:
                        return self._refused(got.status_code, (await got.aread()).decode())
                    async for _ in got.aiter_lines():
                        if self._draw.random() < 0.3:
                            break
        self.seen["left"] += 1
        return None

    async def floods(self, client: httpx.AsyncClient) -> None:
        """Sends more calls at once than may wait."""
        await asyncio.gather(*(self.asks(client, max_tokens=2) for _ in range(40)))

    async def reads_slowly(self, client: httpx.AsyncClient) -> None:
        """Reads some bytes at a time, through a small buffer, all of an answer."""
        del client
        call = self._call(max_tokens=40, stream=True)
        with self._connected(call) as connection:
            loop, got = asyncio.get_running_loop(), b""
            while part := await asyncio.wait_for(loop.sock_recv(connection, 200), ENDED_WITHIN_S):
                got += part
                await asyncio.sleep(0.01)
        head, _, body = got.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status != 200:
            return self._refused(status, body.decode())
        if b"[DONE]" not in body or b'"error"' in body:
            self.strange.append(f"a slow reader got no whole answer: {body[-300:]!r}")
        self.seen["read slowly"] += 1
        return None

    async def never_reads(self, client: httpx.AsyncClient) -> None:
        """Sends a call, reads nothing, and closes the connection after some time."""
        del client
        with self._connected(self._call(max_tokens=100, stream=True)):
            await asyncio.sleep(self._draw.uniform(0.1, 1.0))
        self.seen["never read"] += 1

    async def sends_nonsense(self, client: httpx.AsyncClient) -> None:
        """Sends what must be refused, and is refused."""
        wrong = self._draw.choice(
            (b"{", b'{"prompt": 3}', b'{"prompt": "a", "max_tokens": -1}', b'{"prompt": "a", "slo": "fast"}',
             b'{"prompt": "a", "conversation": "x"}', b"\xff" * 1000, b'{"prompt": "' + b"a " * 5000 + b'"}')
        )  # fmt: skip
        got = await client.post("/v1/completions", content=wrong, headers=self._headers())
        # A context that is not there is 404, where the service keeps some.
        if got.status_code not in (400, 404, 429):
            self.strange.append(f"{wrong[:80]!r} got {got.status_code}: {got.text[:200]}")
        self.seen["nonsense"] += 1

    async def talks_in_a_context(self, client: httpx.AsyncClient) -> None:
        """Makes a context, takes some turns in it, and deletes it, on storage that may fail at any time."""
        headers = self._headers()
        made = await client.post("/v1/contexts", json={}, headers=headers)
        if made.status_code != 201:
            return self._refused(made.status_code, made.text, in_context=True)
        path = f"/v1/contexts/{made.json()['id']}"
        for _ in range(3):
            call = {"prompt": self._draw.choice(PROMPTS[:2]), "max_tokens": self._draw.choice((1, 8))}
            got = await client.post(f"{path}/generate", json=call, headers=headers)
            if got.status_code != 200:
                self._refused(got.status_code, got.text, in_context=True)
                break
            self.seen["turn"] += 1
        # One that could not be deleted is tried again once storage works.
        for _ in range(100):
            got = await client.delete(path, headers=headers)
            if got.status_code in (200, 404):
                return None
            self._refused(got.status_code, got.text, in_context=True)
            await asyncio.sleep(0.1)
        self.strange.append(f"a context that cannot be deleted: {got.status_code}: {got.text[:300]}")
        return None

    async def breaks_the_storage(self, client: httpx.AsyncClient) -> None:
        """Lets the storage of contexts be full, or broken, for a moment."""
        del client
        await asyncio.to_thread(self._store_fault.write_text, self._draw.choice(("ENOSPC", "EIO")))
        await asyncio.sleep(self._draw.uniform(0.1, 0.5))
        await asyncio.to_thread(self._store_fault.unlink)
        self.seen["storage failed"] += 1

    def _refused(self, status: int, body: str, *, in_context: bool = False) -> None:
        code = json.loads(body).get("error", {}).get("code")
        if code not in (STORAGE_ERRORS if in_context else ("BUSY",)):
            self.strange.append(f"{status}: {body[:300]}")
        self.seen[f"{'context' if in_context else 'refused'} {status}"] += 1

    @contextlib.contextmanager
    def _connected(self, call: dict[str, Any]) -> Iterator[socket.socket]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            connection.connect((host, int(port)))
            connection.sendall(raw_request(call, self._headers()))
            connection.setblocking(False)
            yield connection


def _streamed(body: str) -> tuple[str, bool]:
    """The text of a stream, and whether it is whole."""
    lines = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    whole = lines[-1:] == ["[DONE]"] and not any("error" in each for each in events)
    ended = any(choice["finish_reason"] for each in events for choice in each.get("choices", ()))
    return "".join(choice["text"] for each in events for choice in each.get("choices", ())), whole and ended


MINUTES = float(os.environ.get("JAXLLM_SOAK_MINUTES", "0.75"))
# Of the time, before what the process has is first looked at: its caches are full then.
WARM_UP = 0.4
QUIET_S = 60.0
OPTIONS = """
http = "127.0.0.1:0"
context_tokens = 256
levels = [50, 100]
batch_rows = [2, 4]
prefix_memory = "4MB"
contexts = "contexts"
context_budget = "8MB"

[limits]
contexts = 32

[scheduler]
queued = 12
app_queued = 8
running = 6
background_running = 3
"""
# While there is a file that names an error, whatever touches the folder of contexts fails by it.
FAULTS = (
    """
import errno, os, threading, time
from tests.faults import FailingDevice
device = FailingDevice(os.environ["CONTEXTS"], at=None).__enter__()
def watch():
    while True:
        try:
            with open(os.environ["STORE_FAULT"]) as file:
                device.fail(getattr(errno, file.read(), errno.EIO))
        except FileNotFoundError:
            device.mend()
        time.sleep(0.02)
threading.Thread(target=watch, daemon=True).start()
"""
    + MAIN
)
# What allocators keep of a peak, besides the share of a leak.
ROUNDING_BYTES = 12 << 20
MOST_GROWTH = 0.02


class Service:
    """A service, and what its process has."""

    def __init__(self, folder: Path) -> None:
        self.keys = {app: add_key(folder / "keys.json", app)[0] for app in ("mail", "chat", "notes")}
        self.operator, _ = add_key(folder / "keys.json", "watch", operator=True)
        config = folder / "service.toml"
        config.write_text(OPTIONS)
        self.store_fault, contexts = folder / "store_fault", folder / "contexts"
        self.process = Process(
            folder, "--config", config, script=FAULTS,
            environment={"CONTEXTS": str(contexts), "STORE_FAULT": str(self.store_fault)},
        )  # fmt: skip
        self.url = self.process.ready()

    def calls(self) -> dict[str, float]:
        """Numbers of calls over all apps: accepted, ended, cancelled, failed, and judged by an objective."""
        headers = {"Authorization": f"Bearer {self.operator}"}
        told = httpx.get(self.url + "/metrics", headers=headers, timeout=60)
        assert told.status_code == 200, told.text
        names = {each: f"calls_{each}" for each in ("accepted", "ended", "cancelled", "failed")}
        return {
            each: sum(map(float, re.findall(rf"(?m)^jaxllm_{name}_total\{{.*\}} ([\d.e+]+)$", told.text)))
            for each, name in (names | {"judged": "objectives"}).items()
        }

    def quiet(self) -> tuple[dict[str, float], int, int, int]:
        """Waits until nothing runs: numbers of calls, resident bytes, open files and threads."""
        late_s = time.monotonic() + QUIET_S
        while True:
            found = self.calls()
            if found["accepted"] == found["ended"] + found["cancelled"] + found["failed"]:
                break
            assert time.monotonic() < late_s, f"calls that do not end: {found}"
            time.sleep(0.2)
        process = Path(f"/proc/{self.process.process.pid}")
        # Connections that clients have left are closed in a moment.
        time.sleep(1.0)
        status = (process / "status").read_text()
        resident = int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024  # pyright: ignore
        return found, resident, len([*(process / "fd").iterdir()]), len([*(process / "task").iterdir()])


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 600)
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
def test_soak(tmp_path):
    service = Service(tmp_path)
    try:
        clients = Clients(service.url, service.keys, service.store_fault)
        asyncio.run(clients.run(60 * MINUTES * WARM_UP))
        _, resident, files, threads = service.quiet()
        asyncio.run(clients.run(60 * MINUTES * (1 - WARM_UP)))
        found, resident_after, files_after, threads_after = service.quiet()
        print(dict(clients.seen), found, f"{resident / 1e6:.1f} -> {resident_after / 1e6:.1f} MB")
        assert not clients.strange, clients.strange[:5]
        wanted = {"answered", "left", "refused 429", "read slowly", "never read", "nonsense", "turn"}
        assert wanted | {"storage failed"} <= {*clients.seen}
        # A failing device is told by one of these, whatever the turn was at.
        assert {"context 500", "context 503", "context 507"} & {*clients.seen}
        # Only turns whose storage failed.
        assert found["failed"] <= sum(number for name, number in clients.seen.items() if "context " in name)
        assert found["judged"] > 0
        # Whoever an answer was decoded with, it is the same.
        assert clients.texts
        assert all(len(texts) == 1 for texts in clients.texts.values()), clients.texts
        assert resident_after <= resident * (1 + MOST_GROWTH) + ROUNDING_BYTES
        assert files_after <= files + 2
        assert threads_after <= threads
        assert httpx.get(service.url + "/health", timeout=60).status_code == 200
        with httpx.Client(base_url=service.url, timeout=60) as client:
            client.headers["Authorization"] = f"Bearer {service.keys['mail']}"
            name = client.post("/v1/contexts", json={}).json()["id"]
            said = client.post(f"/v1/contexts/{name}/generate", json={"prompt": "The cat", "max_tokens": 4})
            assert said.status_code == 200, said.text
        assert "Traceback" not in service.process.text()
        service.process.signal(signal.SIGTERM)
        assert service.process.ended() == 0, service.process.text()
    finally:
        service.process.kill()
