"""Opens the models of the baselines, and times changing from one to another."""

import contextlib
import copy
import dataclasses
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.elastic.levels import move
from jaxllm.bundle import WeightFormat
from jaxllm.config import WHOLE, ModelConfig
from jaxllm.elastic.ladder import layer_parameters
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import Params, parameter_count
from serving.buckets.bucket_table import BucketTable
from serving.bundles import levels_of, open_model
from serving.engine import Engine
from serving.host.progress import Progress
from serving.options import EngineOptions
from serving.runners.make import Runners
from serving.runners.resident import ResidentRunner
from serving.weights.model_level import ModelLevel

_READ_BYTES = 1 << 22
SWAP, PRUNED, LAYERS = "PFS-swap", "LLM-Pruner", "LE (no recovery)"
SHORTENED = "LG2+CS (no sparsity)"
# The same models as `SWAP`, all of them in memory.
RESIDENT = "PFS"


@dataclasses.dataclass(frozen=True)
class Size:
    """One of a baseline's models.

    Attributes:
      name: of the model.
      engine: of the whole model, by which it is timed.
      level: of that engine.
      change_ms: time to change to it.
    """

    name: str
    engine: Engine
    level: int
    change_ms: float = 0.0


def open_elastic(model: Path, progress: Progress | None = None) -> Engine:
    """An engine for all levels of a bundle.

    Raises:
      ConfigError: it has none.
    """
    levels = levels_of(model)
    if not levels:
        raise ConfigError(f"{model} has no levels; make an elastic bundle with `jaxllm elasticize`")
    return Engine.open(model, options=EngineOptions(levels=levels), progress=progress)


def open_baselines(
    engine: Engine,
    plain: Sequence[Path],
    pruned: Path | None,
    layer_subsets: int = 0,
    progress: Progress | None = None,
) -> dict[str, list[Size]]:
    """The models of every baseline that has its own, ascending by size.

    Args:
      engine: ours.
      plain: models of other sizes, for PFS; none leaves it out.
      pruned: an elastic bundle, for LLM-Pruner; None takes ours.
      layer_subsets: how many sizes LE has besides the whole model; 0 stands for all that there are.
      progress: of opening engines.
    """
    found = {}
    if plain:
        found[SWAP] = plain_models(plain, weights=engine.model.bundle.layout.weights, options=engine.options)
    found[PRUNED] = pruned_models(engine if pruned is None else open_elastic(pruned, progress))
    importance = engine.model.bundle.layout.parts["elastic"].facts.get("layer_importance")
    if importance is not None:
        found[LAYERS] = layer_wise(engine, importance, layer_subsets)
    return found


def widths(engine: Engine, sizes: Sequence[Size]) -> str:
    """The widths of a baseline's weights, for notes."""
    theirs = sorted({each.engine.model.bundle.layout.weights for each in sizes})
    ours = engine.model.bundle.layout.weights
    return f"{', '.join(theirs)} weights" + ("" if theirs == [ours] else f", ours {ours}")


def sizes_beside(engine: Engine, sizes: Sequence[Size]) -> str:
    """How many models a baseline has, and their parameters and files beside ours, for notes."""
    theirs = [each.engine for each in sizes]
    parameters = sum(parameter_count(each.cfg) for each in theirs) / parameter_count(engine.cfg.whole)
    files = sum(map(_file_bytes, theirs)) / _file_bytes(engine)
    return f"{len(sizes)} models of {parameters:.2f} times our parameters, {files:.2f} times our file"


def _file_bytes(engine: Engine) -> int:
    return engine.model.bundle.path.stat().st_size


