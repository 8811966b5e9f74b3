"""Clients of a service that ask, leave, flood, read slowly and send nonsense, each until it is told to
stop."""

import asyncio
import contextlib
import json
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

PROMPTS = ("Once upon a time", "The cat", "Is it so? " * 8, "A long story: " + "and then she said " * 20)
PAIR = {"ttft_ms": 500, "tpot_ms": 50}
SLOS: tuple[Any, ...] = ("<100,100>", "<60,80>", "<20,50>", PAIR, {"total_ms": 3000})
ENDED_WITHIN_S = 60.0
# What a request to a context may get where storage fails, besides a full queue and memory.
STORAGE_ERRORS = {
    (500, "storage_failed"), (503, "storage_failed"), (507, "budget_exceeded"), (429, "queue_full"),
    (404, "context_not_found"),
}  # fmt: skip


class Clients:
    """All clients of one service.

    Args:
      url: of the service.
      keys: of its apps.
      store_fault: a file whose content names an error by which the service's storage fails while it is there;
        None where the service keeps no contexts.
      seed: of all draws.

    Attributes:
      seen: what came of their calls, by name.
      strange: outcomes that there must not be.
      texts: of unplanned answers without sampling, by prompt and length.
    """

    def __init__(
        self, url: str, keys: dict[str, str], store_fault: Path | None = None, seed: int = 0
    ) -> None:
        self.url, self._keys, self._draw = url, keys, random.Random(seed)
        self._store_fault = store_fault
        self._stop = False
        self.seen: Counter[str] = Counter()
        self.strange: list[str] = []
        self.texts: dict[tuple[str, int], set[str]] = {}

    async def run(self, seconds: float) -> None:
        """Lets all clients work for a time, and waits until each has ended."""
        self._stop = False
        kinds: list[tuple[Callable[[httpx.AsyncClient], Awaitable[None]], int, float]] = [
            (self.asks, 3, 0.1), (self.asks_in_the_background, 1, 0.1), (self.leaves, 2, 0.2),
            (self.floods, 1, 1.5), (self.reads_slowly, 1, 0.1), (self.never_reads, 1, 0.5),
            (self.sends_nonsense, 1, 0.2),
        ]  # fmt: skip
        if self._store_fault is not None:
            kinds += [(self.talks_in_a_context, 2, 0.3), (self.breaks_the_storage, 1, 1.0)]
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
        text, whole = _streamed(body) if call["stream"] else _at_once(body)
        if not whole:
            self.strange.append(f"an answer that is not whole: {body[-300:]}")
            return None
        self.seen["answered"] += 1
        if "slo" not in call and call["temperature"] == 0:
            self.texts.setdefault((call["prompt"], call["max_tokens"]), set()).add(text)
        return None

    async def asks_in_the_background(self, client: httpx.AsyncClient) -> None:
        """Reads a whole answer of no hurry."""
        await self.asks(client, service_tier="flex")

    async def leaves(self, client: httpx.AsyncClient) -> None:
        """Closes the connection before the answer has begun, or in the middle of it."""
        call = self._call(max_tokens=100, stream=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._draw.uniform(0.0, 0.3)):
                async with client.stream(
                    "POST", "/v1/completions", json=call, headers=self._headers()
                ) as got:
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
            return self._storage_refused(made)
        path = f"/v1/contexts/{made.json()['id']}"
        for _ in range(3):
            call = {"prompt": self._draw.choice(PROMPTS[:2]), "max_tokens": self._draw.choice((1, 8))}
            got = await client.post(f"{path}/generate", json=call, headers=headers)
            if got.status_code != 200:
                self._storage_refused(got)
                break
            self.seen["turn"] += 1
        # One that could not be deleted is tried again once storage works.
        for _ in range(100):
            got = await client.delete(path, headers=headers)
            if got.status_code in (200, 404):
                return None
            self._storage_refused(got)
            await asyncio.sleep(0.1)
        self.strange.append(f"a context that cannot be deleted: {got.status_code}: {got.text[:300]}")
        return None

    async def breaks_the_storage(self, client: httpx.AsyncClient) -> None:
        """Lets the storage of contexts be full, or broken, for a moment."""
        del client
        assert self._store_fault is not None
        await asyncio.to_thread(self._store_fault.write_text, self._draw.choice(("ENOSPC", "EIO")))
        await asyncio.sleep(self._draw.uniform(0.1, 0.5))
        await asyncio.to_thread(self._store_fault.unlink)
        self.seen["storage failed"] += 1

    def _storage_refused(self, got: httpx.Response) -> None:
        error = got.json().get("error", {})
        if (got.status_code, error.get("code")) not in STORAGE_ERRORS:
            self.strange.append(f"{got.status_code}: {got.text[:300]}")
        self.seen[f"context {got.status_code}"] += 1

    def _refused(self, status: int, body: str) -> None:
        if status != 429:
            self.strange.append(f"{status}: {body[:300]}")
        self.seen[f"refused {status}"] += 1

    @contextlib.contextmanager
    def _connected(self, call: dict[str, Any]) -> Iterator[socket.socket]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            connection.connect((host, int(port)))
            connection.sendall(raw_request(call, self._headers()))
            connection.setblocking(False)
            yield connection


def raw_request(call: dict[str, Any], headers: dict[str, str]) -> bytes:
    """The bytes of a call over HTTP."""
    body = json.dumps(call)
    lines = [
        "POST /v1/completions HTTP/1.1", "Host: localhost", "Connection: close",
        f"Content-Length: {len(body)}", *(f"{name}: {value}" for name, value in headers.items()),
    ]  # fmt: skip
    return ("\r\n".join(lines) + "\r\n\r\n" + body).encode()


def _streamed(body: str) -> tuple[str, bool]:
    """The text of a stream, and whether it is whole."""
    lines = [line[6:] for line in body.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    whole = lines[-1:] == ["[DONE]"] and not any("error" in each for each in events)
    ended = any(choice["finish_reason"] for each in events for choice in each.get("choices", ()))
    return "".join(choice["text"] for each in events for choice in each.get("choices", ())), whole and ended


def _at_once(body: str) -> tuple[str, bool]:
    (choice,) = json.loads(body)["choices"]
    return choice["text"], bool(choice["finish_reason"])
