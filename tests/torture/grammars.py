"""Sends hostile grammars to a service while other apps' answers stream: each is answered or refused in time,
and no stream waits."""

import asyncio
import dataclasses
import random
import time
from pathlib import Path

from jaxllm import EngineOptions, GenerationConfig
from jaxllm.errors import ConfigError, JaxllmError
from jaxllm.sampling_state import Sampling
from jaxllm.serving.guided.compiler import REPLY_S
from jaxllm.serving.guided.grammar import Grammar
from jaxllm.serving.server.calls import Call, Piece
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.serving.server.service import LLMService
from tests.serving.server.services import make_executor
from tests.torture.hostile_grammars import hostile
from tests.torture.outcome import Outcome, Tally

# A stream's text may pause for so long, and a call with a grammar take so long: its own compilation, that of
# others before it, and a few tokens.
MOST_GAP_S, MOST_CALL_S = 0.25, 4 * REPLY_S
# A stream rests for so long between two answers, and what only sleeps sleeps so long.
_REST_S, _NAP_S, _ALONE_S = 0.3, 0.005, 5.0
_PERSON = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, '
    '"required": ["name", "age"], "additionalProperties": false}'
)


@dataclasses.dataclass
class Streams:
    """What streams of other apps have seen.

    Attributes:
      gaps_s: between two pieces of an answer's text, by app.
      pauses_s: for which a task that only sleeps was late: pauses of the machine, not of the engine.
      engine_s: processor time of the engine's thread between two dispatches, one included.
      alone: what was reported before the first grammar.
    """

    gaps_s: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    pauses_s: list[float] = dataclasses.field(default_factory=lambda: [0.0])
    engine_s: list[float] = dataclasses.field(default_factory=lambda: [0.0])
    alone: str = ""
    _seen_s: float = 0.0

    def dispatched(self, dispatch) -> None:
        """See `DispatchObserver`."""
        del dispatch
        now_s = time.thread_time()
        self.engine_s.append(now_s - self._seen_s)
        self._seen_s = now_s

    def clear(self) -> None:
        """Begins anew, and remembers what was reported so far."""
        self.alone = self.report()
        self.gaps_s.clear()
        self.pauses_s, self.engine_s = [0.0], [0.0]

    def report(self) -> str:
        """The longest of each."""
        longest = {app: f"{1000 * max(gaps):.0f} ms of {len(gaps)}" for app, gaps in self.gaps_s.items()}
        return (
            f"longest gaps {longest}, pauses of the machine {1000 * max(self.pauses_s):.0f} ms, "
            f"the engine's thread {1000 * max(self.engine_s):.0f} ms of {len(self.engine_s)}"
        )


def send_grammars(
    model: Path | None,
    tally: Tally,
    *,
    cases: int,
    seed: int,
    lanes: int = 2,
    context_tokens: int = 256,
) -> Streams:
    """Sends so many grammars, while two others stream: plain text, and JSON of a schema.

    Args:
      model: a bundle; None for the packaged one.
      tally: counts what came of it: a stream's longest gap is a case, too.
      cases: how many.
      seed: of the grammars.
      lanes: at a time, each of an app.
      context_tokens: of the engine.
    """
    options = EngineOptions(context_tokens=context_tokens, buckets_bytes=0)
    service, streams = LLMService.open(model, options=options), Streams()
    executor = make_executor(service, SchedulerOptions(), on_dispatch=streams.dispatched)
    executor.start()
    try:
        asyncio.run(_send(executor, streams, tally, seed, cases, lanes))
    finally:
        executor.stop(0)
        service.close()
    for app, gaps in streams.gaps_s.items():
        ending = "ok" if max(gaps) <= MOST_GAP_S + max(streams.pauses_s) else "wrong"
        tally.add(f"stream of {app}", str(seed), Outcome(ending=ending, says=streams.report()))
    return streams


async def _send(executor, streams, tally, seed, cases, lanes) -> None:
    stop, left = asyncio.Event(), iter(range(cases))
    others = [
        asyncio.create_task(_stream(executor, streams, stop, "text", None)),
        asyncio.create_task(
            _stream(executor, streams, stop, "json", Grammar(kind="json_schema", text=_PERSON))
        ),
    ]
    others.append(asyncio.create_task(_sleep(streams, stop)))
    # In their first answers processes start, and buckets are rehearsed; then they are watched alone.
    await asyncio.sleep(_ALONE_S)
    streams.clear()
    await asyncio.sleep(_ALONE_S)
    streams.clear()

    async def lane(app: str) -> None:
        for number in left:
            each = f"{seed}:{number}"
            kind, text = await asyncio.to_thread(hostile, random.Random(each))
            tally.add(kind, each, await _sent(executor, app, kind, text), case=text)

    await asyncio.gather(*(lane(f"hostile-{each}") for each in range(lanes)))
    stop.set()
    await asyncio.gather(*others)


async def _sent(executor, app: str, kind: str, text: str) -> Outcome:
    """How a call with a grammar ends."""
    began = time.perf_counter()
    try:
        grammar = Grammar(kind=kind, text=text)
        # As callers of the service are answered: what is wrong with a grammar is the caller's.
        async with asyncio.timeout(MOST_CALL_S):
            await _read(executor, app, grammar, tokens=6)
        ending, says = "ok", ""
    except ConfigError as error:
        ending, says = "refused", str(error)
    except TimeoutError:
        ending, says = "hang", f"no end within {MOST_CALL_S:g} s"
    except (JaxllmError, Exception) as error:
        ending, says = "uncaught", f"{type(error).__name__}: {error}"
    return Outcome(ending=ending, says=says[:300], took_s=time.perf_counter() - began)


async def _stream(executor, streams, stop, app, grammar) -> None:
    while not stop.is_set():
        last = None
        async for now in _pieces(executor, app, grammar, tokens=80):
            if last is not None:
                streams.gaps_s.setdefault(app, []).append(now - last)
            last = now
        await asyncio.sleep(_REST_S)


async def _sleep(streams, stop) -> None:
    while not stop.is_set():
        began = time.perf_counter()
        await asyncio.sleep(_NAP_S)
        streams.pauses_s.append(time.perf_counter() - began - _NAP_S)


async def _read(executor, app, grammar, tokens) -> None:
    async for _ in _pieces(executor, app, grammar, tokens):
        pass


async def _pieces(executor, app, grammar, tokens):
    """The times of an answer's pieces."""
    config = GenerationConfig(
        max_tokens=tokens, ignore_eos=grammar is None, sampling=Sampling(temperature=1.0), grammar=grammar
    )
    call = Call(app=app, request_id="1", prompt="Once upon a time", config=config)
    ticket = executor.submit(call, asyncio.get_running_loop())
    try:
        async for event in ticket.events():
            if isinstance(event, Piece):
                yield time.perf_counter()
    finally:
        ticket.cancel()
