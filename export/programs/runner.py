"""Runs exported programs: prefills by chunks, decodes a token or a tree per step, and samples tokens."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import ConfigError, ContextOverflow, ProgramError
from jaxllm.export.folder_format.signature import (
    COUNT,
    LOGITS,
    MASK,
    NEXT_TOKENS,
    POSITIONS,
    SOURCE_TOKENS,
    TOKENS,
    Kind,
    Signature,
    controls,
    lengthened,
)
from jaxllm.export.programs.executor import Executor
from jaxllm.models.features import require_decoder_alone
from jaxllm.sampling_state import NO_TOKEN, SamplerState
from jaxllm.serving.engine.decoding import counted
from jaxllm.serving.host.machine import require_not_forked
from jaxllm.serving.runners.runner import (
    BatchRow,
    DecodedRow,
    PrefillChunk,
    Runner,
    Verdict,
    chunks_of,
    padded,
    plan_chunks,
)
from jaxllm.speculation.token_tree import TokenTree, accepted_path
from jaxllm.text.tokenizer_files import MAX_START_TOKENS

# A call runs a program for each of its tokens: few enough that text streams and cancellation is quick.
_MOST_PER_CALL = 16
# Marks padding in a row of positions (see `jaxllm.export.steps.exported`).
_PADDING = -1


@dataclasses.dataclass(frozen=True)
class ProgramOptions:
    """Options of programs that answers and profiles need.

    Attributes:
      context_tokens: maximum number of tokens of prompt and answer together (see
        `jaxllm.serving.runners.runner.Window`).
      chunk_tokens: prefill chunk lengths over the longest caches, ascending.
      exact_chunks: False: a program computes its whole chunk, with padding.
    """

    context_tokens: int
    chunk_tokens: tuple[int, ...]
    exact_chunks: bool = False

    def source_tokens(self, cfg: ModelConfig) -> int:
        """The longest source of an encoder-decoder; 0 of other models."""
        return 0 if cfg.encoder is None else min(cfg.encoder.window_tokens, self.context_tokens)


@dataclasses.dataclass(frozen=True)
class ProgramCache:
    """An executor's caches of `capacity_tokens` positions, `length` of them in use; any source; and the bytes
    of one set of them."""

    caches: Any
    capacity_tokens: int
    length: int = 0
    source: Any = None
    nbytes: int = 0

    def after(self, caches: Any, length: int) -> "ProgramCache":
        """Returns it with a program's resulting caches, and `length` positions in use."""
        return dataclasses.replace(self, caches=caches, length=length)


class TokenChooser(Protocol):
    """Samples tokens of a vocabulary of V."""

    def prepare(self, trees: Iterable[int] = ()) -> None:
        """Prepares to sample the next token, and the tokens of trees of these sizes."""
        ...

    def next_token(self, logits: Any, sampler: SamplerState) -> tuple[Any, SamplerState]:
        """The token `[1]` after logits `[1, V]`, and the next state (see `jaxllm.sampling.sample`)."""
        ...

    def of_tree(self, tree: TokenTree, logits: Any, sampler: SamplerState) -> Any:
        """The tokens `[M]` after each node (see `jaxllm.speculation.tree.choices`)."""
        ...


