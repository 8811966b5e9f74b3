"""Measures contexts whose chunks are all in memory: the switch, the memory of the one that runs, and answers
at depth by width, beside the same chunks decoded into a cache first and a float cache without contexts.

Two contexts are called in turns: the first when all that the calls before left to encode and to write is
done, so that its switch is the switch itself; the second at once, while chunks of the first are encoded.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.contexts.histories import Histories, random_tokens
from benchmarks.contexts.systems import OURS
from benchmarks.measuring.memory import array_bytes
from benchmarks.measuring.report import Row, compared
from serving.contexts.answer import ContextAnswer
from serving.contexts.blobs import Blobs
from serving.contexts.context import Context
from serving.contexts.manager import Contexts
from serving.contexts.options import ContextOptions
from serving.engine import Engine
from serving.request import GenerationConfig, Session

DECODED, PLAIN = f"{OURS}-decoded", "no management"
# Width in bits -> ratio that gives it to all chunks.
_RATIOS = {8: 1.0, 4: 0.6, 2: 0.4}
# Shares of a window: what a context has, each prompt, and each answer.
_HISTORY, _PROMPT, _ANSWER = 3 / 4, 1 / 64, 1 / 64


@dataclasses.dataclass(kw_only=True)
class _Times:
    """Of the calls of one system.

    Attributes:
      switch_ms, ttft_ms: of calls that find nothing left to do.
      at_once_ms: times to the first token of those that come at once.
      prefill, decode: tokens per second.
      bytes: of memory that the running context took.
      least_bytes: of its chunks as they are stored, and of the rows of its tokens behind them.
    """

    switch_ms: list[float] = dataclasses.field(default_factory=list)
    ttft_ms: list[float] = dataclasses.field(default_factory=list)
    at_once_ms: list[float] = dataclasses.field(default_factory=list)
    prefill: list[float] = dataclasses.field(default_factory=list)
    decode: list[float] = dataclasses.field(default_factory=list)
    bytes: int = 0
    least_bytes: int = 0


def resident_rows(coded: Engine, decoded: Engine, plain: Engine, repeats: int, seed: int) -> list[Row]:
    """Rows by width, of two contexts that are called in turns.

    Args:
      coded: an engine that attends to coded chunks.
      decoded: the same model and codec, with chunks decoded into a cache.
      plain: the same model without contexts.
      repeats: calls in each context that are timed.
      seed: of the prompts.
    """
    draw, rows = np.random.default_rng(seed), []
    window = plain.options.context_tokens
    repeats = min(repeats, int((1 - _HISTORY) / (_PROMPT + _ANSWER)) - 2)
    engines = {OURS: coded, DECODED: decoded}
    lengths = [int(_HISTORY * window)] * 2
    histories = {name: Histories.compute(each, lengths, seed) for name, each in engines.items()}
    prompts = [random_tokens(plain, int(_PROMPT * window), draw) for _ in range(repeats + 1)]
    for bits, ratio in _RATIOS.items():
        times = {name: _Times() for name in (*engines, PLAIN)}
        with tempfile.TemporaryDirectory(prefix="jaxllm-bench-") as folder:
            kept = {
                name: Contexts(each, ContextOptions(folder=Path(folder) / name, ratio=ratio, newest_chunks=0))
                for name, each in engines.items()
            }
            theirs = {name: histories[name].keep(each) for name, each in kept.items()}
            said = list(histories[OURS].tokens[0])
            session, answer = Session(), int(_ANSWER * window)
            for repeat, prompt in enumerate(prompts):
                for name, (settled, at_once) in theirs.items():
                    # The first ones warm up.
                    of = times[name] if repeat else _Times()
                    kept[name].store.wait()
                    _call(kept[name], settled, prompt, answer, of)
                    of.at_once_ms.append(_asked(at_once, prompt, answer)[1])
                said = _plain_call(plain, [*said, *prompt], session, answer, times[PLAIN], timed=repeat > 0)
            for each in kept.values():
                each.close()
        rows += _rows(f"{bits} bits, {int(_HISTORY * window)} tokens", times)
    return rows


def _call(contexts: Contexts, context: Context, prompt: list[int], answer: int, times: _Times) -> None:
    """Answers in a context that did not run last."""
    before = len(context.record.bits)
    said, ttft_ms = _asked(context, prompt, answer)
    times.switch_ms.append(said.restoration.took_ms)
    times.ttft_ms.append(ttft_ms)
    times.prefill.append(1000 * (said.prompt_tokens - said.reused_tokens) / said.timings.ttft_ms)
    times.decode.append(1000 / said.timings.tpot_ms(len(said.tokens)))
    times.bytes, times.least_bytes = _memory(contexts, context.name, before)


def _asked(context: Context, prompt: list[int], answer: int) -> tuple[ContextAnswer, float]:
    """An answer, and the milliseconds from the call for it to its first token."""
    began = time.perf_counter()
    said = context.generate(prompt, max_tokens=answer, ignore_eos=True)
    # What it waits for before its first step is no part of `ContextAnswer.ttft_ms`.
    asked_ms = 1000 * (time.perf_counter() - began)
    return said.result(), asked_ms + said.ttft_ms


def _memory(contexts: Contexts, name: str, count: int) -> tuple[int, int]:
    """What the context that ran last took in memory until its call ended: its first `count` chunks and its
    cache. Then what their bytes alone are, and those of the rows behind these chunks."""
    session = contexts._last[1]
    cache, there = session.cache, contexts.memory.chunks(name)
    assert cache is not None
    chunks = [there[n] for n in range(count)]
    arrays = [each for each in jax.tree.leaves(cache) if isinstance(each, jax.Array | np.ndarray)]
    # Each layer's blob is an object by itself, and so is its memory.
    blobs = [blob for each in chunks for blob in each.blobs]
    objects = sum(sys.getsizeof(each) for blob in blobs for each in (blob, blob.base) if each is not None)
    extents = sum(each.blobs.extents.nbytes for each in chunks if isinstance(each.blobs, Blobs))
    taken = objects + extents + array_bytes(arrays)
    rows = sum(each.nbytes for each in jax.tree.leaves((cache.keys, cache.values)))
    behind = len(session.tokens) - count * contexts.engine.options.kv_chunk_tokens
    return taken, sum(each.size_bytes for each in chunks) + rows * behind // cache.capacity_tokens


def _plain_call(
    engine: Engine, said: list[int], session: Session, answer: int, times: _Times, *, timed: bool
) -> list[int]:
    """Goes on with a conversation whose cache is all floats; returns its tokens."""
    config = GenerationConfig(max_tokens=answer, ignore_eos=True)
    done = engine.stream(said, config, session=session).result()
    if timed:
        times.prefill.append(1000 * (done.prompt_tokens - done.reused_tokens) / done.timings.ttft_ms)
        times.decode.append(1000 / done.timings.tpot_ms(len(done.tokens)))
    return [*said, *done.tokens]


def _rows(case: str, times: dict[str, _Times]) -> list[Row]:
    contexts = {name: each for name, each in times.items() if name != PLAIN}
    case = f"resident: {case}"
    at_once = "asked for as the other context's answer ends, whose chunks are then encoded"
    rows = []
    for metric, of, note in (
        ("switch_ms", "switch_ms", "of a call that finds nothing left to encode or to write"),
        ("ttft_ms", "ttft_ms", "of the same calls, with the new turn and the tokens in no whole chunk"),
        ("at_once_ttft_ms", "at_once_ms", at_once),
    ):
        values = {name: statistics.median(getattr(each, of)) for name, each in contexts.items()}
        notes = dict.fromkeys(values, note)
        rows += compared(
            values, ours=OURS, case=case, metric=metric, unit="ms", notes=notes, lower_is_better=True
        )
    sizes = {name: float(each.bytes) for name, each in contexts.items()}
    shares = {name: each.bytes / each.least_bytes for name, each in contexts.items()}
    taken = "chunks, and pages of the cache that are there, before the call's tokens are encoded"
    beside = "the same, by the bytes of chunks as they are stored and of the rows of tokens behind them"
    for values, metric, unit, note in (
        (sizes, "context_bytes", "bytes", taken),
        (shares, "context_bytes_share", "times", beside),
    ):
        notes = dict.fromkeys(values, note)
        rows += compared(
            values, ours=OURS, case=case, metric=metric, unit=unit, notes=notes, lower_is_better=True
        )
    for metric, of in (("prefill_tokens_per_s", "prefill"), ("decode_tokens_per_s", "decode")):
        rates = {name: statistics.median(getattr(each, of)) for name, each in times.items()}
        rows += compared(rates, ours=OURS, case=case, metric=metric, unit="tokens/s")
    return rows
