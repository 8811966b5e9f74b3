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
import dataclasses
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.contexts.quality import Stored, density_widths, write_with_outliers
from benchmarks.harness.plan import BasePlan, silent, sized
from benchmarks.harness.report import OURS, Row, compared
from benchmarks.samples import story_tokens, text_windows
from jaxllm.contexts.codecs import WIDTHS
from jaxllm.errors import ConfigError
from jaxllm.serving.contexts.chunk_io import ChunkIO, kept_by
from jaxllm.serving.contexts.options import ContextOptions
from jaxllm.serving.contexts.saving import require_ratio
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.runners.scorer import Scorer

SHUFFLED, FLAT = "shuffled", "flat"
KINDS = (OURS, SHUFFLED, FLAT)
# Standard errors on either side of a mean in its 95 % interval.
_NORMAL_95 = 1.96


@dataclasses.dataclass(frozen=True)
class Setting:
    """How chunks are stored.

    Attributes:
      codec: its name.
      chunk_tokens: of a chunk.
      outliers: whether the model's keys have outliers put in (see `quality.py`).
    """

    codec: str
    chunk_tokens: int
    outliers: bool = False

    @property
    def name(self) -> str:
        """As rows have it."""
        return f"{self.codec}, chunks of {self.chunk_tokens}{', outliers' if self.outliers else ''}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DensityPlan(BasePlan):
    """Sizes.

    Attributes:
      settings: how chunks are stored.
      ratios: of bytes; those that a setting's scales leave no room for are left out, and told.
      texts: contexts that are measured; each is a window of the text.
      context_share: of the window that is stored; the rest is fed behind it.
      seed: of the shuffling.
    """

    # Outliers of channels do not matter where each has a scale of its own.
    settings: tuple[Setting, ...] = sized(
        (Setting("channel", 16), Setting("channel", 32), Setting("channel", 64), Setting("token", 16, True)),
        quick=(Setting("channel", 32),),
    )
    ratios: tuple[float, ...] = sized((1.0, 0.6, 0.5, 0.375, 0.25), quick=(0.6,))
    texts: int = sized(64, quick=6)
    context_share: float = 0.75
    seed: int = 0


def density_rows(model: Path, data: Path | None, plan: DensityPlan, progress: Progress = silent) -> list[Row]:
    """Perplexity and recall of the three kinds of widths, by setting and ratio.

    Args:
      model: a bundle of a trained model.
      data: the folder of texts; None takes the packaged stories.
      plan: how much.
      progress: called with (stage, done, total).

    Raises:
      ConfigError: there is too little text, or outliers cannot be put into the model.
    """
    rows = []
    with tempfile.TemporaryDirectory(prefix="jaxllm-bench-") as folder:
        changed = Path(folder) / "outliers.jaxllm"
        if any(each.outliers for each in plan.settings):
            write_with_outliers(model, changed)
        for setting in plan.settings:
            path = changed if setting.outliers else model
            options = EngineOptions(kv_codec=setting.codec, kv_chunk_tokens=setting.chunk_tokens)
            with contextlib.closing(Engine.open(path, options=options, progress=progress)) as engine:
                rows += _setting_rows(engine, setting, data, plan, progress)
    return rows