class ProgramRunner(Runner):
    """A `Runner` over an executor, as one level of its model.

    Prefill programs return no logits, as LiteRT-LM's do not: the last token of a prompt is always decoded.

    Attributes:
      token_chooser: samples tokens other than the most likely.
    """

    _no_rows = "exported programs have no prompt embeddings; open the bundle"

    def __init__(
        self, executor: Executor, level: int = FULL_LEVEL, token_chooser: TokenChooser | None = None
    ) -> None:
        """Makes the runner of a level; `token_chooser` samples its tokens, None makes one.

        Raises:
          ConfigError: the level was not exported.
        """
        manifest = executor.manifest
        if level not in manifest.levels:
            there = ", ".join(map(str, sorted(manifest.levels)))
            raise ConfigError(
                f"level {level} was not exported, only {there}; export the model with --level {level}"
            )
        self.executor, self.level, self.lock = executor, level, executor.lock
        self.cfg = manifest.levels[level].cfg
        context = manifest.context_tokens
        self.options = ProgramOptions(context, manifest.sizes("prefill", level))
        # Cached, because every token needs them.
        self._lengths = manifest.cache_tokens(level)
        if token_chooser is None:
            # Here, because LiteRT's programs run without JAX.
            from jaxllm.export.programs.jax_programs import BucketChooser

            token_chooser = BucketChooser(self.cfg.vocab_size)
        self.token_chooser = token_chooser

        @functools.cache
        def program(kind: Kind, tokens: int, room: int) -> Signature:
            return manifest.signature(kind, tokens, level, room)

        self._program = program

    @property
    def weights_version(self) -> tuple[int, int]:
        """Version of the current weights and adapter, which caches are computed with."""
        return self.level, self.executor.adapters.version

    @property
    def signatures(self) -> list[Signature]:
        """The programs of this level."""
        return [each for each in self.executor.manifest.signatures if each.level == self.level]

    def request_signatures(
        self, prompt_tokens: int, max_tokens: int, trees: Sequence[int] = ()
    ) -> list[Signature]:
        """Returns the minimum set of programs that answer one request: over caches of one length, the
        chunks of its prompt and `trees` of these sizes. `max_tokens` is 0 if unknown."""
        encoding: list[Signature] = []
        if self.cfg.encoder is not None:
            # The prompt is the source; of the decoder it is the start tokens.
            encoding, prompt_tokens = [self._encoding(prompt_tokens)], MAX_START_TOKENS
        wanted = min(prompt_tokens + max_tokens, self.options.context_tokens)
        cache = next(each for each in self._lengths if each >= wanted)
        chunks, left = dict[int, None](), prompt_tokens - 1
        for each in self.prefill_chunks(prompt_tokens):
            chunks |= dict.fromkeys(self._chunks(min(each.tokens, left), cache))
            left -= each.tokens
        return [
            *encoding,
            *(self._program("prefill", each, cache) for each in chunks),
            self._program("decode", 1, cache),
            *(
                each
                for each in self.signatures
                if each.kind == "block" and self.executor.manifest.room(each) == cache
            ),
            *(self._program("verify", each, cache) for each in trees if each <= cache),
        ]

    def require_usable(self) -> None:
        """See `Runner`."""
        require_not_forked()

    def start(self, tokens: int) -> ProgramCache:
        """See `Runner`."""
        return self.restored({}, tokens)

    def make_room(self, cache: ProgramCache, tokens: int) -> ProgramCache:
        """See `Runner`.

        Raises:
          ContextOverflow: no programs have caches of so many tokens.
        """
        target, caches = self._length_for(tokens), cache.caches
        for length in self._lengths:
            if cache.capacity_tokens < length <= target:
                caches = self.executor.grow(self.level, caches, length)
        longest = max(target, cache.capacity_tokens)
        return dataclasses.replace(self._cache(caches, longest, cache.length), source=cache.source)

    def read_source(self, cache: ProgramCache, tokens: Sequence[int]) -> ProgramCache:
        """See `Runner`."""
        signature = self._encoding(len(tokens))
        row, real = padded(tokens, signature.tokens)
        number = np.array([real], np.int32)
        rows, _ = self.executor.run(signature, {TOKENS: row, SOURCE_TOKENS: number})
        shapes = self.executor.manifest.source_shapes(self.level)
        # Padded on the host, once per source: on a device that would require a bucket for each length.
        source = {name: lengthened(np.asarray(each), shapes[name]) for name, each in rows.items()}
        source = self.executor.place(self.level, {**source, SOURCE_TOKENS: number})
        return dataclasses.replace(cache, source=source)

    def _encoding(self, tokens: int) -> Signature:
        lengths = self.executor.manifest.sizes("encode", self.level)
        if not lengths:
            raise ConfigError(f"{self.cfg.model_type} has no encoder to read a source; give it a prompt")
        length = next((each for each in lengths if each >= tokens), lengths[-1])
        return self._program("encode", length, self.options.context_tokens)

    def rows(self, cache: ProgramCache, tokens: int) -> dict[str, np.ndarray]:
        """Copies of the first `tokens` rows of a cache's arrays, by name, `[1, K, tokens, H]`."""
        return self.executor.rows(self.level, cache.caches, tokens)

    def restored(self, rows: Mapping[str, np.ndarray], tokens: int) -> ProgramCache:
        """Returns a cache with room for `tokens` positions that begins with `rows` of an equal one (see
        `rows`); without any it is empty."""
        length = self._length_for(tokens)
        filled = next(iter(rows.values())).shape[2] if rows else 0
        return self._cache(self.executor.restored(self.level, length, rows), length, filled)

    def can_fork(self, cache: ProgramCache) -> bool:
        """Whether `fork` can begin at once."""
        del cache
        return True

    def fork(self, cache: ProgramCache, tokens: int) -> ProgramCache:
        """A cache with the first `tokens` positions of another, which stays unchanged. Under `lock`."""
        return self.restored(self.rows(cache, tokens), tokens)

    def scorer(self) -> Any:
        """Raises an error: programs return logits, and no hidden states.

        Raises:
          ConfigError: always.
        """
        raise ConfigError("exported programs embed no texts; use `jaxllm serve` with a bundle")

    def _cache(self, caches: Any, tokens: int, length: int) -> ProgramCache:
        size = self.executor.manifest.cache_bytes(self.level, tokens)
        return ProgramCache(caches, tokens, length, nbytes=size)

    def prefill_chunks(self, tokens: int) -> list[PrefillChunk]:
        """See `Runner`; the last chunk has one token more than its program, which is decoded."""
        lengths = self._chunks(tokens - 1, self.options.context_tokens) or [0]
        return chunks_of([*lengths[:-1], lengths[-1] + 1])

    def prefill(
        self, cache: ProgramCache, tokens: Sequence[int], at: int, chunk: PrefillChunk
    ) -> tuple[Any, ProgramCache]:
        """See `Runner`; a chunk that these caches have no program for is run in shorter ones."""
        room, count, fed = cache.capacity_tokens, len(tokens) - chunk.last, 0
        for length in self._chunks(count, room):
            part = tokens[fed : min(fed + length, count)]
            program, inputs = self._program("prefill", length, room), chunk_inputs(part, length, at + fed)
            fed += len(part)
            _, cache = self._run(program, cache, at + fed, inputs)
        return self.step(cache, tokens[-1], at + count) if chunk.last else (None, cache)

    def sample(self, logits: Any, sampler: SamplerState) -> tuple[np.ndarray, SamplerState]:
        """Returns the next token `[1]`, and the sampler. Finds the most likely without a dispatch."""
        if _likeliest(sampler):
            return _most_likely(np.asarray(logits)), sampler
        token, sampler = self.token_chooser.next_token(logits, sampler)
        return np.asarray(token), sampler

    def decode_limit(self, pace: int, remaining: int) -> int:
        """See `Runner`."""
        return min(pace, _MOST_PER_CALL, remaining)

    def decode(self, row: BatchRow) -> DecodedRow:
        """See `Runner`; a dispatch for each block of tokens, or for each token if there is no program of
        blocks, until a stop token.

        Raises:
          ProgramError: a block returns no tokens, more than requested, or others than the vocabulary's.
        """
        cache, sampler, first = row.cache, row.sampler, row.cache.length
        stops, decoded, room = (
            set(row.stop_ids.tolist()),
            [int(np.asarray(row.token)[0])],
            cache.capacity_tokens,
        )
        block = max(self.executor.manifest.sizes("block", self.level, room), default=1)
        while len(decoded) <= row.limit and (len(decoded) == 1 or decoded[-1] not in stops):
            at, left = int(first) + len(decoded) - 1, row.limit + 1 - len(decoded)
            if block > 1 and (self.executor.stops_early or 2 * left > block):
                most, program = min(left, block), self._program("block", block, room)
                inputs = chunk_inputs(decoded[-1:], 1, at) | controls(sampler, row.stop_ids, most)
                out, cache = self._run(program, cache, at, inputs)
                found = np.asarray(out[NEXT_TOKENS])[0, : np.asarray(out[COUNT])[0]]
                real = (
                    1 <= len(found) <= most and NO_TOKEN <= found.min() <= found.max() < self.cfg.vocab_size
                )
                if not real:
                    raise ProgramError(
                        f"{program.name} gave {found.tolist()!s:.80}, not 1 to {most} tokens of "
                        f"{self.cfg.vocab_size}; export the model again"
                    )
                cache = cache.after(cache.caches, at + len(found))
                sampler = sampler if _likeliest(sampler) else counted(sampler, found)
                decoded += found.tolist()
                continue
            logits, cache = self.step(cache, decoded[-1], at)
            chosen, sampler = self.sample(logits, sampler)
            decoded.append(int(chosen[0]))
        return DecodedRow(decoded[1:], cache, sampler)

    def step(self, cache: ProgramCache, token: int, at: int) -> tuple[Any, ProgramCache]:
        """Feeds one token at position `at`; returns the logits `[1, V]` after it, and the cache."""
        program = self._program("decode", 1, cache.capacity_tokens)
        out, cache = self._run(program, cache, at + 1, chunk_inputs([token], 1, at))
        # Slicing a device's array would compile a computation.
        return np.asarray(out[LOGITS])[0], cache

    def _run(
        self, program: Signature, cache: ProgramCache, length: int, inputs: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, Any], ProgramCache]:
        """Runs a program over a cache, which then has `length` positions in use; returns its outputs."""
        out, caches = self.executor.run(program, {**inputs, **(cache.source or {})}, cache.caches)
        return out, cache.after(caches, length)

    def verify(
        self,
        tree: TokenTree,
        cache: ProgramCache,
        sampler: SamplerState,
        limit: int,
        meanwhile: Callable[[float], bool] | None = None,
    ) -> tuple[Verdict, ProgramCache, SamplerState]:
        """See `Runner`."""
        del meanwhile
        at, signature = cache.length, self._program("verify", tree.room, cache.capacity_tokens)
        positions = (at + np.asarray(tree.depths)).astype(np.int32)
        inputs = {
            TOKENS: np.asarray(tree.tokens)[None],
            POSITIONS: positions,
            MASK: np.asarray(tree.ancestors),
        }
        out, cache = self._run(signature, cache, at, inputs)
        logits = np.asarray(out[LOGITS])[0]
        if _likeliest(sampler):
            chosen = _most_likely(logits)
        else:
            chosen = np.asarray(self.token_chooser.of_tree(tree, logits, sampler))
        path = accepted_path(tree, chosen)[:limit]
        tokens = chosen[path]
        if not _likeliest(sampler):
            sampler = counted(sampler, tokens)
        caches = cache.caches
        if path[-1] >= len(path):
            caches = self.executor.keep(signature, caches, at, path)
        return Verdict(tokens, path), cache.after(caches, at + len(path)), sampler

    def score(self, tokens: Sequence[int], targets: Sequence[int]) -> np.ndarray:
        """Returns the log-probability (natural) `[tokens]` of each target after its token and all tokens
        before it.

        Runs the largest `verify` program, or token by token without one.

        Raises:
          ConfigError: the model is an encoder-decoder.
        """
        require_decoder_alone(self.cfg, "scoring or embedding text")
        cache, scores = self.start(len(tokens)), []
        sizes = self.executor.manifest.sizes("verify", self.level, cache.capacity_tokens)
        size = sizes[-1] if sizes else 1
        for at in range(0, len(tokens), size):
            part, goals = tokens[at : at + size], np.asarray(targets[at : at + size])
            if sizes:
                # Consecutive tokens are verified as a tree without branches.
                row, real = padded(part, size)
                mask = np.tril(np.ones((size, size), np.bool_))
                mask[real:] = False
                inputs = {TOKENS: row, POSITIONS: np.arange(at, at + size, dtype=np.int32), MASK: mask}
                program = self._program("verify", size, cache.capacity_tokens)
                out, cache = self._run(program, cache, at + real, inputs)
                logits = np.asarray(out[LOGITS])[0, :real]
            else:
                logits, cache = self.step(cache, part[0], at)
            wide = np.asarray(logits, np.float64)
            wide = wide - wide.max(axis=-1, keepdims=True)
            chosen = wide[np.arange(len(goals)), goals]
            scores.append(chosen - np.log(np.exp(wide).sum(axis=-1)))
        return np.concatenate(scores)

    def _length_for(self, tokens: int) -> int:
        """Returns the length of the shortest caches for `tokens`, preferably with a prepared program."""
        fitting = [each for each in self._lengths if each >= tokens]
        if not fitting:
            raise ContextOverflow(
                f"{tokens} tokens do not fit; the programs' caches hold {self.options.context_tokens}: "
                "export the model with a longer --context"
            )
        ready = (each for each in fitting if self.executor.is_ready(self._program("decode", 1, each)))
        return next(ready, fitting[0])

    def _chunks(self, tokens: int, room: int) -> list[int]:
        lengths = self.executor.manifest.sizes("prefill", self.level, room)
        return plan_chunks(tokens, lengths) if tokens > 0 else []


def chunk_inputs(tokens: Sequence[int], length: int, at: int) -> dict[str, np.ndarray]:
    """Tokens from position `at` on as inputs of a program of `length` tokens."""
    row, real = padded(tokens, length)
    positions = np.full(length, _PADDING, np.int32)
    positions[:real] = np.arange(at, at + real)
    return {TOKENS: row, POSITIONS: positions}


def _most_likely(logits: np.ndarray) -> np.ndarray:
    """`jaxllm.sampling.likeliest` without a dispatch."""
    token = logits.argmax(axis=-1)
    chosen = np.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return np.where(np.isfinite(chosen), token, NO_TOKEN).astype(np.int32)


def _likeliest(sampler: SamplerState) -> bool:
    """Whether the most likely token is the next one."""
    # On the host: comparing a device's number would compile a computation.
    return not bool(sampler.penalized) and float(sampler.temperature) <= 0
