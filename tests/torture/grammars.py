"""Sends grammars that are meant to cost (chains, diamonds, alternations, repetitions, ambiguity; whole and
mutated) to a service: each is answered or refused in time."""

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

from jaxllm import EngineOptions, GenerationConfig
from jaxllm.errors import ConfigError
from jaxllm.sampling_state import Sampling
from jaxllm.serving.guided.grammar import MAX_GRAMMAR_BYTES, Grammar
from jaxllm.serving.guided.matcher import REPLY_S
from jaxllm.serving.server.calls import Call
from jaxllm.serving.server.scheduler import SchedulerOptions
from jaxllm.serving.server.service import LLMService
from tests.serving.server.services import make_executor
from tests.torture.process import Outcome, Tally

# A call may take so long: its own compilation, that of others before it, and a few tokens.
MOST_CALL_S = 4 * REPLY_S
_LETTERS = ("a", "b", "é", "[a-z]", "[^a]", ".", "\\d", "\\w", "(?i:k)", "\\p{L}", "x{3}", "")
_SCALARS: tuple[Any, ...] = (
    {"type": "string"}, {"type": "integer"}, {"type": "number", "multipleOf": 0.01}, {}, True,
    {"enum": [1, "b", None]}, {"const": {"a": [1]}}, {"type": "string", "format": "date-time"},
    {"type": "object"}, {"type": "array"}, {"type": "integer", "minimum": -(10**18)},
)  # fmt: skip


def send_grammars(
    model: Path | None, tally: Tally, *, cases: int, seed: int, lanes: int = 2, context_tokens: int = 256
) -> None:
    """Sends so many grammars.

    Args:
      model: a bundle; None for the packaged one.
      tally: counts what came of it.
      lanes: at a time, each of an app.
    """
    options = EngineOptions(context_tokens=context_tokens, buckets_bytes=0)
    service = LLMService.open(model, options=options)
    executor = make_executor(service, SchedulerOptions())
    executor.start()

    async def send() -> None:
        left = iter(range(cases))

        async def lane(app: str) -> None:
            for number in left:
                each = f"{seed}:{number}"
                kind, text = await asyncio.to_thread(hostile, random.Random(each))
                tally.add(kind, each, await _sent(executor, app, kind, text), case=text)

        await asyncio.gather(*(lane(f"hostile-{each}") for each in range(lanes)))

    try:
        asyncio.run(send())
    finally:
        executor.stop(0)
        service.close()


async def _sent(executor: Any, app: str, kind: str, text: str) -> Outcome:
    """How a call with a grammar ends."""
    began = time.perf_counter()
    ending, says = "ok", ""
    try:
        config = GenerationConfig(
            max_tokens=6, sampling=Sampling(temperature=1.0), grammar=Grammar(kind=kind, text=text)
        )
        # As callers of the service are answered: what is wrong with a grammar is the caller's.
        async with asyncio.timeout(MOST_CALL_S):
            call = Call(app=app, request_id="1", prompt="Once upon a time", config=config)
            ticket = executor.submit(call, asyncio.get_running_loop())
            try:
                async for _ in ticket.events():
                    pass
            finally:
                ticket.cancel()
    except ConfigError as error:
        ending, says = "refused", str(error)
    except TimeoutError:
        ending, says = "hang", f"no end within {MOST_CALL_S:g} s"
    except Exception as error:
        ending, says = "uncaught", f"{type(error).__name__}: {error}"
    return Outcome(ending=ending, says=says[:300], took_s=time.perf_counter() - began)


def hostile(draw: random.Random) -> tuple[str, str]:
    """A grammar: its kind, and its text, which is not too long."""
    while True:
        kind = draw.choice(("regex", "json_schema", "lark"))
        makers = {"regex": regex, "json_schema": lambda draw: json.dumps(schema(draw)), "lark": lark}
        text = makers[kind](draw)
        for _ in range(draw.choice((0, 0, 0, 1, 2))):
            text = _mutated(draw, text)
        if len(text.encode()) <= MAX_GRAMMAR_BYTES:
            return kind, text


