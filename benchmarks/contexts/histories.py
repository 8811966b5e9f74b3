"""Computes contexts with a history once, for every system to store and keep."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from benchmarks.contexts.encodings import copied
from jaxllm.kv.cache import KVCache
from serving.buckets.bucket import no_chunks
from serving.contexts.context import Context
from serving.contexts.manager import Contexts
from serving.engine import Engine
from serving.host.progress import Progress
from serving.request import Session
from serving.runners.runner import prefill_prompt

# The first ids of every tokenizer are special tokens.
_FIRST_TOKEN = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Histories:
    """The tokens of some contexts, and their keys and values.

    Attributes:
      tokens: of each context.
      caches: of each context, with all of its tokens.
    """

    tokens: Sequence[list[int]]
    caches: Sequence[KVCache]

    @classmethod
    def compute(
        cls, engine: Engine, lengths: Sequence[int], seed: int, progress: Progress | None = None
    ) -> "Histories":
        """Draws tokens and feeds them.

        Args:
          engine: keeps contexts; keys and values do not depend on its codec.
          lengths: tokens of each context.
          seed: of the draw.
          progress: called with ("prefill", tokens fed, tokens in all).
        """
        draw, runner = np.random.default_rng(seed), engine.runner
        tokens, caches, done = [], [], 0
        for length in lengths:
            ids = random_tokens(engine, length, draw)
            _, cache = prefill_prompt(runner, runner.start(engine.options.context_tokens), ids, 0)
            tokens.append(ids)
            caches.append(jax.block_until_ready(cache))
            done += length
            if progress is not None:
                progress("prefill", done, sum(lengths))
        return cls(tokens, caches)

    def repeated(self, times: int) -> "Histories":
        """The same contexts so many times, in the same memory."""
        return Histories(times * list(self.tokens), times * list(self.caches))

    def first(self, lengths: Sequence[int]) -> "Histories":
        """The beginnings of the first contexts, each of its length."""
        kept = zip(self.tokens, self.caches, lengths, strict=False)
        # Attention never reads behind a context's length.
        found = [(ids[:length], dataclasses.replace(c, length=np.int32(length))) for ids, c, length in kept]
        return Histories(*map(list, zip(*found, strict=True)))

    def keep(self, contexts: Contexts) -> list[Context]:
        """Contexts with these histories, as if a call had just ended in each, in order."""
        made = []
        for tokens, cache in zip(self.tokens, self.caches, strict=True):
            context = Context(contexts, contexts.create("bench"))
            session, length = Session(), len(tokens)
            turn = contexts.begin("bench", context.name, session, prompt_tokens=length, most_tokens=length)
            if contexts.engine.options.attend_coded and cache.coded is None:
                cache = dataclasses.replace(cache, coded=no_chunks(contexts.engine.options))
            # A copy: dispatches donate the cache.
            session.tokens, session.cache = list(tokens), copied(cache)
            contexts.finish(turn, tokens, 0)
            made.append(context)
        return made


def random_tokens(engine: Engine, count: int, draw: np.random.Generator) -> list[int]:
    """Random tokens: neither the speed nor the size of a context depends on its text."""
    return draw.integers(_FIRST_TOKEN, engine.cfg.vocab_size, count).tolist()
