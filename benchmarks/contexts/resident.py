"""Measures contexts whose chunks are all in memory: the switch, the memory of the one that runs, and answers
at depth by width, beside the same chunks decoded into a cache first and a float cache without contexts."""

import dataclasses
import statistics
import tempfile
from pathlib import Path

import jax
import numpy as np

from benchmarks.contexts.histories import Histories, random_tokens
from benchmarks.contexts.systems import OURS
from benchmarks.measuring.report import Row, compared
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
    """Of the calls of one system."""

    switch_ms: list[float] = dataclasses.field(default_factory=list)
    prefill: list[float] = dataclasses.field(default_factory=list)
    decode: list[float] = dataclasses.field(default_factory=list)
    bytes: int = 0


def resident_rows(coded: Engine, decoded: Engine, plain: Engine, repeats: int, seed: int) -> list[Row]:
    """Rows by width, of two contexts that are called in turns.

    Args:
      coded: an engine that attends to coded chunks.
      decoded: the same model and codec, with chunks decoded into a cache.
      plain: the same model without contexts.
      repeats: calls that are timed.
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
                for name, contexts in theirs.items():
                    for context in contexts:
                        _call(kept[name], context, prompt, answer, times[name], timed=repeat > 0)
                said = _plain_call(plain, [*said, *prompt], session, answer, times[PLAIN], timed=repeat > 0)
            for each in kept.values():
                each.close()
        rows += _rows(f"{bits} bits, {int(_HISTORY * window)} tokens", times)
    return rows


def _call(
    contexts: Contexts, context: Context, prompt: list[int], answer: int, times: _Times, *, timed: bool
) -> None:
    """Answers in a context that did not run last."""
    said = context.generate(prompt, max_tokens=answer, ignore_eos=True).result()
    if not timed:
        # The first one warms up.
        return
    times.switch_ms.append(said.restoration.took_ms)
    times.prefill.append(1000 * (said.prompt_tokens - said.reused_tokens) / said.timings.ttft_ms)
    times.decode.append(1000 / said.timings.tpot_ms(len(said.tokens)))
    # Rows of the cache that were filled, and chunks.
    session = contexts._last[1]
    cache = session.cache
    if cache is not None:
        behind = len(session.tokens) - cache.coded_tokens
        rows = sum(each.nbytes for each in jax.tree.leaves((cache.keys, cache.values)))
        chunks = contexts.memory.chunks(context.name).values()
        filled = rows * behind // cache.capacity_tokens
        times.bytes = filled + sum(each.size_bytes for each in chunks)


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
    switches = {name: statistics.median(each.switch_ms) for name, each in contexts.items()}
    sizes = {name: float(each.bytes) for name, each in contexts.items()}
    case = f"resident: {case}"
    rows = compared(
        switches, ours=OURS, case=case, metric="switch_ms", unit="ms", lower_is_better=True
    ) + compared(
        sizes, ours=OURS, case=case, metric="context_bytes", unit="bytes", lower_is_better=True,
        notes=dict.fromkeys(sizes, "chunks, and rows of the cache that are filled, when a call has ended"),
    )  # fmt: skip
    for metric, of in (("prefill_tokens_per_s", "prefill"), ("decode_tokens_per_s", "decode")):
        rates = {name: statistics.median(getattr(each, of)) for name, each in times.items()}
        rows += compared(rates, ours=OURS, case=case, metric=metric, unit="tokens/s")
    return rows
