"""Processes that use contexts until they are killed, what they say of themselves until then, and what must be
true afterwards: nothing older is lost, and nothing is left that no record names.

A life is an app over an engine, which it opens as a device does after a crash. Contexts begin with chunks of
others, go on, slide, are pinned, deleted and rewritten as one segment.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxllm import Engine
from jaxllm.contexts.recompute import LOST
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.serving.contexts import saving
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.store import ContextStore
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions
from tests.faults import KillingDevice

# Children of a process that has everything imported and no thread: each begins at once.
SERVER = multiprocessing.get_context("forkserver")
# Until it is open.
_PATIENCE_S = 120


@dataclasses.dataclass
class Told:
    """What is known of a store from outside, over all lives: the tokens of each context, as its last deed
    left it; and how many deeds ended, lives, and answers that were compared."""

    tokens: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    deeds: int = 0
    checked: int = 0
    lives: int = 0


def live_and_die(
    told: Told,
    life: Callable[..., None],
    root: Path,
    *arguments: Any,
    after_s: float | None,
) -> None:
    """One life, that is killed at some moment after its store has opened; then the store is looked at.

    Args:
      told: of the store so far.
      life: of a process: it says ("open",), and of each deed ("begin", what, context, the tokens that it
        will have; ... if nobody knows) and ("end", context, its tokens; None if it is gone). It never ends by
        itself; where it cannot go on it says ("failed", why).
      root: of the store.
      arguments: for the life, after these.
      after_s: from when it is open to its kill; None for one that kills itself.

    Raises:
      AssertionError: it failed, something older was lost, or something is left that no record names.
    """
    under_way: tuple[Any, ...] = ("", "", None)
    for what, *rest in _said_until_killed(life, (root, *arguments), after_s):
        if what == "begin":
            under_way = tuple(rest)
            continue
        told.deeds += 1
        told.checked += under_way[0] == "check"
        told.tokens |= {rest[0]: rest[1]}
        if rest[1] is None:
            del told.tokens[rest[0]]
        under_way = ("", "", None)
    told.lives += 1
    _look(told, root, under_way)


def _look(told: Told, root: Path, under_way: tuple[Any, ...]) -> None:
    with ContextStore(root) as store:
        assert store.damage() == []
        store.sweep()
        there = {record.name: record for record in store.records()}
        wanted = {"catalog.sqlite", "catalog.sqlite-wal", "lock"}
        for record in there.values():
            wanted |= {f"app-{record.app}/{record.name}/{each}" for each in record.segments}
        left = {str(each.relative_to(root)) for each in root.rglob("*") if each.is_file()}
        assert left == wanted, "files that no record names"
        for record in there.values():
            assert LOST not in record.bits
        assert store.verify() == []
    deed, name, coming = under_way
    for each, tokens in told.tokens.items():
        # What was under way may have ended before that was said.
        if each != name:
            assert there[each].tokens == tokens, f"{each} is not what it was"
        elif each not in there:
            assert deed == "delete"
        else:
            now = there[each].tokens
            assert now in (tokens, coming) or (coming is ... and _goes_on(tokens, now)), f"{each} is neither"
    assert len(set(there) - set(told.tokens)) <= (deed == "new"), "contexts that nobody made"
    told.tokens = {each: record.tokens for each, record in there.items()}


def _goes_on(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a context holds what it held before, or slid: then its first chunk, and of its newest tokens
    those that an answer left."""
    slid = (
        before[:CHUNK_TOKENS] == after[:CHUNK_TOKENS]
        and before[kept:] == after[CHUNK_TOKENS : CHUNK_TOKENS + len(before) - kept]
        for kept in range(CHUNK_TOKENS, len(before) + 1)
    )
    return after[: len(before)] == before or any(slid)


def _said_until_killed(
    life: Callable[..., None], arguments: tuple[Any, ...], after_s: float | None
) -> list[Any]:
    """What a life said after ("open",), until it was killed."""
    SERVER.set_forkserver_preload([life.__module__])
    ours, theirs = SERVER.Pipe(duplex=False)
    child = SERVER.Process(target=life, args=(theirs, *arguments))
    child.start()
    theirs.close()
    try:
        assert ours.poll(_PATIENCE_S), "the store does not open"
        opened = ours.recv()
        assert opened == ("open",), opened
        time.sleep(after_s or 0)
        said = _rest(ours) if after_s is None else []
    finally:
        # One that has failed already says why below.
        with contextlib.suppress(ProcessLookupError):
            if child.pid is not None:
                os.kill(child.pid, signal.SIGKILL)
        child.join()
    said = said or _rest(ours)
    ours.close()
    failed = [each for each in said if each[0] == "failed"]
    assert not failed, failed
    assert child.exitcode == -signal.SIGKILL, f"it ended by itself: exit code {child.exitcode}"
    return said


def _rest(ours: Any) -> list[Any]:
    """All that is still to be read; the last message may be cut off by the kill."""
    said: list[Any] = []
    with contextlib.suppress(EOFError, OSError):
        while True:
            said.append(ours.recv())
    return said


_APPS, _MOST_CONTEXTS = ("mail", "calendar"), 5
# What many contexts begin with.
CHUNK_TOKENS = EngineOptions.kv_chunk_tokens
_COMMON = tuple(range(40, 40 + 2 * CHUNK_TOKENS))


def use_contexts(
    said: Connection, root: Path, bundle: Path, options: EngineOptions, cache: Path, seed: int, at: int | None
) -> None:
    """Uses contexts for ever, or until the file operation or statement of the catalog with number `at`, which
    does not come; in `cache` lives find each other's compiled buckets."""
    os.environ["JAXLLM_CACHE"] = os.fspath(cache)
    try:
        draw = random.Random(seed)
        # Contexts of a few chunks are rewritten as one segment, too.
        saving._MAX_SEGMENTS = 2
        engine = Engine.open(bundle, options=options)
        contexts = Contexts(engine, ContextOptions(folder=root, budget_bytes=1 << 18))
        said.send(("open",))
        with KillingDevice(root, at):
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
        said.send(("begin", deed, "", ()))
        made = contexts.create(draw.choice(_APPS))
        said.send(("end", made.name, made.tokens))
        return
    record = draw.choice(records)
    context = Context(contexts, record)
    # What an answer will say, nobody knows before.
    said.send(("begin", deed, record.name, {"delete": None, "pin": record.tokens}.get(deed, ...)))
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
