"""The tables of each system: its models asked every question, and timed."""

import contextlib
import copy
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.elastic.levels import move
from benchmarks.elastic.systems import Variants
from jaxllm.bundle import Bundle, WeightFormat
from jaxllm.elastic.ladder import WHOLE, layer_parameters
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import Params
from jaxllm.tasks.branching import branching
from jaxllm.tasks.shortened import Question, shorten
from serving.buckets import BucketTable
from serving.engine import Engine
from serving.evaluation.scoring import score_options
from serving.options import EngineOptions
from serving.profile import DeviceProfile
from serving.tiny_lm import TinyPlanner

Progress = Callable[[str, int, int], None]
Timed = Callable[[Engine], DeviceProfile]
_READ_BYTES = 1 << 22


def our_variants(
    engine: Engine,
    profile: DeviceProfile,
    questions: Sequence[Question],
    planner: TinyPlanner,
    progress: Progress | None = None,
) -> Variants:
    """Ours: every level with the prompt at every ratio; what planning takes is in the time.

    The variants are ordered by level, then by ratio.
    """
    levels, ratios = engine.table.levels, tuple(planner.prompt_ratios)
    made = [shorten(engine.tokenizer, each, planner.scores(each.prompt), ratios) for each in questions]
    lengths = np.array([len(each.prompt.ids) for each in questions])
    tokens = lengths[:, None] * np.array([shares for _, shares in made])
    planning = np.array([planner.planning_ms(len(each.prompt.ids)) for each in questions])
    ttft, tpot, right = [], [], []
    for level in levels:
        at = engine.at(level)
        for place in range(len(ratios)):
            scores = score_options(at, [prompts[place] for prompts, _ in made], progress=progress)
            right.append([each.is_right(likely) for each, likely in zip(questions, scores, strict=True)])
            counts = np.maximum(1, np.rint(tokens[:, place])).astype(int)
            # The whole model with the whole prompt needs no plan.
            plan_ms = 0.0 if (level, ratios[place]) == (WHOLE, 1.0) else planning
            ttft.append(np.array([profile.ttft(level, count) for count in counts]) + plan_ms)
            tpot.append([profile.tpot(level, count) for count in counts])
    names = tuple(
        f"{level} % of the model, {ratio:.0%} of the prompt" for level in levels for ratio in ratios
    )
    return Variants(
        names=names,
        ttft_ms=np.array(ttft).T,
        tpot_ms=np.array(tpot).T,
        right=np.array(right).T,
        change_ms=np.zeros(len(names)),
    )


@dataclasses.dataclass(frozen=True)
class Size:
    """One model of several: how it answers, where its times are, what changing to it takes."""

    name: str
    engine: Engine
    profile: DeviceProfile
    level: int
    change_ms: float = 0.0


def size_variants(
    sizes: Sequence[Size], questions: Sequence[Question], progress: Progress | None = None
) -> Variants:
    """Models of several sizes, ascending, with the whole prompt."""
    ttft, tpot, right = [], [], []
    for size in sizes:
        asked = [branching(size.engine.tokenizer, each.example) for each in questions]
        scores = score_options(size.engine, asked, progress=progress)
        right.append([each.is_right(likely) for each, likely in zip(questions, scores, strict=True)])
        ttft.append([size.profile.ttft(size.level, len(each.prompt.ids)) for each in questions])
        tpot.append([size.profile.tpot(size.level, len(each.prompt.ids)) for each in questions])
    return Variants(
        names=tuple(size.name for size in sizes),
        ttft_ms=np.array(ttft).T,
        tpot_ms=np.array(tpot).T,
        right=np.array(right).T,
        change_ms=np.array([size.change_ms for size in sizes]),
    )


def layer_wise(engine: Engine, importance: Sequence[float], timed: Timed) -> list[Size]:
    """LE: sub-models of the most important layers alone, over the same weights.

    Raises:
      ConfigError: there is not one importance per layer.
    """
    whole, cfg = engine.at(WHOLE).table, engine.cfg.whole
    if len(importance) != cfg.layers:
        raise ConfigError(f"{len(importance)} importances of layers for a model of {cfg.layers}")
    # A table of its own: numbers of layers are no levels.
    table = BucketTable(cfg, whole.params, engine.options, whole.store)
    for count in range(1, min(cfg.layers, WHOLE)):
        kept = sorted(np.argsort(-np.asarray(importance), kind="stable")[:count].tolist())
        part = dataclasses.replace(
            cfg,
            layers=count,
            attention_windows=tuple(cfg.attention_windows[each] for each in kept),
            sparse_layers=tuple(cfg.sparse_layers[each] for each in kept) if cfg.sparse_layers else (),
        )
        table.add_level(count, part, _of_layers(whole.params, kept))
    other = copy.copy(engine)
    other.table = table
    other.warm_up()
    profile = timed(other)
    return [Size(f"{each} layers", other.at(each), profile, each) for each in table.levels]


def swap_ms(bundle: Bundle) -> float:
    """Milliseconds to read a bundle's weights from storage, the page cache left aside where it can be."""
    times = []
    for _ in range(3):
        with bundle.path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                with contextlib.suppress(OSError):
                    os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while file.read(_READ_BYTES):
                pass
            times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def plain_models(
    paths: Sequence[Path], *, weights: WeightFormat, options: EngineOptions, timed: Timed
) -> list[Size]:
    """PFS: plain models at the same width, ascending by size, each with what reading it takes."""
    options = dataclasses.replace(options, levels=())
    engines = [
        Engine.open(path, weights=weights if path.is_dir() else None, options=options) for path in paths
    ]
    return [
        Size(path.resolve().name, engine, timed(engine), WHOLE, swap_ms(engine.bundle))
        for path, engine in sorted(
            zip(paths, engines, strict=True), key=lambda pair: layer_parameters(pair[1].cfg)
        )
    ]


def pruned_models(engine: Engine, profile: DeviceProfile) -> list[Size]:
    """LLM-Pruner: the levels of a bundle, each moved when it is changed to."""
    return [
        Size(f"{level} %", engine.at(level), profile, level, move(engine, level)[0])
        for level in engine.table.levels
    ]


def _of_layers(params: Params, kept: Sequence[int]) -> Params:
    """The parameters of a model with these layers alone."""
    places = {f"layers.{old}.": f"layers.{new}." for new, old in enumerate(kept)}
    chosen = {}
    for name, value in params.items():
        if not name.startswith("layers."):
            chosen[name] = value
            continue
        prefix = ".".join(name.split(".")[:2]) + "."
        if prefix in places:
            chosen[places[prefix] + name.removeprefix(prefix)] = value
    return chosen