def regex(draw: random.Random, most: int = 40_000) -> str:
    """An expression."""
    part, count = _part(draw, draw.randrange(1, 4)), _size(draw, most // 4)
    match draw.randrange(5):
        case 0:
            return f"{part}?" * count + part * count
        case 1:
            depth = min(count, 2000)
            return "(" * depth + "|".join(f"{part}{number}" for number in range(count // 2)) + ")" * depth
        case 2:
            nested = part
            for _ in range(draw.randrange(1, 7)):
                nested = f"(?:{nested}){{0,{_size(draw, 3000)}}}"
            return nested
        case 3:
            return f"(?:{part}|{part}{part})*{part}{{{count}}}(?:{part}|b)*"
        case _:
            return "".join(f"({part}|{_part(draw, 1)})*" for _ in range(min(count, 3000)))


def schema(draw: random.Random, most: int = 1200) -> Any:
    """A schema, as JSON values."""
    count = _size(draw, most)
    match draw.randrange(5):
        case 0 | 1:
            # Definitions that name the next one, or any, once or twice.
            names = range(1, count + 1) if draw.random() < 0.7 else [draw.randrange(count + 1)] * count
            defs = {str(at): _naming(draw, f"#/$defs/{name}") for at, name in enumerate(names)}
            return {"$ref": "#/$defs/0", "$defs": {**defs, str(count): draw.choice(_SCALARS)}}
        case 2:
            inner: Any = draw.choice(_SCALARS)
            for _ in range(min(count, 400)):
                inner = draw.choice(({"items": inner, "type": "array"}, {"anyOf": [inner, {"type": "null"}]}))
            return inner
        case 3:
            names = {f"p{each}": draw.choice(_SCALARS) for each in range(count)}
            return {"type": "object", "properties": names, "required": draw.choice(([], [*names]))}
        case _:
            string = {"type": "string", "pattern": regex(draw, 4000), "maxLength": count}
            sizes = {"minItems": count * draw.choice((1, 1000)), "maxItems": count * 2000}
            return {"type": "array", "items": draw.choice((string, *_SCALARS)), **sizes}


def lark(draw: random.Random) -> str:
    """A Lark grammar."""
    count = _size(draw, 3500)
    match draw.randrange(5):
        case 0:
            most = draw.choice((count, min(count, 400)))
            rules = [f"r{each}: r{each + 1} {draw.choice(('', f'r{each + 1}'))}\n" for each in range(most)]
            return "start: r0\n" + "".join(rules) + f'r{most}: "a"\n'
        case 1:
            return "start: " + " | ".join(f'"{each}{"y" * 9}"' for each in range(count)) + "\n"
        case 2:
            return f'start: s\ns: s s | s "a" | "a" s | {" | ".join(["s s s"] * min(count, 300))} | "a"\n'
        case 3:
            expression = regex(draw, 9000).replace("/", "")
            return f"start: (%json {json.dumps(schema(draw, 600))} | T)+\nT: /{expression}/\n"
        case _:
            terminals = "".join(f"T{each}: T{each + 1} | /{_part(draw, 1)}x/\n" for each in range(count))
            return f'start: T0+\n{terminals}T{count}: "z"\n'


def _naming(draw: random.Random, reference: str) -> Any:
    """A definition that names another, once or twice."""
    following = {"$ref": reference}
    return draw.choice(
        (
            following,
            {"properties": {"a": following}},
            {"anyOf": [following, {"type": "null"}]},
            {"properties": {"a": following, "b": following}, "required": ["a", "b"]},
            {"anyOf": [{"items": following}, {"prefixItems": [following]}]},
            {"allOf": [following, following]},
        )
    )


def _part(draw: random.Random, depth: int) -> str:
    if depth == 0:
        return draw.choice(_LETTERS)
    inner = _part(draw, depth - 1)
    return draw.choice(
        (inner, f"({inner}|{_part(draw, depth - 1)})", f"({inner})*", f"({inner}){{2,9}}", f"{inner}b")
    )


def _size(draw: random.Random, most: int) -> int:
    """A size from 1 to `most`, small ones more often."""
    return max(1, int(most ** draw.random() ** 1.5))


def _mutated(draw: random.Random, text: str) -> str:
    at, other = draw.randrange(len(text) + 1), draw.randrange(len(text) + 1)
    low, high = sorted((at, min(other, at + 200)))
    if draw.random() < 0.5:
        return text[:low] + text[low:high] * draw.randrange(0, 9) + text[high:]
    return text[:at] + draw.choice([*'(){}[]|"/\\:%*+?&~\0\n', "{0,9999}", "$ref", "r0 "]) + text[at:]
