"""An app that uses contexts until it is killed, and what must be true afterwards.

Each life is a process of its own that opens all that serves contexts, as a device does after a crash. What it
says of itself is one message per deed, before it and after it, so that whoever kills it knows what had
ended and what was under way.
"""

import contextlib
import dataclasses
import os
import random
from multiprocessing.connection import Connection
from pathlib import Path

from jaxllm import Engine
from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.kv.chunks import CHUNK_TOKENS
from jaxllm.serving.contexts import saving
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.store import ContextStore
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions
from tests.serving.contexts.killed import said_until_killed

_APPS = ("mail", "calendar")
# What many contexts begin with.
_COMMON = tuple(range(40, 40 + 2 * CHUNK_TOKENS))
_MOST_CONTEXTS = 5


@dataclasses.dataclass
class Known:
    """What is known of a store from outside.

    Attributes:
      tokens: of each context, as its last deed left it.
      deeds: that ended, over all lives.
      checked: answers that were compared with those of an engine that had never stopped.
    """

    tokens: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    deeds: int = 0
    checked: int = 0


def live_and_die(
    known: Known,
    root: Path,
    bundle: Path,
    options: EngineOptions,
    *,
    seed: int,
    after_s: float,
    cache: Path,
) -> None:
    """One life: it is killed so long after its service has opened, and then the store is looked at.

    Args:
      known: of the store so far.
      root: of the store.
      bundle: the model.
      options: of its engine.
      seed: of what is done.
      after_s: until the kill.
      cache: where lives find each other's compiled buckets.

    Raises:
      AssertionError: something older was lost, or the store is not whole.
    """
    deed, under_way = "", None
    for what, *rest in said_until_killed(_live, root, bundle, options, seed, cache, after_s=after_s):
        if what == "begin":
            deed, under_way = rest
        else:
            name, tokens = rest
            known.deeds += 1
            known.checked += deed == "check"
            if tokens is None:
                known.tokens.pop(name, None)
            else:
                known.tokens[name] = tokens
            under_way, deed = None, ""
    _look(known, root, under_way, new_one=deed == "new")


def _look(known: Known, root: Path, under_way: str | None, *, new_one: bool) -> None:
    with ContextStore(root) as store:
        assert store.verify() == []
        store.sweep()
        assert store.verify() == []
        for record in store.records():
            folder = root / f"app-{record.app}" / record.name
            left = {each.name for each in folder.iterdir()}
            assert left == set(record.segments), "files that no record names"
        there = {record.name: record for record in store.records()}
    for record in there.values():
        assert LOST not in record.bits
    for name, tokens in known.tokens.items():
        if name != under_way:
            assert there[name].tokens == tokens, f"{name} is not what it was"
        elif name in there:
            # What was under way may have ended before that was said.
            assert _goes_on(tokens, there[name].tokens), f"{name} has lost what was said before"
    more = set(there) - set(known.tokens)
    assert len(more) <= new_one, "contexts that nobody made"
    known.tokens = {name: record.tokens for name, record in there.items()}


def _goes_on(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a context holds what it held before, or slid: then its first chunk, and of its newest tokens
    those that an answer left."""
    slid = (
        before[:CHUNK_TOKENS] == after[:CHUNK_TOKENS]
        and before[kept:] == after[CHUNK_TOKENS : CHUNK_TOKENS + len(before) - kept]
        for kept in range(CHUNK_TOKENS, len(before) + 1)
    )
    return after[: len(before)] == before or any(slid)


def _live(said: Connection, root: Path, bundle: Path, options: EngineOptions, seed: int, cache: Path) -> None:
    """Uses contexts for ever."""
    os.environ["JAXLLM_CACHE"] = os.fspath(cache)
    try:
        draw = random.Random(seed)
        # Contexts of a few chunks are rewritten as one segment, too.
        saving._MOST_SEGMENTS = 2
        engine = Engine.open(bundle, options=options)
        contexts = Contexts(engine, ContextOptions(folder=root, budget_bytes=1 << 18))
        said.send(("open",))
        while True:
            _act(said, contexts, draw)
    except Exception as error:
        said.send(("failed", repr(error)))


def _act(said: Connection, contexts: Contexts, draw: random.Random) -> None:
    records = contexts.store.records()
    if len(records) < 2:
        deed = "new"
    elif len(records) > _MOST_CONTEXTS:
        deed = "delete"
    else:
        deeds = ["say", "check", "slide", "stream", "pin", "new", "delete"]
        # What comes back is exact with chunks as they are alone.
        exact = contexts.engine.options.kv_codec == "raw"
        deed = draw.choices(deeds, [10, 3 * exact, 2, 2, 2, 2, 1])[0]
    if deed == "new":
        said.send(("begin", deed, None))
        made = contexts.create(draw.choice(_APPS))
        said.send(("end", made.name, made.tokens))
        return
    record = draw.choice(records)
    context = Context(contexts, record)
    said.send(("begin", deed, record.name))
    if deed == "delete":
        context.delete()
        said.send(("end", record.name, None))
        return
    if deed == "pin":
        # One context more than its app may pin stays as it is.
        with contextlib.suppress(BudgetExceeded):
            context.pin(draw.random() < 0.3)
    else:
        prompt = [draw.randrange(250) for _ in range(draw.randint(1, 30))]
        if not record.tokens and draw.random() < 0.5:
            prompt = [*_COMMON, *prompt]
        # One that outgrows the window, or a few words.
        count = contexts.engine.options.context_tokens if deed == "stream" else 4
        _say(contexts, context, prompt, count, check=deed == "check", slide=deed in ("slide", "stream"))
    said.send(("end", record.name, context.tokens))


def _say(
    contexts: Contexts, context: Context, prompt: list[int], count: int, *, check: bool, slide: bool
) -> None:
    room = contexts.engine.options.context_tokens - len(context.tokens)
    slide = slide or len(prompt) + 8 > room
    before = context.tokens
    answer = context.generate(prompt, max_tokens=count, ignore_eos=True, slide=slide).result()
    if check and not slide:
        # What came back is what a prefill of the same tokens would have made.
        config = GenerationConfig(max_tokens=4, ignore_eos=True)
        wanted = contexts.engine.generate([*before, *prompt], config).tokens
        if answer.tokens != wanted:
            raise ConfigError(f"{context.name} goes on with {answer.tokens}, not {wanted}")
