"""Contexts with a past: computed once, then kept by each system its own way."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from benchmarks.contexts.forms import copied
from jaxllm.kv.cache import KVCache
from serving.contexts.context import Context
from serving.contexts.manager import Contexts
from serving.engine import Engine
from serving.generation import Session
from serving.progress import Progress

# Of every tokenizer the first ids are special ones.
_FIRST_TOKEN = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Histories:
    """What was said in some contexts, and the keys and values of it.

    Attributes:
      tokens: of each context.
      caches: of each, with all of its tokens.
    """

    tokens: Sequence[list[int]]
    caches: Sequence[KVCache]

    @classmethod
    def compute(
        cls, engine: Engine, lengths: Sequence[int], seed: int, progress: Progress | None = None
    ) -> "Histories":
        """Draws tokens and feeds them.

        Args:
          engine: keeps contexts, by whatever codec: keys and values do not depend on it.
          lengths: tokens of each context.
          seed: of the draw.
          progress: called with ("prefill", tokens fed, tokens in all).
        """
        draw, table = np.random.default_rng(seed), engine.table
        tokens, caches, done = [], [], 0
        for length in lengths:
            ids = random_tokens(engine, length, draw)
            _, cache = table.prefill(table.start(engine.options.context_tokens), ids, 0)
            tokens.append(ids)
            caches.append(jax.block_until_ready(cache))
            done += length
            if progress is not None:
                progress("prefill", done, sum(lengths))
        return cls(tokens, caches)

    def first(self, lengths: Sequence[int]) -> "Histories":
        """The beginnings of so many of them, each of a length."""
        kept = zip(self.tokens, self.caches, lengths, strict=False)
        # Rows behind a context's length are never looked at.
        found = [(ids[:length], dataclasses.replace(c, length=np.int32(length))) for ids, c, length in kept]
        return Histories(*map(list, zip(*found, strict=True)))

    def keep(self, contexts: Contexts) -> list[Context]:
        """Contexts with these pasts, as if a call had just ended in each, the last one last."""
        made = []
        for tokens, cache in zip(self.tokens, self.caches, strict=True):
            context = Context(contexts, contexts.create("bench"))
            session, length = Session(), len(tokens)
            turn = contexts.begin("bench", context.name, session, prompt_tokens=length, most_tokens=length)
            # A copy: graphs take what they are given.
            session.tokens, session.cache = list(tokens), copied(cache)
            contexts.finish(turn, tokens, 0)
            made.append(context)
        return made


def random_tokens(engine: Engine, count: int, draw: np.random.Generator) -> list[int]:
    """Tokens at random: neither the speed nor the size of a context depends on what they say."""
    return draw.integers(_FIRST_TOKEN, engine.cfg.vocab_size, count).tolist()
