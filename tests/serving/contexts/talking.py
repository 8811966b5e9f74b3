"""Contexts that are talked to, and what they would answer if nothing ever left the cache."""

import contextlib

import numpy as np

from jaxllm.contexts.recompute import Delay
from jaxllm.serving.contexts.context import Context
from jaxllm.serving.contexts.manager import Contexts
from jaxllm.serving.contexts.memory import Delays
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.engine.request import GenerationConfig, Session

C = 16
DRAW = np.random.default_rng(5)
# Nothing is computed that can be read.
READ = Delays(read=Delay(fixed_ms=0.0, per_unit_ms=1e-9), compute=Delay(fixed_ms=9.0, per_unit_ms=9.0))
TURNS = [[DRAW.integers(0, 250, size).tolist() for size in (37, 5, 21)] for _ in range(3)]


@contextlib.contextmanager
def reopening(opened):
    """A way to open contexts by `opened`, which closes those that it opened before; at the end the last."""
    there = []

    def again(*arguments, **options):
        while there:
            there.pop().close()
        there.append(opened(*arguments, **options))
        return there[-1]

    try:
        yield again
    finally:
        while there:
            there.pop().close()


def kept_by(engine, folder):
    """A way to open an engine's contexts in a folder, by their options (see `reopening`)."""
    return reopening(lambda **options: Contexts(engine, ContextOptions(folder=folder, **options)))


def new(contexts, app="mail", **options):
    return Context(contexts, contexts.create(app, **options))


def found(contexts, context):
    return Context(contexts, contexts.record(context.app, context.name))


def say(context, turn, count=6):
    """What is answered to token ids."""
    return context.generate(turn, max_tokens=count, ignore_eos=True).result()


def begun(kept, *arguments, **options):
    """Contexts that are opened, one that has answered a turn, whose chunks are written, and what it should
    answer to three."""
    contexts = kept(*arguments, **options)
    wanted = answers_without_contexts(contexts.engine, TURNS[0])
    context = new(contexts)
    assert say(context, TURNS[0][0]).tokens == wanted[0]
    contexts.store.wait()
    return contexts, context, wanted


def answers_without_contexts(engine, turns, count=6):
    """The conversation with a cache that stays."""
    session, tokens, answers = Session(), [], []
    for turn in turns:
        tokens += turn
        config = GenerationConfig(max_tokens=count, ignore_eos=True)
        answers.append(engine.stream(tokens, config, session=session).result().tokens)
        tokens += answers[-1]
    return answers


def damaged(contexts, context, chunk, layer=1):
    """Changes a byte of a stored chunk."""
    folder = contexts.store.root / "app-mail" / context.name
    blob = contexts.store.open(context.name).read(layer, [chunk])[0].tobytes()
    for path in folder.glob("*.kv"):
        raw = bytearray(path.read_bytes())
        at = raw.find(blob)
        if at >= 0:
            raw[at + 7] ^= 255
            path.write_bytes(raw)
            return
    raise AssertionError("the chunk is in no file")
