"""Opens the models of the baselines, and measures what levels cost: times, memory, and changing to another.

Choosing another level sets an attribute of a Python object, and costs nothing by itself; the next dispatch
takes longer, for it has new arguments and reads memory that the last request did not read. So a request's
time to the first token is timed beside that of one that stays at its level.

A trace can be timed with a model as large as a phone's, with the answers of a small trained one. In the times
of a model that answers within milliseconds, the host's own work and the tiny LM's pass are large parts, at
any level, so they say little of larger models. Here an elastic model of random weights, of a known shape and
with the same levels and tokenizer, is timed and replays the trace; the times of other systems' models are
interpolated between its levels by their share of the parameters in layers. Right answers are those of the
trained models.
"""

import contextlib
import copy
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from benchmarks.harness.bench import silent
from benchmarks.harness.children import in_process
from benchmarks.harness.machine import peak_resident_bytes
from benchmarks.harness.report import OURS, Row, bootstrap, compared, row
from benchmarks.models import SHAPES, made_once, shape_folder
from jaxllm.bundle import Bundle, WeightFormat, write_bundle
from jaxllm.bundle.levels import Recovery, elastic_parts, read_ladder, read_recovery
from jaxllm.checkpoints.huggingface import read_params
from jaxllm.checkpoints.tokenizer_folder import read_tokenizer
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.elastic.ladder import Ladder, is_unit_parameter, layer_parameters, sub_config
from jaxllm.errors import ConfigError
from jaxllm.models.lora import LoraConfig, init_adapter
from jaxllm.models.parameters import Params, param_specs, parameter_count
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.elastic.profile import DeviceProfile
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.bundles import levels_of, open_model
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.opening.make_runners import Runners
from jaxllm.serving.runners.resident import ResidentRunner
from jaxllm.serving.weights.model_level import ModelLevel

SWAP, PRUNED, LAYERS = "PFS-swap", "LLM-Pruner", "LE (no recovery)"
SHORTENED = "LG2+CS (no sparsity)"
# The same models as `SWAP`, all of them in memory.
RESIDENT = "PFS"


@dataclasses.dataclass(frozen=True)
class Size:
    """One of a baseline's models."""

    name: str
    engine: Engine
    level: int
    change_ms: float = 0.0


def open_elastic(model: Path, progress: Progress = silent) -> Engine:
    """An engine for all levels of a bundle."""
    levels = levels_of(model)
    _require_levels(model, levels)
    return Engine.open(model, options=EngineOptions(levels=levels), progress=progress)


