"""Tests whether widths by density matter (LLMS, sections 3.2 and 5.2): at equal bytes, against the same ones
shuffled over the chunks, and against flat ones.

Each context is computed once and restored at every ratio with widths

- by density, as ours;
- shuffled: ours, at random places;
- flat: at most two neighbouring widths, spread evenly, whatever the chunks say.

A trained model goes on behind it. Every difference is taken context by context, and given with its 95 %
interval: where that holds 0, density was not shown to matter.
"""

import contextlib
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from benchmarks.contexts import Plan, Setting
from benchmarks.contexts.quality import STORED_SHARE, Stored, density_widths, write_with_outliers
from benchmarks.harness.bench import Run
from benchmarks.harness.report import OURS, Row, compared
from benchmarks.samples import story_tokens, text_windows
from jaxllm.contexts.codecs import WIDTHS
from jaxllm.errors import ConfigError
from jaxllm.serving.contexts.chunk_io import ChunkIO, kept_by
from jaxllm.serving.contexts.growth import least_ratio
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.runners.scorer import Scorer

SHUFFLED, FLAT = "shuffled", "flat"
KINDS = (OURS, SHUFFLED, FLAT)
# Standard errors on either side of a mean in its 95 % interval.
_NORMAL_95 = 1.96


def density_rows(bench: Run[Plan]) -> list[Row]:
    """Perplexity and recall of the three kinds of widths, by setting and ratio.

    Raises:
      ConfigError: there is too little text, or outliers cannot be put into the model.
    """
    rows, model = [], bench.path()
    with tempfile.TemporaryDirectory(prefix="jaxllm-bench-") as folder:
        changed = Path(folder) / "outliers.jaxllm"
        if any(each.outliers for each in bench.plan.settings):
            write_with_outliers(model, changed)
        for setting in bench.plan.settings:
            path = changed if setting.outliers else model
            options = EngineOptions(kv_codec=setting.codec, kv_chunk_tokens=setting.chunk_tokens)
            with contextlib.closing(Engine.open(path, options=options, progress=bench.progress)) as engine:
                rows += _setting_rows(engine, setting, bench)
    return rows


def _setting_rows(engine: Engine, setting: Setting, bench: Run[Plan]) -> list[Row]:
    plan, window = bench.plan, engine.options.context_tokens
    chunk_io, scorer = ChunkIO(engine.runner, kept_by(engine)), Scorer(engine.runner)
    scorer.prepare(window, bench.progress)
    size = chunk_io.chunk_tokens
    chunks = int(STORED_SHARE * window) // size
    # Ratios have few digits: 0.4 is not exactly two fifths.
    ratios = [each for each in plan.ratios if each >= least_ratio(chunk_io) - 1e-6]
    if not ratios:
        raise ConfigError(f"{setting.name}: scales leave no room for any of the ratios {plan.ratios}")
    losses: dict[tuple[float, str], list[tuple[float, float]]] = {}
    sizes: dict[tuple[float, str], list[int]] = {}
    texts = list(text_windows(story_tokens(engine.tokenizer, plan.data), window, plan.density_texts))
    for number, text in enumerate(texts):
        # All chunks in turn are repeated; where there are fewer texts, chunks spread over the context.
        at = number * chunks // len(texts) if len(texts) < chunks else number % chunks
        stored = Stored.raw(chunk_io, text[: chunks * size])
        draw = np.random.default_rng(plan.seed + number)
        for ratio in ratios:
            _add_widths(stored, text[: chunks * size], ratio, draw)
        for key, found in _losses(stored, text, text[at * size : (at + 1) * size], scorer).items():
            losses.setdefault(key, []).append(found)
            sizes.setdefault(key, []).append(stored.bytes_of(key))
        bench.progress(f"density, {setting.name}", number + 1, len(texts))
    left_out = ", ".join(f"{each:g}" for each in plan.ratios if each not in ratios)
    told = f"; left out: ratio {left_out}, less than 2 bits take" if left_out else ""
    rows = []
    for ratio in ratios:
        whole = chunks * chunk_io.reference_bytes
        shares = {kind: float(np.mean(sizes[ratio, kind])) / whole for kind in KINDS}
        for place, metric in enumerate(("perplexity", "recall_loss")):
            nats = {kind: np.array([each[place] for each in losses[ratio, kind]]) for kind in KINDS}
            means = {kind: float(each.mean()) for kind, each in nats.items()}
            rows += compared(
                f"density: {setting.name}, ratio {ratio:g}, {chunks * size} stored tokens",
                metric,
                {kind: math.exp(each) for kind, each in means.items()} if place == 0 else means,
                {
                    kind: f"{shares[kind]:.3f} of the bytes{_difference(nats[OURS], each)}; {len(each)} "
                    f"contexts{told}"
                    for kind, each in nats.items()
                },
            )
    return rows


def _add_widths(stored: Stored, tokens: list[int], ratio: float, draw: np.random.Generator) -> None:
    """Gives a context widths of every kind."""
    sizes = {each: stored.chunk_io.chunk_bytes(each) for each in WIDTHS}
    bits = density_widths(stored.chunk_io, tokens, stored.cache, ratio)
    taken = sum(sizes[each] for each in bits.tolist())
    stored.widths[ratio, OURS] = bits
    stored.widths[ratio, SHUFFLED] = draw.permutation(bits)
    stored.widths[ratio, FLAT] = flat_widths(len(bits), taken, sizes)


def flat_widths(count: int, budget_bytes: int, sizes: Mapping[int, int]) -> np.ndarray:
    """Two neighbouring widths, the wider of which is spread evenly over `count` chunks.

    Args:
      budget_bytes: that all take at most.
      sizes: bits -> bytes of a chunk.
    """
    for wide, narrow in zip(WIDTHS, (*WIDTHS[1:], WIDTHS[-1]), strict=True):
        left = budget_bytes - count * sizes[narrow]
        if left < 0:
            continue
        wider = min(count, left // (sizes[wide] - sizes[narrow])) if wide != narrow else 0
        steps = np.arange(count + 1) * wider // count if count else np.zeros(1, int)
        return np.where(np.diff(steps) > 0, wide, narrow)
    raise ConfigError(f"{count} chunks take more than {budget_bytes} bytes at {min(WIDTHS)} bits")


def _losses(
    stored: Stored, text: list[int], passage: list[int], scorer: Scorer
) -> dict[tuple[float, str], tuple[float, float]]:
    """By ratio and kind, the loss (nats per token) behind a context, and of the second half of a chunk when
    all of it is repeated."""
    # The first token behind the context is predicted by the last stored one, which is not fed.
    later = text[int(stored.cache.length) :]
    known: dict[bytes, tuple[float, float]] = {}
    for key, bits in stored.widths.items():
        if (same := bits.tobytes()) not in known:
            behind = scorer.score(later[:-1], later[1:], stored.restored(key))
            again = scorer.score(passage[:-1], passage[1:], stored.restored(key))[len(passage) // 2 - 1 :]
            known[same] = -float(behind.mean(dtype=np.float64)), -float(again.mean(dtype=np.float64))
    return {key: known[bits.tobytes()] for key, bits in stored.widths.items()}


def _difference(ours: np.ndarray, other: np.ndarray) -> str:
    """How many more nats per token another one loses than ours, with its 95 % interval."""
    if other is ours:
        return ""
    more = other - ours
    half = _NORMAL_95 * float(more.std(ddof=1)) / math.sqrt(len(more)) if len(more) > 1 else math.inf
    return f"; {more.mean():+.4f} ± {half:.4f} nats/token against {OURS}"
