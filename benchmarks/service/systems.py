"""Draws what the apps send, and describes the systems: how each server is started, and how each is asked.

Times, prompts and lengths of answers are drawn, or from a real trace. Six apps, one per objective of ELMS
(arXiv 2409.09071, section 5.1), call equally often. About half of their calls continue the app's last
conversation, and send all of it again, as clients of chats do. Prompts are random tokens: no system's speed
depends on them. What a conversation was answered is drawn, too, so that what can be reused of it are its
earlier prompts.

Ours runs as `jaxllm serve` does without options, and an ablation changes one of them. llama.cpp's server runs
the same weights at the same width; it is the binary `llama-server`, with as many slots as ours decodes
together, or the one of `llama-cpp-python`, which answers one request at a time.

Each server has a process, a port and cores of its own. Starts of a service to its first token are timed with
compiled buckets and the device's profile on disk. A client tries from the first moment on, as one does that
has just started the service: until there is a socket, and then until calls are no longer refused with
"loading".
"""

import contextlib
import dataclasses
import json
import math
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.report import OURS, Row, row
from benchmarks.peers.llama import FORMATS, gguf_of, refusal, text_of_token
from benchmarks.peers.peer import missing_packages
from benchmarks.peers.process import PeerFailed, Process
from benchmarks.traces import Lengths, read_azure, read_mooncake
from jaxllm.elastic.slo import SLOS
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.serving.host.progress import Progress

if TYPE_CHECKING:
    import httpx


