"""Decoding with programs: prefill by chunks, then a token per step, the choice of it on the host."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError, ContextOverflow
from jaxllm.programs.manifest import WHOLE, Signature
from jaxllm.sampling import SamplerState, sample
from serving.chunks import plan_chunks
from serving.programs.executor import Executor

# Programs that run a token each: text flows and a cancel is obeyed whatever this is, within reason.
_MOST_PER_CALL = 16
# What marks padding in a row of positions (see `jaxllm.programs.steps`).
_PADDING = -1


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
    """What a loop over programs is told by their manifest."""

    context_tokens: int
    chunk_tokens: tuple[int, ...]
    verify_tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ProgramCache:
    """Caches as the executor holds them, with room for `capacity_tokens` positions."""

    caches: Any
    capacity_tokens: int


class ProgramTable:
    """A `serving.generation.Decoder` over an executor, as one level of its model.

    Prefill programs give no logits, as LiteRT-LM's do not: the last token of a prompt is always decoded.

    Attributes:
      executor: runs the programs.
      level: in percent.
      cfg: the model, or the level's sub-model.
      options: see there.
      weights_version: names the weights that caches belong to.
    """

    def __init__(self, executor: Executor, level: int = WHOLE) -> None:
        """The table of a level.

        Raises:
          ConfigError: it was not exported.
        """
        manifest = executor.manifest
        if level not in manifest.levels:
            there = ", ".join(map(str, sorted(manifest.levels)))
            raise ConfigError(
                f"level {level} was not exported, only {there}; export the model with --level {level}"
            )
        self.executor, self.level = executor, level
        self.cfg: ModelConfig = manifest.levels[level].cfg
        self.options = ProgramOptions(
            manifest.context_tokens, manifest.chunk_tokens(level), manifest.verify_tokens(level)
        )
        self.weights_version = (level, 0)
        self._decoding = manifest.signature("decode", 1, level)

    @property
    def signatures(self) -> list[Signature]:
        """The programs of this level."""
        return [each for each in self.executor.manifest.signatures if each.level == self.level]

    def request_signatures(self, prompt_tokens: int) -> list[Signature]:
        """The programs that one request needs."""
        chunks = dict.fromkeys(self._chunks(prompt_tokens - 1))
        return [*(self._program("prefill", each) for each in chunks), self._decoding]

    def start(self, tokens: int) -> ProgramCache:
        """See `Decoder`."""
        return self.make_room(
            ProgramCache(self.executor.start(self.level), self.options.context_tokens), tokens
        )

    def make_room(self, cache: ProgramCache, tokens: int) -> ProgramCache:
        """See `Decoder`: programs have caches of one length.

        Raises:
          ContextOverflow: it is too short.
        """
        if tokens > cache.capacity_tokens:
            raise ContextOverflow(
                f"{tokens} tokens do not fit; the programs' caches hold {cache.capacity_tokens}: export the "
                "model with a longer --context"
            )
        return cache

    def prefill(self, cache: ProgramCache, tokens: Sequence[int], at: int) -> tuple[Any, ProgramCache]:
        """Feeds `tokens` at position `at`: logits `[1, V]` after the last, cache."""
        caches, position = cache.caches, 0
        for chunk in self._chunks(len(tokens) - 1):
            row = np.zeros((1, chunk), np.int32)
            places = np.full(chunk, _PADDING, np.int32)
            part = tokens[position : min(position + chunk, len(tokens) - 1)]
            row[0, : len(part)] = part
            places[: len(part)] = np.arange(at + position, at + position + len(part))
            _, caches = self.executor.run(self._program("prefill", chunk), caches, row, places)
            position += len(part)
        logits, caches = self._decode_one(caches, tokens[-1], at + len(tokens) - 1)
        return logits, dataclasses.replace(cache, caches=caches)

    def sample(self, logits: Any, sampler: SamplerState) -> tuple[np.ndarray, SamplerState]:
        """The next token `[1]`, and the sampler. The likeliest is found without a dispatch."""
        if not sampler.penalized and sampler.temperature <= 0:
            return np.asarray(logits).argmax(axis=-1).astype(np.int32), sampler
        token, sampler = _sampling()(logits, sampler)
        return np.asarray(token), sampler

    def decode_limit(self, pace: int, remaining: int) -> int:
        """See `Decoder`."""
        return min(pace, _MOST_PER_CALL, remaining)

    def decode(
        self,
        token: Any,
        cache: ProgramCache,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
        held: Sequence[int] = (),
    ) -> tuple[np.ndarray, int, ProgramCache, SamplerState]:
        """See `Decoder`: a step for each token, until one of them stops."""
        stops, said, caches = set(stop_ids.tolist()), [int(np.asarray(token)[0])], cache.caches
        while len(said) <= limit and (len(said) == 1 or said[-1] not in stops):
            logits, caches = self._decode_one(caches, said[-1], len(held) + len(said) - 1)
            chosen, sampler = self.sample(logits, sampler)
            said.append(int(chosen[0]))
        rows = np.array([said[1:]], np.int32)
        return rows, rows.shape[1], dataclasses.replace(cache, caches=caches), sampler

    def score(self, tokens: Sequence[int], targets: Sequence[int]) -> np.ndarray:
        """Log-probability (natural) `[tokens]` of each target after its token and all tokens before it.

        By the largest program that verifies, or token by token where there is none.
        """
        sizes = self.options.verify_tokens
        caches, scores = self.executor.start(self.level), []
        size = sizes[-1] if sizes else 1
        for at in range(0, len(tokens), size):
            part, goals = tokens[at : at + size], np.asarray(targets[at : at + size])
            if sizes:
                logits, caches = self._read_run(caches, part, at, size)
            else:
                logits, caches = self._decode_one(caches, part[0], at)
            wide = np.asarray(logits, np.float64)
            wide = wide - wide.max(axis=-1, keepdims=True)
            chosen = wide[np.arange(len(goals)), goals]
            scores.append(chosen - np.log(np.exp(wide).sum(axis=-1)))
        return np.concatenate(scores)

    def _read_run(self, caches: Any, part: Sequence[int], at: int, size: int) -> tuple[np.ndarray, Any]:
        """Logits `[n, V]` behind each of n tokens that follow one another, a tree without branches."""
        row = np.zeros((1, size), np.int32)
        row[0, : len(part)] = part
        mask = np.tril(np.ones((size, size), np.bool_))
        mask[len(part) :] = False
        places = np.arange(at, at + size, dtype=np.int32)
        logits, caches = self.executor.run(self._program("verify", size), caches, row, places, mask)
        return np.asarray(logits)[0, : len(part)], caches

    def _decode_one(self, caches: Any, token: int, position: int) -> tuple[Any, Any]:
        row, place = np.array([[token]], np.int32), np.array([position], np.int32)
        logits, caches = self.executor.run(self._decoding, caches, row, place)
        return logits[0], caches

    def _chunks(self, tokens: int) -> list[int]:
        return plan_chunks(tokens, self.options.chunk_tokens) if tokens > 0 else []

    def _program(self, kind: Any, tokens: int) -> Signature:
        return self.executor.manifest.signature(kind, tokens, self.level)


@functools.cache
def _sampling() -> Any:
    return jax.jit(sample)