def plain_models(paths: Sequence[Path], *, weights: WeightFormat, options: EngineOptions) -> list[Size]:
    """The models of PFS, each with the time to read it.

    Folders are prepared at the width `weights`; a bundle has its own (see `widths`).
    """
    options = dataclasses.replace(options, levels=())
    sizes = []
    for path in paths:
        width = weights if path.is_dir() else None
        with open_model(path, weights=width) as bundle:
            file = bundle.path
        # Before the engine maps it: what is mapped stays in the page cache.
        change_ms = swap_ms(file)
        engine = Engine.open(path, weights=width, options=options)
        sizes.append(Size(path.resolve().name, engine, WHOLE, change_ms))
    return sorted(sizes, key=lambda each: layer_parameters(each.engine.cfg))


def swap_ms(file: Path) -> float:
    """Milliseconds to read a file from its beginning to its end, its pages dropped from the cache before.

    A system that holds one model at a time takes at least as long: placing the weights is not counted. Pages
    that a process maps cannot be dropped, nor those of a file in memory; then the page cache is read, faster.
    """
    times = []
    for _ in range(3):
        with file.open("rb", buffering=0) as opened:
            if hasattr(os, "posix_fadvise"):
                with contextlib.suppress(OSError):
                    os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            while opened.read(_READ_BYTES):
                pass
            times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def pruned_models(engine: Engine) -> list[Size]:
    """The models of LLM-Pruner: the levels of a bundle, each copied when it is changed to."""
    return [Size(f"{level} %", engine, level, move(engine, level)[0]) for level in engine.levels]


def layer_wise(engine: Engine, importance: Sequence[float], subsets: int = 0) -> list[Size]:
    """The models of LE: sub-models of the most important layers, over the same weights, without the recovery
    training that our levels have.

    Args:
      engine: serves the whole model.
      importance: of each layer.
      subsets: how many numbers of layers, spread evenly from a quarter of them up; 0 takes every one.

    Raises:
      ConfigError: there is not one importance per layer.
    """
    whole, cfg = engine.runner_at(WHOLE), engine.cfg.whole
    if len(importance) != cfg.layers:
        raise ConfigError(f"{len(importance)} importances of layers for a model of {cfg.layers}")
    # A table of its own: numbers of layers are no levels.
    params, store = whole.model.weights, whole.buckets.store()
    table, runners = BucketTable(), dict[int, ResidentRunner]()

    def add(level: int, part: ModelConfig, params: Params) -> None:
        model = ModelLevel(part, params, engine.options, level=level)
        table.add_level(level, model.shapes, None if store is None else store.of(part, params))
        runners[level] = ResidentRunner(model, table)

    add(WHOLE, cfg, params)
    for count in layer_counts(cfg.layers, subsets):
        kept = sorted(np.argsort(-np.asarray(importance), kind="stable")[:count].tolist())
        part = dataclasses.replace(
            cfg,
            layers=count,
            attention_windows=tuple(cfg.attention_windows[each] for each in kept),
            sparse_layers=tuple(cfg.sparse_layers[each] for each in kept) if cfg.sparse_layers else (),
        )
        add(count, part, _of_layers(params, kept))
    model = copy.copy(engine.model)
    model.runners = Runners(runners, runners, table)
    other = Engine(model)
    other.warm_up()
    return [Size(f"{runners[each].cfg.layers} layers", other, each) for each in sorted(runners)]


def layer_counts(layers: int, subsets: int = 0) -> list[int]:
    """Numbers of layers of LE's sub-models (see `layer_wise`)."""
    counts = range(1, min(layers, WHOLE))
    if not subsets or not counts:
        return list(counts)
    spread = np.linspace(max(1, layers // 4), counts[-1], min(subsets, len(counts)))
    return sorted({*spread.round().astype(int).tolist()})


def _of_layers(params: Params, kept: Sequence[int]) -> Params:
    """The parameters of a model with these layers alone."""
    renamed = {f"layers.{old}.": f"layers.{new}." for new, old in enumerate(kept)}
    chosen = {}
    for name, value in params.items():
        if not name.startswith("layers."):
            chosen[name] = value
            continue
        prefix = ".".join(name.split(".")[:2]) + "."
        if prefix in renamed:
            chosen[renamed[prefix] + name.removeprefix(prefix)] = value
    return chosen