def open_baselines(
    engine: Engine,
    plain: Sequence[Path],
    pruned: Path | None,
    layer_subsets: int = 0,
    progress: Progress = silent,
) -> dict[str, list[Size]]:
    """The models of every baseline that has its own, ascending by size.

    Args:
      plain: models of other sizes, for PFS; none leaves it out.
      pruned: an elastic bundle, for LLM-Pruner; None takes ours.
      layer_subsets: how many sizes LE has besides the whole model; 0 for all.
    """
    found = {}
    if plain:
        found[SWAP] = plain_models(plain, weights=engine.model.bundle.layout.weights, options=engine.options)
    other = engine if pruned is None else open_elastic(pruned, progress)
    # The levels of a bundle, each copied when it is changed to.
    found[PRUNED] = [Size(f"{level} %", other, level, move(other, level)[0]) for level in other.levels]
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
        sizes.append(Size(path.resolve().name, engine, FULL_LEVEL, change_ms))
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
            while opened.read(1 << 22):
                pass
            times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def layer_wise(engine: Engine, importance: Sequence[float], subsets: int = 0) -> list[Size]:
    """The models of LE: sub-models of the most important layers, over the same weights, without the recovery
    training that our levels have.

    Args:
      subsets: how many numbers of layers, spread evenly from a quarter of them up; 0 takes every one.
    """
    whole, cfg = engine.runner_at(FULL_LEVEL), engine.cfg.whole
    if len(importance) != cfg.layers:
        raise ConfigError(f"{len(importance)} importances of layers for a model of {cfg.layers}")
    # A table of its own: numbers of layers are no levels.
    params, store = whole.model.weights, whole.buckets.store()
    table, runners = BucketTable(), dict[int, ResidentRunner]()

    def add(level: int, part: ModelConfig, params: Params) -> None:
        model = ModelLevel(part, params, engine.options, level=level)
        table.add_level(level, model.shapes, None if store is None else store.of(part, params))
        runners[level] = ResidentRunner(model, table)

    add(FULL_LEVEL, cfg, params)
    counts = list(range(1, min(cfg.layers, FULL_LEVEL)))
    if subsets and counts:
        spread = np.linspace(max(1, cfg.layers // 4), counts[-1], min(subsets, len(counts)))
        counts = sorted({*spread.round().astype(int).tolist()})
    for count in counts:
        kept = sorted(np.argsort(-np.asarray(importance), kind="stable")[:count].tolist())
        part = dataclasses.replace(
            cfg,
            layers=count,
            attention_windows=tuple(cfg.attention_windows[each] for each in kept),
            sparse_layers=tuple(cfg.sparse_layers[each] for each in kept) if cfg.sparse_layers else (),
        )
        # Those layers' parameters, numbered anew, and all that is outside of layers.
        own = {name: value for name, value in params.items() if not name.startswith("layers.")}
        for new, old in enumerate(kept):
            prefix = f"layers.{old}."
            own |= {
                f"layers.{new}.{name.removeprefix(prefix)}": value
                for name, value in params.items()
                if name.startswith(prefix)
            }
        add(count, part, own)
    model = copy.copy(engine.model)
    model.runners = Runners(runners, table)
    other = Engine(model)
    other.warm_up()
    return [Size(f"{runners[each].cfg.layers} layers", other, each) for each in sorted(runners)]


_RECOVERY = LoraConfig(rank=8)


def elastic_shape(
    name: str, weights: WeightFormat, progress: Progress, *, like: Bundle | None = None
) -> Path:
    """The bundle of a shape, made unless it is there.

    It has the default levels, or those of another bundle; the first layers and the last one are anchors, as
    many as `elasticize` has by default, and each level has an adapter of the size that recovery makes, unless
    the other bundle's has none. The order of units is arbitrary: speed does not depend on it.

    Args:
      like: an elastic bundle whose levels, tokenizer and vocabulary it takes.
    """
    folder = shape_folder(name, progress)

    def write(path: Path) -> None:
        cfg = SHAPES[name]
        tokenizer, params = read_tokenizer(folder), read_params(folder, cfg)
        levels: tuple[int, ...] = Ladder().levels
        adapted = [level for level in levels if level != FULL_LEVEL]
        if like is not None:
            ladder, tokenizer = read_ladder(like), like.tokenizer_files()
            _require_levels(like.path, ladder)
            levels = () if ladder is None else ladder.levels
            adapted = [level for level in levels if read_recovery(like, level) is not None]
            params = _first_tokens(params, cfg.vocab_size, like.cfg.vocab_size)
            cfg = dataclasses.replace(cfg, vocab_size=like.cfg.vocab_size)
        anchors = max(1, round(0.2 * cfg.layers))
        ladder, recoveries = Ladder(levels=levels, anchors=(*range(anchors - 1), cfg.layers - 1)), {}
        for level in adapted:
            adapter = init_adapter(sub_config(cfg, ladder, level), _RECOVERY, jax.random.key(level))
            arrays = {name: np.asarray(value) for name, value in adapter.items()}
            recoveries[level] = Recovery(arrays, _RECOVERY.scaling)
        write_bundle(
            path, cfg=cfg, params=params, weights=weights, tokenizer=tokenizer, name=f"{name}-elastic",
            parts=elastic_parts(ladder, recoveries),
        )  # fmt: skip

    mark = "" if like is None else f"-{like.fingerprint[:12]}"
    return made_once("shapes", folder.parent.name, f"{name}-elastic-{weights}{mark}.jaxllm", write=write)


def _require_levels(path: Path, found: object) -> None:
    if not found:
        raise ConfigError(f"{path} has no levels; make an elastic bundle with `jaxllm elasticize`")


def _first_tokens(
    params: Iterable[tuple[str, np.ndarray]], words: int, kept: int
) -> Iterable[tuple[str, np.ndarray]]:
    """Parameters of a model with the first of its tokens alone."""
    if kept > words:
        raise ConfigError(f"a shape of {words} tokens cannot have a vocabulary of {kept}; take a larger one")
    for name, value in params:
        yield name, value[:kept] if name in ("embed.tokens", "head") else value


def as_large(
    larger: Engine, profile: DeviceProfile, ours: Engine, others: Mapping[str, Sequence[Size]]
) -> tuple[dict[str, list[Size]], dict[int, DeviceProfile]]:
    """Other systems' models with the times that they would have if they were as large.

    Args:
      larger: the elastic model that is timed.
      ours: the small elastic model that `others` are compared with.
      others: the models of each baseline.

    Returns:
      The same models with the times of changing to them; profiles of their engines, by `id`.
    """
    known = _shares(larger, larger.levels, larger.cfg.whole)
    levels: dict[int, tuple[Engine, set[int]]] = {}
    for size in (size for many in others.values() for size in many):
        levels.setdefault(id(size.engine), (size.engine, set()))[1].add(size.level)
    profiles = {
        name: of_shares(profile, known, _shares(engine, own, ours.cfg.whole))
        for name, (engine, own) in levels.items()
    }
    changed = {name: list(many) for name, many in others.items()}
    changed[PRUNED] = [
        dataclasses.replace(size, change_ms=move(larger, size.level)[0]) for size in others[PRUNED]
    ]
    if SWAP in others:
        # The time of a read is proportional to the size of the file.
        read_ms = swap_ms(larger.model.bundle.path) / _file_bytes(ours)
        changed[SWAP] = [
            dataclasses.replace(size, change_ms=read_ms * _file_bytes(size.engine)) for size in others[SWAP]
        ]
    return changed, profiles


def of_shares(
    profile: DeviceProfile, known: Mapping[int, float], wanted: Mapping[int, float]
) -> DeviceProfile:
    """Times of models with other shares of the parameters than the levels of a profile.

    Between two levels times are interpolated; below the smallest, towards the time without layers that a line
    through all levels gives.

    Args:
      known: its levels' shares of the parameters in layers, in (0, 1].
      wanted: shares of the models, by their level.
    """
    shares = np.array([known[level] for level in profile.levels])
    names = tuple(sorted(wanted))
    asked = np.array([wanted[name] for name in names])

    def interpolated(table: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
        columns = []
        for times in np.array(table).T:
            without = float(np.clip(np.polyfit(shares, times, 1)[1], 0.0, times[0]))
            columns.append(np.interp(asked, [0.0, *shares], [without, *times]))
        return tuple(map(tuple, np.array(columns).T.tolist()))

    return DeviceProfile(
        levels=names,
        tokens=profile.tokens,
        chunk_tokens=profile.chunk_tokens,
        exact_chunks=profile.exact_chunks,
        ttft_ms=interpolated(profile.ttft_ms),
        tpot_ms=interpolated(profile.tpot_ms),
    )


def _shares(engine: Engine, levels: Iterable[int], whole: ModelConfig) -> dict[int, float]:
    """Shares of the parameters in layers of a whole model, by level."""
    parameters = layer_parameters(whole)
    return {level: layer_parameters(engine.runner_at(level).cfg) / parameters for level in levels}


# Prompt of the requests that are timed, and of the process whose memory is measured.
PROMPT_TOKENS = 64


class Added(NamedTuple):
    """Time that changing to a level adds to a request's time to the first token.

    Attributes:
      median_ms: over pairs of a request that changes the level and one that does not.
      low_ms, high_ms: its 95 % interval.
      ttft_ms: median of those that do not.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    ttft_ms: float


def switch_rows(engine: Engine, *, rounds: int, progress: Progress = silent) -> list[Row]:
    """The time that changing the level adds to the next time to the first token, and the time to copy the
    level's weights, for a system that moves them.

    There is a ratio only where ours differs from zero.
    """
    added = added_by_level(engine, rounds=rounds, progress=progress)
    rows = []
    for level, each in added.items():
        moved_ms, moved_bytes = move(engine, level)
        case, sure = f"to level {level}", each.low_ms > 0
        note = (
            f"{own_bytes(engine, level)} bytes of weights moved; longer to the first token than a request "
            f"that stays, median of {rounds} pairs in turns, 95 % in [{each.low_ms:+.3f}, "
            f"{each.high_ms:+.3f}] ms; {each.median_ms / each.ttft_ms:+.2%} of its TTFT"
        )
        ratio = moved_ms / each.median_ms if sure else None
        copied = f"{moved_bytes} bytes of weights copied, which is all that is counted"
        rows += [
            row(case, "switch_ms", each.median_ms, note, baseline="LLM-Pruner", ratio=ratio),
            row(case, "switch_ms", moved_ms, copied, system="LLM-Pruner"),
        ]
    return rows


def added_by_level(engine: Engine, *, rounds: int, progress: Progress = silent) -> dict[int, Added]:
    """Times requests that change the level and requests that stay, in pairs.

    Every timed request follows another one: of a random other level, or of its own. The order in a pair and
    the prompts are drawn.
    """
    levels, config = engine.levels, GenerationConfig(max_tokens=1)
    draw = np.random.default_rng(0)
    times = {(level, changes): [] for level in levels for changes in (False, True)}

    def ttft_ms(level: int) -> float:
        prompt = draw.integers(0, engine.cfg.vocab_size, PROMPT_TOKENS).tolist()
        return engine.stream(prompt, config, level=level).result().timings.ttft_ms

    for done in range(rounds):
        for level in draw.permutation(levels).tolist():
            others = [each for each in levels if each != level] or [level]
            for changes in draw.permutation([False, True]).tolist():
                ttft_ms(int(draw.choice(others)) if changes else level)
                times[level, changes].append(ttft_ms(level))
        progress("switch", done + 1, rounds)
    found = {}
    for level in levels:
        stayed_ms = np.array(times[level, False])
        longer = np.array(times[level, True]) - stayed_ms
        interval = bootstrap(len(longer), lambda drawn, longer=longer: np.median(longer[drawn], axis=1))
        found[level] = Added(float(np.median(longer)), *interval, float(np.median(stayed_ms)))
    return found


def time_rows(profile: DeviceProfile) -> list[Row]:
    """Rows of every level's times, each against the whole model's."""
    rows = []
    for metric, times_of in (("ttft_ms", profile.ttft_ms), ("tpot_ms", profile.tpot_ms)):
        whole = times_of[profile.levels.index(FULL_LEVEL)]
        for level, times in zip(profile.levels, times_of, strict=True):
            for tokens, value, of_whole in zip(profile.tokens, times, whole, strict=True):
                against = {"baseline": "whole model", "ratio": of_whole / value}
                rows.append(row(f"level {level}, prompt {tokens}", metric, value, **against))
    return rows


def own_bytes(engine: Engine, level: int) -> int:
    """Bytes of a level's weights outside of the whole model's memory, without its recovery adapter."""
    shared = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine.runner_at(FULL_LEVEL).params)}
    weights = [getattr(weight, "base", weight) for weight in engine.runner_at(level).params.values()]
    leaves = [leaf for leaf in jax.tree.leaves(weights) if leaf.unsafe_buffer_pointer() not in shared]
    return sum(leaf.nbytes for leaf in leaves)


def memory_rows(model: Path, levels: Sequence[int]) -> list[Row]:
    """Peak memory of a process that serves all levels, against one that serves the whole model.

    Both read their buckets from disk, as a service does from its second start on: each runs twice.
    """
    # The whole model is the baseline here.
    peaks = {
        name: [in_process(_peak, model, asked) for _ in range(2)][-1]
        for name, asked in ((OURS, levels), ("whole model", ()))
    }
    return compared("serving all levels", "peak_memory_bytes", peaks)


def move(engine: Engine, level: int) -> tuple[float, int]:
    """Milliseconds and bytes of copying the units of a level out of the whole model in memory."""
    whole, part = engine.cfg.whole, engine.runner_at(level).cfg
    sizes, kept = (
        {name: math.prod(spec.shape) for name, spec in param_specs(cfg).items()} for cfg in (whole, part)
    )
    parts = [
        # As many bytes as the level has, from anywhere in the buffer.
        np.asarray(leaf).reshape(-1)[: -(-leaf.size * kept[name] // sizes[name])]
        for name, weight in engine.runner_at(FULL_LEVEL).model.weights.items()
        if is_unit_parameter(name)
        for leaf in jax.tree.leaves(getattr(weight, "base", weight))
    ]
    times = []
    for _ in range(5):
        began = time.perf_counter()
        copies = [part.copy() for part in parts]
        times.append(1000 * (time.perf_counter() - began))
        del copies
    return statistics.median(times), sum(part.nbytes for part in parts)


def _peak(model: Path, levels: Sequence[int]) -> int:
    """Peak memory of this process in bytes, after it answered at every level."""
    engine = Engine.open(model, options=EngineOptions(levels=tuple(levels)))
    config = GenerationConfig(max_tokens=4, ignore_eos=True)
    for level in engine.levels:
        engine.stream(list(range(PROMPT_TOKENS)), config, level=level).result()
    return peak_resident_bytes()