APPS = tuple(f"app-{number}" for number in range(1, len(SLOS) + 1))
# The first ids of every tokenizer are special tokens.
FIRST_TOKEN = 16
LEAST_PROMPT_TOKENS, LEAST_ANSWER_TOKENS = 16, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What one client sends.

    Attributes:
      time_s: when, in seconds from the beginning; 0 where clients wait for answers.
      app: number of the app in `APPS`, and of its objective in `SLOS`.
      prompt: token ids.
    """

    time_s: float = 0.0
    app: int
    prompt: tuple[int, ...]
    answer_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Lengths to draw from: log-normal around the medians, as those of real services are.

    Attributes:
      prompt_tokens, answer_tokens: medians.
      deviation: of the logarithms.
      context_tokens: most tokens of prompt and answer together.
    """

    prompt_tokens: int
    answer_tokens: int
    deviation: float = 0.5
    context_tokens: int
    vocab_size: int

    def __post_init__(self) -> None:
        least = LEAST_PROMPT_TOKENS + LEAST_ANSWER_TOKENS
        if self.context_tokens < 2 * least or self.vocab_size <= FIRST_TOKEN:
            raise ConfigError(
                f"bench service needs a context of {2 * least} tokens and a vocabulary of more than "
                f"{FIRST_TOKEN}, got {self.context_tokens} and {self.vocab_size}; measure a larger model"
            )

    def within(self, prompt: float, answer: float) -> Lengths:
        """Lengths that fit the context: at most half of it for the answer."""
        answer_tokens = min(max(LEAST_ANSWER_TOKENS, round(answer)), self.context_tokens // 2)
        most = self.context_tokens - answer_tokens
        return min(max(LEAST_PROMPT_TOKENS, round(prompt)), most), answer_tokens


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """Times and lengths of the requests of a trace, in the order of their times."""

    times_s: Sequence[float]
    lengths: Sequence[Lengths]

    def __post_init__(self) -> None:
        if len(self.times_s) < 2:
            raise ConfigError("a trace of arrivals needs at least two requests")

    @classmethod
    def read(cls, path: Path) -> "Arrivals":
        """Reads a trace of Azure's LLM inference service (.csv) or of Mooncake (.jsonl)."""
        if path.suffix not in (".csv", ".jsonl"):
            raise ConfigError(f"{path}: a trace is Azure's .csv or Mooncake's .jsonl")
        requests = sorted((read_azure if path.suffix == ".csv" else read_mooncake)(path))
        return cls([time for time, _ in requests], [lengths for _, lengths in requests])


def draw_lengths(sizes: Sizes, count: int, draw: random.Random) -> list[Lengths]:
    """Lengths of `count` requests."""
    mu = math.log(sizes.prompt_tokens), math.log(sizes.answer_tokens)
    return [sizes.within(*(math.exp(draw.gauss(each, sizes.deviation)) for each in mu)) for _ in range(count)]


def poisson(sizes: Sizes, *, rate_per_s: float, duration_s: float, seed: int) -> list[Request]:
    """Requests of a Poisson process."""
    draw = random.Random(seed)
    times = [draw.expovariate(rate_per_s)]
    while times[-1] < duration_s and len(times) < 100_000:
        times.append(times[-1] + draw.expovariate(rate_per_s))
    del times[-1]
    return _requests(sizes, times, draw_lengths(sizes, len(times), draw), seed)


def from_trace(
    sizes: Sizes, arrivals: Arrivals, *, rate_per_s: float, duration_s: float, seed: int
) -> tuple[list[Request], float]:
    """Requests that follow each other in a trace, compressed in time to a mean rate, their lengths scaled
    together so that the trace's median prompt and answer are those of the sizes.

    Args:
      duration_s: in which they are sent.
      seed: chooses which part of the trace is sent.

    Returns:
      The requests, and how many times faster than in the trace they come.
    """
    count = max(2, min(round(rate_per_s * duration_s), len(arrivals.times_s)))
    start = random.Random(seed).randrange(len(arrivals.times_s) - count + 1)
    times = arrivals.times_s[start : start + count]
    # Requests of one moment, as a trace may begin with, are spread as little as a clock shows.
    span_s = max(times[-1] - times[0], 1e-6)
    faster = span_s / duration_s
    prompts, answers = (sorted(each[side] for each in arrivals.lengths) for side in (0, 1))
    scales = (
        sizes.prompt_tokens / prompts[len(prompts) // 2],
        sizes.answer_tokens / answers[len(answers) // 2],
    )
    lengths = [
        sizes.within(prompt * scales[0], answer * scales[1])
        for prompt, answer in arrivals.lengths[start : start + count]
    ]
    return _requests(sizes, [(each - times[0]) / faster for each in times], lengths, seed), faster


def back_to_back(sizes: Sizes, *, clients: int, count: int, seed: int) -> list[Request]:
    """Requests for clients that send one as soon as the one before is answered, each the next of its own (see
    `load.closed_loop`). A client is one app's: a service shares its time among apps, and who changed to one
    that waits less would overtake others."""
    apps = [number % clients % len(APPS) for number in range(count)]
    return _requests(sizes, [0.0] * count, draw_lengths(sizes, count, random.Random(seed)), seed, apps)


def random_prompt(sizes: Sizes, tokens: int, draw: random.Random) -> tuple[int, ...]:
    """Random tokens."""
    return tuple(draw.randrange(FIRST_TOKEN, sizes.vocab_size) for _ in range(tokens))


def _requests(
    sizes: Sizes, times: Sequence[float], lengths: Sequence[Lengths], seed: int, apps: Sequence[int] = ()
) -> list[Request]:
    draw = random.Random(seed + 1)
    requests: list[Request] = []
    last: dict[int, Request] = {}
    for number, (time_s, (prompt, answer)) in enumerate(zip(times, lengths, strict=True)):
        app = apps[number] if apps else draw.randrange(len(APPS))
        said: tuple[int, ...] = ()
        new = prompt
        if app in last and draw.random() < 0.5:
            before = last[app]
            said = before.prompt + random_prompt(sizes, before.answer_tokens, draw)
            # A further turn is shorter than a first prompt.
            new = max(LEAST_PROMPT_TOKENS, round(0.25 * prompt))
            if len(said) + new + answer > sizes.context_tokens:
                said, new = (), prompt
        request = Request(
            time_s=time_s, app=app, prompt=said + random_prompt(sizes, new, draw), answer_tokens=answer
        )
        last[app] = request
        requests.append(request)
    return requests


LLAMA = "llama.cpp"
# Ablation -> the options of the service that it changes, and what it leaves out, for the user.
ABLATIONS: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "no-batching": ({"batch_rows": []}, "answers are decoded one by one"),
    "no-planning": ({"levels": [100]}, "objectives order the queue, and the whole model answers"),
    "no-prefix-reuse": ({"prefix_memory": 0}, "every prompt is computed whole"),
}
Limits = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is the same for all systems.

    Attributes:
      model: the bundle that ours serves.
      floats: a Hugging Face folder of the same weights, for peers; None where there is no peer.
      weights: width of the bundle's weights.
      context_tokens: most tokens of prompt and answer together.
      keys: of the apps, in the order of `APPS`.
    """

    model: Path
    floats: Path | None
    weights: str
    threads: int
    context_tokens: int
    folder: Path
    keys: Sequence[str]


@dataclasses.dataclass(frozen=True)
class OurService:
    """`jaxllm serve`, with options changed for an ablation."""

    ablation: str = ""

    @property
    def name(self) -> str:
        """In rows."""
        return f"{OURS}-{self.ablation}" if self.ablation else OURS

    @property
    def note(self) -> str | None:
        """How it runs; None for nothing to say."""
        return ABLATIONS[self.ablation][1] if self.ablation else None

    def start(self, given: Conditions, progress: Progress) -> "Server":
        """Starts the server: the whole profile of the device is there before anything is sent."""
        del progress
        port = free_port()
        command, environment = self.command(given, port)
        server = Server(
            self.name, command, port=port, ready="/ready", threads=given.threads, environment=environment
        )
        try:
            # A first start measures it while nothing is asked.
            server.wait_until("/health", lambda answer: answer.json()["profile"]["kind"] == "whole")
        except BaseException:
            server.close()
            raise
        return server

    def command(self, given: Conditions, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        """What starts the server on a port, and its environment."""
        options = {
            "model": str(given.model.resolve()),
            "http": f"127.0.0.1:{port}",
            "context_tokens": given.context_tokens,
            "drain_s": 0,
            **(ABLATIONS[self.ablation][0] if self.ablation else {}),
        }
        config = given.folder / f"{self.name}.toml"
        # A JSON number, text or list of them is one in TOML, too.
        config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items()))
        command = (sys.executable, "-m", "jaxllm.cli.entry", "serve", "--config", str(config))
        return command, {"JAXLLM_KEYS": str(given.folder / "keys.json")}

    def message(self, request: Request, limits_ms: Limits | None, given: Conditions) -> dict[str, Any]:
        """Headers and body of a request: an app has a key, and a call its objective in milliseconds.

        Args:
          limits_ms: most TTFT and TPOT of its answer, infinity where the app's objective has none; None for a
            request without an objective.
        """
        body: dict[str, Any] = {
            "prompt": request.prompt,
            "max_tokens": request.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if limits_ms is not None:
            objective, (ttft_ms, tpot_ms) = SLOS[request.app], limits_ms
            body["slo"] = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms} if objective.has_limit else str(objective)
        return {"headers": {"Authorization": f"Bearer {given.keys[request.app]}"}, "body": body}


@dataclasses.dataclass(frozen=True)
class LlamaServer:
    """llama.cpp's server: the binary, or llama-cpp-python's.

    Attributes:
      binary: path of `llama-server`; None for llama-cpp-python's.
    """

    binary: Path | None = None
    slots: int = 8

    @property
    def name(self) -> str:
        """See `OurService`."""
        return "llama-server" if self.binary else "llama-cpp-python"

    @property
    def note(self) -> str | None:
        """See `OurService`."""
        return f"{self.slots} slots" if self.binary else "its server answers one request at a time"

    def start(self, given: Conditions, progress: Progress) -> "Server":
        """See `OurService`."""
        assert given.floats is not None
        model = gguf_of(given.floats, FORMATS[given.weights], threads=given.threads, progress=progress)
        port, threads = free_port(), given.threads
        options: dict[str, Any] = {"model": model, "host": "127.0.0.1", "port": port}
        if self.binary:
            program: list[str] = [str(self.binary)]
            options |= {
                # The binary's context is of all slots together.
                "ctx-size": self.slots * given.context_tokens, "parallel": self.slots,
                "threads": threads, "threads-batch": threads, "gpu-layers": 0,
                # In every event; else the file's path is.
                "alias": "model",
            }  # fmt: skip
        else:
            program = [sys.executable, "-m", "llama_cpp.server"]
            options |= {
                "n_ctx": given.context_tokens, "n_threads": threads, "n_threads_batch": threads,
                "n_batch": 512, "logits_all": "false",
                # Else it ends an answer when another request comes.
                "interrupt_requests": "false",
            }  # fmt: skip
        command = [*program, *(str(word) for key, value in options.items() for word in (f"--{key}", value))]
        ready = "/health" if self.binary else "/v1/models"
        return Server(self.name, command, port=port, ready=ready, threads=threads)

    def message(self, request: Request, limits_ms: Limits | None, given: Conditions) -> dict[str, Any]:
        """See `OurService`: it knows neither apps nor objectives. llama-cpp-python's takes no token ids, but
        in our GGUF a token is a character."""
        del limits_ms, given
        prompt = request.prompt if self.binary else "".join(map(text_of_token, request.prompt))
        body = {"prompt": prompt, "max_tokens": request.answer_tokens, "temperature": 0, "stream": True}
        if self.binary:
            body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
            # Its other samplers would sort the vocabulary for each token, though the likeliest one is taken.
            body |= {"samplers": ["top_k"], "top_k": 1}
        return {"headers": {}, "body": body}


# A server that can be measured.
System = OurService | LlamaServer


def missing(binary: Path | None) -> str | None:
    """What llama.cpp's server lacks to run here; None where it runs."""
    # The binary's weights are made by llama-cpp-python's quantizer, too.
    server = () if binary else ("starlette_context", "pydantic_settings", "sse_starlette")
    absent = missing_packages("llama_cpp", "gguf", *server)
    packages = "llama-cpp-python gguf" if binary else "'llama-cpp-python[server]' gguf"
    return absent and f"not installed: {absent}; pip install {packages}"


def systems_of(
    wanted: Sequence[str], binary: Path | None, slots: int, cfg: Any
) -> tuple[list[System], list[str]]:
    """The systems to measure, ours first, and why others that may be left out are.

    Args:
      wanted: of `ABLATIONS` and `LLAMA`; empty for all that run here.
      binary: see `LlamaServer`.
      slots: see `LlamaServer`.
    """
    systems: list[System] = [OurService()]
    systems += [OurService(each) for each in ABLATIONS if each in wanted or not wanted]
    if wanted and LLAMA not in wanted:
        return systems, []
    if binary is not None and not binary.is_file():
        raise ConfigError(f"--llama-server {binary}: there is no such file")
    why = missing(binary) or refusal(cfg)
    if why is None:
        return [*systems, LlamaServer(binary, slots)], []
    if LLAMA in wanted or binary is not None:
        raise ConfigError(f"{LLAMA}: {why}")
    return systems, [f"without {LLAMA}: {why}"]


def keys_of(folder: Path) -> list[str]:
    """New keys of the apps, in a file `keys.json` of the folder."""
    from jaxllm.serving.server.identity import add_key

    return [add_key(folder / "keys.json", app)[0] for app in APPS]


# A first start compiles, and measures the device.
_START_S = 1800.0


def free_port() -> int:
    """A port of the loopback that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


class Server(Process):
    """A running server. A context manager; leaving it ends the process."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        ready: str | None = None,
        threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Starts the process and waits until it answers.

        Args:
          port: that it listens on.
          ready: a path that answers 200 once it can be called; None does not wait for it.
          threads: that it computes with, on as many cores.
        """
        self.name, self.url = name, f"http://127.0.0.1:{port}"
        super().__init__(command, threads, environment)
        try:
            if ready is not None:
                self.wait_until(ready, lambda answer: answer.is_success)
        except BaseException:
            self.close()
            raise

    def require_alive(self) -> None:
        """Raises PeerFailed where the process has ended."""
        if self._process.poll() is not None:
            raise PeerFailed(f"the server of {self.name} {self.how_it_ended()}")

    def wait_until(self, path: str, there: "Callable[[httpx.Response], bool]") -> None:
        """Asks for a path until the answer is as it should be."""
        import httpx

        late_s = time.monotonic() + _START_S
        with httpx.Client(base_url=self.url, timeout=5.0) as client:
            while time.monotonic() < late_s:
                self.require_alive()
                with contextlib.suppress(httpx.HTTPError):
                    if there(client.get(path)):
                        return
                time.sleep(0.1)
        raise PeerFailed(f"the server of {self.name} was not ready within {_START_S:.0f} s ({path})")


def require_httpx() -> None:
    """Raises JaxllmError where httpx is not installed, which sends the load."""
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        raise JaxllmError(
            "bench service needs the package httpx; run `pip install 'jaxllm[client]'`"
        ) from error


_LATE_S = 120.0


def start_rows(name: str, given: Conditions, starts: int, progress: Progress) -> list[Row]:
    """Times starts of our service, whose buckets an earlier one has left on disk."""
    times = []
    for number in range(starts):
        times.append(1000 * _first_token_s(given))
        progress("start", number + 1, starts)
    note = f"{min(times):.4g} to {max(times):.4g} of {starts}"
    return [row(f"{name}, start to the first token", "load_ms", statistics.median(times), note)]


def _first_token_s(given: Conditions) -> float:
    import httpx

    port, ours = free_port(), OurService()
    command, environment = ours.command(given, port)
    asked = {
        "headers": {"Authorization": f"Bearer {given.keys[0]}"},
        "json": {"prompt": [1, 2, 3, 4], "max_tokens": 8, "stream": True},
    }

    def has_token(client: httpx.Client) -> bool:
        """Asks once for an answer: whether its first piece has come."""
        with (
            contextlib.suppress(httpx.HTTPError),
            client.stream("POST", "/v1/completions", **asked) as answer,
        ):
            return answer.is_success and any(line.startswith("data: {") for line in answer.iter_lines())
        return False

    began = time.perf_counter()
    with (
        Server(ours.name, command, port=port, threads=given.threads, environment=environment) as server,
        httpx.Client(base_url=server.url, timeout=_LATE_S) as client,
    ):
        while not has_token(client):
            server.require_alive()
            if time.perf_counter() - began > _LATE_S:
                raise PeerFailed(f"the service gave no token within {_LATE_S:.0f} s")
            time.sleep(0.005)
        return time.perf_counter() - began