def _setting_rows(
    engine: Engine, setting: Setting, data: Path | None, plan: DensityPlan, progress: Progress
) -> list[Row]:
    chunk_io, window = ChunkIO(engine.runner, kept_by(engine)), engine.options.context_tokens
    Scorer(engine.runner).prepare(window, progress)
    size = chunk_io.chunk_tokens
    chunks = int(plan.context_share * window) // size
    ratios = [each for each in plan.ratios if _possible(chunk_io, each)]
    if not ratios:
        raise ConfigError(f"{setting.name}: scales leave no room for any of the ratios {plan.ratios}")
    losses: dict[tuple[float, str], list[tuple[float, float]]] = {}
    sizes: dict[tuple[float, str], list[int]] = {}
    texts = list(text_windows(story_tokens(engine.tokenizer, data), window, plan.texts))
    for number, text in enumerate(texts):
        # All chunks in turn are repeated; where there are fewer texts, chunks spread over the context.
        at = number * chunks // len(texts) if len(texts) < chunks else number % chunks
        stored = _stored(chunk_io, text[: chunks * size], ratios, plan.seed + number)
        for key, found in _losses(stored, text, chunks * size, text[at * size : (at + 1) * size]).items():
            losses.setdefault(key, []).append(found)
            sizes.setdefault(key, []).append(stored.bytes_of(_name(*key)))
        progress(f"density, {setting.name}", number + 1, len(texts))
    left_out = ", ".join(f"{each:g}" for each in plan.ratios if each not in ratios)
    told = f"; left out: ratio {left_out}, less than 2 bits take" if left_out else ""
    rows = []
    for ratio in ratios:
        shares = {
            kind: float(np.mean(sizes[ratio, kind])) / (chunks * chunk_io.reference_bytes) for kind in KINDS
        }
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


def _possible(chunk_io: ChunkIO, ratio: float) -> bool:
    try:
        require_ratio(chunk_io, ContextOptions(folder="", ratio=ratio))
    except ConfigError:
        return False
    return True


def _name(ratio: float, kind: str) -> str:
    return f"{kind} {ratio}"


def _stored(chunk_io: ChunkIO, tokens: list[int], ratios: Sequence[float], seed: int) -> Stored:
    """A context with widths of every ratio and kind."""
    raw, widths = Stored.raw(chunk_io, tokens), {}
    draw, sizes = np.random.default_rng(seed), {each: chunk_io.chunk_bytes(each) for each in WIDTHS}
    for ratio in ratios:
        bits = density_widths(chunk_io, tokens, raw.cache, ratio)
        widths[_name(ratio, OURS)] = bits
        widths[_name(ratio, SHUFFLED)] = draw.permutation(bits)
        taken = sum(sizes[each] for each in bits.tolist())
        widths[_name(ratio, FLAT)] = flat_widths(len(bits), taken, sizes)
    return dataclasses.replace(raw, widths=widths)


def flat_widths(count: int, budget_bytes: int, sizes: Mapping[int, int]) -> np.ndarray:
    """Two neighbouring widths, the wider of which is spread evenly over `count` chunks.

    Args:
      count: of chunks.
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
    stored: Stored, text: list[int], stored_tokens: int, passage: list[int]
) -> dict[tuple[float, str], tuple[float, float]]:
    """By ratio and kind, the loss (nats per token) behind a context, and of the second half of a chunk when
    all of it is repeated."""
    scorer = Scorer(stored.chunk_io.runner)
    # The first token behind the context is predicted by the last stored one, which is not fed.
    later = text[stored_tokens:]
    known: dict[bytes, tuple[float, float]] = {}
    found = {}
    for name, bits in stored.widths.items():
        if (same := bits.tobytes()) not in known:
            behind = scorer.score(later[:-1], later[1:], stored.restored(name))
            again = scorer.score(passage[:-1], passage[1:], stored.restored(name))[len(passage) // 2 - 1 :]
            known[same] = -float(behind.mean(dtype=np.float64)), -float(again.mean(dtype=np.float64))
        kind, _, ratio = name.partition(" ")
        found[float(ratio), kind] = known[same]
    return found


def _difference(ours: np.ndarray, other: np.ndarray) -> str:
    """How many more nats per token another one loses than ours, with its 95 % interval."""
    if other is ours:
        return ""
    more = other - ours
    half = _NORMAL_95 * float(more.std(ddof=1)) / math.sqrt(len(more)) if len(more) > 1 else math.inf
    return f"; {more.mean():+.4f} ± {half:.4f} nats/token against {OURS}"
