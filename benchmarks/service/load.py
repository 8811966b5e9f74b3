"""Sends requests to a server and times what comes back, in a process of its own.

    python -m benchmarks.service.load < job.json > outcomes.json

Without `clients` the requests are sent at their times, whether earlier ones are answered or not (open loop),
and times count from when a request was due, so that a sender that is late hides nothing. With `clients` so
many send their requests one after another for `duration_s`, or each once where that is 0 (closed loop). They
go on until what was sent in that time is answered, because the last answers would else have the server for
themselves; what they send then is no part of the outcomes. What is not answered `patience_s` after the last
request was due, or after `duration_s`, is given up.

It speaks OpenAI's completions as a stream of server-sent events, and imports no JAX.
"""

import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Pause between two questions for the server's health.
_HEALTH_S = 0.05
# The error of what was given up.
NOT_ANSWERED = "not answered"


def send(job: Mapping[str, Any], *, alive: Callable[[], None] | None = None) -> list[dict[str, Any]]:
    """Sends a job's requests from a new process.

    Args:
      job: `url`; `requests`, each with `time_s`, `headers` and `body`; `patience_s`; for a closed loop
        `clients` and `duration_s`.

    Returns:
      One outcome for each request that was sent: `number` of the request, `due_s`, `sent_s`, `first_s` and
      `last_s` (times of the first and the last text, None without text), `ended_s` (of the answer, or when
      it was given up), `tokens` of the answer, `cached_tokens` of the prompt (None where it reports none),
      `health_ms` (times of GET /health after it was sent and before the next one),
      `status` (of HTTP; 0 where there is none), `error` (None for an answer that ended, `NOT_ANSWERED` for
      what was given up), and `jaxllm` (our object).
    """
    # Here, because the new process must not import it: it brings JAX.
    from benchmarks.harness.children import last_words
    from benchmarks.peers.process import PeerFailed, environment_of

    with tempfile.TemporaryFile("w+") as given:
        # No pipe: after a timeout Python 3.13's `communicate` does not go on to write to it.
        json.dump(job, given)
        given.seek(0)
        child = subprocess.Popen(
            (sys.executable, "-m", __name__), stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment_of(1),
        )  # fmt: skip
    try:
        while True:
            try:
                out, err = child.communicate(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if alive is not None:
                    alive()
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
    if child.returncode:
        raise PeerFailed(f"the load generator failed: {last_words(err.decode(errors='replace'))}")
    if alive is not None:
        # What a dead server did not answer is no measurement.
        alive()
    return json.loads(out)


class Sender:
    """Sends requests over connections of its own. In one event loop."""

    def __init__(self, client: Any, began_s: float) -> None:
        self._client, self._began_s = client, began_s
        self.outcomes: list[dict[str, Any]] = []

    def now_s(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self._began_s

    async def send(self, number: int, request: Mapping[str, Any], due_s: float) -> dict[str, Any]:
        """Sends one request, reads its answer and returns its outcome."""
        outcome = {
            "number": number, "due_s": due_s, "sent_s": self.now_s(), "first_s": None, "last_s": None,
            "ended_s": None, "tokens": 0, "cached_tokens": None, "status": 0, "error": NOT_ANSWERED,
            "jaxllm": None, "health_ms": [],
        }  # fmt: skip
        self.outcomes.append(outcome)
        try:
            await self._read(request, outcome)
        except Exception as error:
            outcome["error"] = f"{type(error).__name__}: {error!s:.200}"
        finally:
            # Also where it is cancelled.
            outcome["ended_s"] = self.now_s()
        return outcome

    async def watch(self) -> None:
        """Asks for the server's health again and again, and notes how long each answer takes."""
        while True:
            await asyncio.sleep(_HEALTH_S)
            if self.outcomes:
                began_s = self.now_s()
                try:
                    await self._client.get("/health")
                except Exception:
                    # What it refuses is seen in the outcomes.
                    continue
                self.outcomes[-1]["health_ms"].append(1000 * (self.now_s() - began_s))

    async def _read(self, request: Mapping[str, Any], outcome: dict[str, Any]) -> None:
        async with self._client.stream(
            "POST", "/v1/completions", json=request["body"], headers=request["headers"]
        ) as response:
            outcome["status"] = response.status_code
            if response.status_code != 200:
                outcome["error"] = (await response.aread()).decode(errors="replace")[:200]
                return
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    self._take(line[6:], outcome)
        if outcome["error"] == "":
            outcome["error"] = None

    def _take(self, data: str, outcome: dict[str, Any]) -> None:
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            outcome["error"] = json.dumps(event["error"])[:200]
            return
        for choice in event.get("choices") or ():
            if choice.get("text"):
                outcome["last_s"] = self.now_s()
                outcome["first_s"] = outcome["first_s"] or outcome["last_s"]
                # Peers' tokens are one character each; a usage says it better.
                outcome["tokens"] += len(choice["text"])
            if choice.get("finish_reason"):
                # An answer that was cut off has no end.
                outcome["error"] = ""
        if event.get("usage"):
            outcome["tokens"] = event["usage"]["completion_tokens"]
            outcome["cached_tokens"] = (event["usage"].get("prompt_tokens_details") or {}).get(
                "cached_tokens"
            )
        outcome["jaxllm"] = event.get("jaxllm") or outcome["jaxllm"]


async def open_loop(sender: Sender, requests: Sequence[Mapping[str, Any]], patience_s: float) -> None:
    """Sends each request when it is due."""
    tasks = []
    for number, request in enumerate(requests):
        await asyncio.sleep(request["time_s"] - sender.now_s())
        tasks.append(asyncio.create_task(sender.send(number, request, request["time_s"])))
    await _until(tasks, patience_s)


async def closed_loop(
    sender: Sender, requests: Sequence[Mapping[str, Any]], clients: int, duration_s: float, patience_s: float
) -> None:
    """Lets clients send, one request after another each, until the time has passed and what was sent in it is
    answered; with a duration of 0 until each was sent once. Of n clients each has every n-th request."""
    measured: set[int] = set()
    answered = asyncio.Event()

    async def client(place: int) -> None:
        own = range(place, len(requests), clients)
        for number in itertools.cycle(own) if duration_s else own:
            due_s = sender.now_s()
            if not duration_s or due_s < duration_s:
                measured.add(place)
            elif not measured:
                answered.set()
                return
            outcome = await sender.send(number, requests[number], due_s)
            measured.discard(place)
            if outcome["error"]:
                # A server that refuses is not asked in a busy loop.
                await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(client(place)) for place in range(clients)]
    if duration_s:
        await _until([asyncio.create_task(answered.wait())], duration_s + patience_s)
        await _until(tasks, 0)
        sender.outcomes[:] = [each for each in sender.outcomes if each["due_s"] < duration_s]
    else:
        await _until(tasks, patience_s)


async def _until(tasks: Sequence["asyncio.Task[Any]"], limit_s: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=limit_s)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Carries out a job (see `send`)."""
    import httpx

    # A connection for each request: a server that closes one while the next request is on its way over it, as
    # llama.cpp's does, would have failed to answer.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=job["url"], timeout=None, limits=limits) as client:
        sender = Sender(client, time.perf_counter())
        watching = asyncio.ensure_future(sender.watch())
        if job.get("clients"):
            await closed_loop(sender, job["requests"], job["clients"], job["duration_s"], job["patience_s"])
        else:
            await open_loop(sender, job["requests"], job["patience_s"])
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    return sender.outcomes


if __name__ == "__main__":
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)
