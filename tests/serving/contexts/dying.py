"""An app that uses contexts until it is killed (see `killed.live_and_die`): each life is a process of its own
that opens all that serves contexts, as a device does after a crash."""

import contextlib
import os
import random
from multiprocessing.connection import Connection
from pathlib import Path

from jaxllm import Engine
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.kv.chunks import CHUNK_TOKENS
from jaxllm.serving.contexts import saving
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.options import EngineOptions

_APPS = ("mail", "calendar")
# What many contexts begin with.
_COMMON = tuple(range(40, 40 + 2 * CHUNK_TOKENS))
_MOST_CONTEXTS = 5


def use_contexts(
    said: Connection, root: Path, bundle: Path, options: EngineOptions, seed: int, cache: Path
) -> None:
    """Uses contexts for ever.

    Args:
      said: told of each deed.
      root: of the store.
      bundle: the model.
      options: of its engine.
      seed: of what is done.
      cache: where lives find each other's compiled buckets.
    """
    os.environ["JAXLLM_CACHE"] = os.fspath(cache)
    try:
        draw = random.Random(seed)
        # Contexts of a few chunks are rewritten as one segment, too.
        saving._MAX_SEGMENTS = 2
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
