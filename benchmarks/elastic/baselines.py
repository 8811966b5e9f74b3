"""The models of the systems beside ours: how each is opened, and what changing from one to another takes."""

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
from jaxllm.config import WHOLE
from jaxllm.elastic.ladder import layer_parameters
from jaxllm.elastic.submodel import whole_params
from jaxllm.errors import ConfigError
from jaxllm.models.parameters import Params, parameter_count
from serving.buckets import BucketTable
from serving.engine import Engine
from serving.models import levels_of, open_model
from serving.options import EngineOptions
from serving.progress import Progress

_READ_BYTES = 1 << 22
SWAP, PRUNED, LAYERS = "PFS-swap", "LLM-Pruner", "LE (no recovery)"
SHORTENED = "LG2+CS (no sparsity)"
# The same models as `SWAP`, all of them in memory.
RESIDENT = "PFS"


@dataclasses.dataclass(frozen=True)
class Size:
    """One model of several.

    Attributes:
      name: says which.
      engine: the whole model's, by which it is timed.
      level: of that engine.
      change_ms: what changing to it takes.
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
    engine: Engine, plain: Sequence[Path], pruned: Path | None, progress: Progress | None = None
) -> dict[str, list[Size]]:
    """The models of every baseline that has its own, ascending by size.

    Args:
      engine: ours.
      plain: PFS, models of other sizes; none leaves it out.
      pruned: LLM-Pruner, an elastic bundle; None takes ours.
      progress: of opening engines.
    """
    found = {}
    if plain:
        found[SWAP] = plain_models(plain, weights=engine.bundle.layout.weights, options=engine.options)
    found[PRUNED] = pruned_models(engine if pruned is None else open_elastic(pruned, progress))
    importance = engine.bundle.layout.parts["elastic"].facts.get("layer_importance")
    if importance is not None:
        found[LAYERS] = layer_wise(engine, importance)
    return found


def widths(engine: Engine, sizes: Sequence[Size]) -> str:
    """At which widths a baseline's weights are, as notes have it."""
    theirs = sorted({each.engine.bundle.layout.weights for each in sizes})
    ours = engine.bundle.layout.weights
    return f"{', '.join(theirs)} weights" + ("" if theirs == [ours] else f", ours {ours}")


def sizes_beside(engine: Engine, sizes: Sequence[Size]) -> str:
    """How many models a baseline has, and their parameters and files beside ours, as notes have it."""
    theirs = [each.engine for each in sizes]
    parameters = sum(parameter_count(each.cfg) for each in theirs) / parameter_count(engine.cfg.whole)
    files = sum(map(_file_bytes, theirs)) / _file_bytes(engine)
    return f"{len(sizes)} models of {parameters:.2f} times our parameters, {files:.2f} times our file"


def _file_bytes(engine: Engine) -> int:
    return engine.bundle.path.stat().st_size


def plain_models(paths: Sequence[Path], *, weights: WeightFormat, options: EngineOptions) -> list[Size]:
    """PFS: plain models, each with what reading it takes.

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

    That is the least that a system can take that holds one model at a time: placing the weights is not in it.
    Pages that some process maps cannot be dropped, nor can those of a file in memory; what is measured then
    is reading the page cache, which is less.
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
    """LLM-Pruner: the levels of a bundle, each moved when it is changed to."""
    return [Size(f"{level} %", engine, level, move(engine, level)[0]) for level in engine.table.levels]


def layer_wise(engine: Engine, importance: Sequence[float]) -> list[Size]:
    """LE: sub-models of the most important layers alone, over the same weights, and as they are: unlike our
    levels they have no recovery training.

    Raises:
      ConfigError: there is not one importance per layer.
    """
    whole, cfg = engine.at(WHOLE).table, engine.cfg.whole
    if len(importance) != cfg.layers:
        raise ConfigError(f"{len(importance)} importances of layers for a model of {cfg.layers}")
    # A table of its own: numbers of layers are no levels.
    params = whole_params(whole.params)
    store = None if whole.store is None else whole.store.of(cfg, params)
    table = BucketTable(cfg, params, engine.options, store)
    for count in range(1, min(cfg.layers, WHOLE)):
        kept = sorted(np.argsort(-np.asarray(importance), kind="stable")[:count].tolist())
        part = dataclasses.replace(
            cfg,
            layers=count,
            attention_windows=tuple(cfg.attention_windows[each] for each in kept),
            sparse_layers=tuple(cfg.sparse_layers[each] for each in kept) if cfg.sparse_layers else (),
        )
        table.add_level(count, part, _of_layers(params, kept))
    other = copy.copy(engine)
    other.table = table
    other.warm_up()
    return [Size(f"{table.at(each).cfg.layers} layers", other, each) for each in table.levels]


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
