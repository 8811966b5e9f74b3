"""Runs all parts: time per token of every system and without each technique, losses, and predictors.

Judges predictors and eviction policies by the experts that a model visited.

Measures what a loss of experts costs: perplexity and agreement, as tokens are decoded from storage.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.experts import PARTS
from benchmarks.experts.nested import (
    NestedPlan,
    nested_rows,
    quality_rows,
    text_windows,
    widened_folder,
)
from benchmarks.experts.systems import (
    EQUAL,
    FOUR_BIT,
    SYSTEMS,
    NestedSetting,
    Setting,
    ablations,
    config_of,
    drawn,
    make_bundles,
    make_nested,
    measured,
    memory_rows,
    opened,
    widths_of,
)
from benchmarks.harness.figures import Figure, draw_figures
from benchmarks.harness.machine import BOARDS, REAL, Device, named_devices
from benchmarks.harness.plan import BasePlan, silent, sized
from benchmarks.harness.report import OURS, Row, compared, median, row
from benchmarks.samples import SEPARATOR
from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import expert_facts, read_path_counts, read_token_experts
from jaxllm.cli.console import read_text
from jaxllm.errors import ConfigError
from jaxllm.experts.prediction import POLICIES, PathCounts, Policy, Residents, TokenExperts
from jaxllm.models.features import require_decoder_alone
from jaxllm.serving.experts.predictors import Predictor, make_predictor
from jaxllm.serving.ground.bundles import open_model
from jaxllm.serving.ground.expert_options import ExpertOptions
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.opening.engine import Engine
from jaxllm.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(BasePlan):
    """Sizes of one run.

    Attributes:
      devices: that experts are read from.
      tokens: of each answer.
      repeats: answers of each system.
      prompt_tokens: of each prompt.
      context_tokens: of every context.
      share: room of ours, as a share of all experts.
      buffers: further rooms, in times the experts of a token at one layer, for the sweep and for the replay
        of eviction policies.
      watched_tokens: by which predictors and policies are judged.
      parts: of `PARTS`, those to run; all but systems on the first storage alone.
      text: UTF-8, whose pieces are the prompts; None draws tokens, for random weights.
      widened: times as many neurons the experts of a trained mixture get where nested ones are timed.
      shares: rooms of nested experts, as shares of all of them.
      nested_answers: of each system beside nested experts.
      windows: of text, by which the loss of nested experts is judged.
      quantized_again: whether the folder's weights have been quantized, so that baselines of fewer bits are
        quantized a second time.
    """

    devices: tuple[Device, ...] = sized(named_devices(BOARDS), quick=named_devices(["tx2-ssd"]))
    tokens: int = sized(32, quick=12)
    repeats: int = sized(3, quick=1)
    prompt_tokens: int = 24
    context_tokens: int = 256
    share: float = 0.25
    buffers: tuple[int, ...] = sized((2, 5, 10, 20), quick=(2, 10))
    watched_tokens: int = sized(400, quick=60)
    parts: tuple[str, ...] = tuple(PARTS)
    text: Path | None = None
    widened: int = 64
    shares: tuple[float, ...] = sized((0.25, 0.5), quick=(0.25,))
    nested_answers: int = sized(16, quick=2)
    windows: int = sized(100, quick=10)
    quantized_again: bool = False


def run(
    folder: Path, mixed: Sequence[Path], cache: Path, plan: Plan, progress: Progress = silent
) -> list[Row]:
    """Measures everything.

    Args:
      folder: a mixture's Hugging Face folder.
      mixed: bundles that `jaxllm calibrate experts` made of it; the first is ours, the others are of other
        losses.
      cache: a folder for the baselines' bundles.
      plan: sizes.
      progress: called with (stage, done, total).

    Raises:
      ConfigError: a bundle's experts are not stored apart.
      CheckpointError: a model cannot be opened.
    """
    cfg = config_of(mixed)
    require_decoder_alone(cfg, "a text", "measure it by its task: --task or --pairs")
    choices, experts = cfg.experts_per_token, cfg.experts * sum(cfg.sparse_layers)
    rows: list[Row] = []
    stages = len(plan.devices) + 1
    fast = Setting(
        bundles=make_bundles(folder, mixed[0], cache, progress),
        buffer_experts=max(choices, int(plan.share * experts)),
        context_tokens=plan.context_tokens,
        storage=REAL.storage,
    )
    for number, device in enumerate(plan.devices):
        setting = dataclasses.replace(fast, storage=device.storage)
        if "systems" in plan.parts:
            rows += _system_rows(setting, device, plan, first=number == 0)
        if number == 0:
            if "nested" in plan.parts:
                rows += _nested_rows(folder, mixed[0], cache, device, plan)
            if "ablations" in plan.parts:
                rows += _ablation_rows(setting, device, plan)
            if "buffers" in plan.parts:
                rows += _buffer_rows(setting, device, plan, choices)
            if "losses" in plan.parts:
                rows += _loss_rows(setting, device, plan, mixed)
        progress("Measuring", number + 1, stages)
    if "predictors" in plan.parts:
        rows += _watched_rows(fast, plan, choices)
    progress("Measuring", stages, stages)
    return rows


def _prompts(engine: Engine, plan: Plan) -> list[list[int]]:
    text = "" if plan.text is None else read_text(plan.text).replace(SEPARATOR, "\n")
    return _drawn_prompts(engine.tokenizer.encode(text) if text else [], engine.cfg.vocab_size, plan)


def _drawn_prompts(text_ids: Sequence[int], vocabulary: int, plan: Plan) -> list[list[int]]:
    """Prompts from a text, or without one of tokens that are drawn."""
    draw = np.random.default_rng(0)
    shape = (plan.repeats + 1, plan.prompt_tokens)
    if plan.text is None:
        return draw.integers(0, vocabulary, shape).tolist()
    ids = np.array(text_ids)
    if len(ids) < 2 * plan.prompt_tokens:
        raise ConfigError(f"{plan.text}: {len(ids)} tokens are too few for prompts; give a longer text")
    at = draw.integers(0, len(ids) - plan.prompt_tokens, shape[0])
    return ids[at[:, None] + np.arange(plan.prompt_tokens)].tolist()


def _note(name: str, engine: Engine, device: Device, plan: Plan) -> str:
    parts = [device.note] if device.note else []
    if plan.quantized_again and name in FOUR_BIT:
        parts.append("weights quantized twice")
    if engine.model.streamed is not None:
        facts = engine.model.streamed.facts()
        read = engine.model.streamed.counts.read_bytes
        parts.append(f"{facts['caching']} reads, {read / 1e6:,.0f} MB in all")
        if "hit_rate" in facts:
            parts.append(f"{facts['hit_rate']:.0%} of experts were in memory, {facts['foreseen']} prefetched")
    return "; ".join(parts)


def _timed(names: Sequence[str], setting: Setting, device: Device, plan: Plan, case: str) -> list[Row]:
    engines = {name: opened(name, setting) for name in names}
    found = measured(engines, _prompts(engines[names[0]], plan), drawn(plan.tokens))
    times = {name: median(each.token_ms) for name, each in found.items()}
    notes: dict[str, str | None] = {
        name: _note(name, engine, device, plan) for name, engine in engines.items()
    }
    notes[OURS] = "; ".join(filter(None, (notes[OURS], widths_of(setting.bundles.mixed))))
    rows = compared(case, "tpot_ms", times, notes)
    for each in engines.values():
        each.close()
    return rows


def _system_rows(setting: Setting, device: Device, plan: Plan, *, first: bool) -> list[Row]:
    # As published, systems that load on demand have no buffer; one has as many bytes as ours.
    names = (*SYSTEMS, EQUAL)
    rows = _timed(names, setting, device, plan, device.name)
    return rows + memory_rows(names, setting, "memory") if first else rows


def _ablation_rows(setting: Setting, device: Device, plan: Plan) -> list[Row]:
    with Bundle.open(setting.bundles.mixed) as bundle:
        names = (OURS, *ablations(bundle))
    return _timed(names, setting, device, plan, f"ablation: {device.name}")


def _buffer_rows(setting: Setting, device: Device, plan: Plan, choices: int) -> list[Row]:
    rows = []
    for buffer in plan.buffers:
        room = dataclasses.replace(setting, buffer_experts=buffer * choices)
        case = f"buffer of {buffer * choices} experts: {device.name}"
        rows += _timed((OURS, f"{OURS}-lru"), room, device, plan, case)
    return rows


def _loss_rows(setting: Setting, device: Device, plan: Plan, mixed: Sequence[Path]) -> list[Row]:
    """Losses of the experts' widths and times per token, by tolerable loss."""
    rows = []
    for path in mixed:
        with Bundle.open(path) as bundle:
            facts = expert_facts(bundle)
        if "most_loss" not in facts:
            continue
        case = f"tolerable loss {facts['most_loss']:.0%}"
        note = f"{facts['lowered']} of {facts['experts']} at {facts['lower']} bits, others {facts['upper']}"
        for metric, key in (("perplexity_loss", "loss"), ("held_out_perplexity_loss", "held_out_loss")):
            rows.append(row(case, metric, facts[key], note))
        bundles = dataclasses.replace(setting.bundles, mixed=path)
        rows += _timed((OURS,), dataclasses.replace(setting, bundles=bundles), device, plan, case)
    return rows


def _nested_rows(folder: Path, mixed: Path, cache: Path, device: Device, plan: Plan) -> list[Row]:
    """Nested experts beside IO-QEXP; of a trained mixture with wider experts, and by loss with its own."""
    trained = plan.text is not None
    wide = widened_folder(folder, cache, plan.widened) if trained and plan.widened > 1 else folder

    def setting(of: Path, device: Device, share: float) -> NestedSetting:
        nested, four_bit = make_nested(of, mixed, cache)
        return NestedSetting(
            nested=nested,
            four_bit=four_bit,
            share=share,
            context_tokens=plan.context_tokens,
            storage=device.storage,
        )

    ids, windows = list[int](), list[list[int]]()
    with open_model(mixed) as bundle:
        tokenizer = Tokenizer(bundle.tokenizer_files())
        if plan.text is not None:
            ids = tokenizer.encode(read_text(plan.text).replace(SEPARATOR, "\n"))
            windows = text_windows(ids, plan.windows)
        several = dataclasses.replace(plan, repeats=plan.nested_answers)
        prompts = _drawn_prompts(ids, bundle.cfg.vocab_size, several)
    nested = NestedPlan(tokens=plan.tokens, prompts=prompts, windows=windows)
    rows = [row for share in plan.shares for row in nested_rows(setting(wide, device, share), device, nested)]
    return rows + quality_rows(setting(folder, REAL, plan.share), nested)


def _watched_rows(setting: Setting, plan: Plan, choices: int) -> list[Row]:
    """Predictors by layer, and eviction policies by room, on the same visits."""
    engine = opened(OURS, setting)
    counts = read_path_counts(engine.model.bundle)
    each = max(1, plan.context_tokens - plan.prompt_tokens - 1)
    runs = -(-plan.watched_tokens // each)
    prompts = _prompts(engine, dataclasses.replace(plan, repeats=runs))[:runs]
    watched = watch(engine, counts, prompts, min(each, plan.watched_tokens))
    engine.close()
    rows = []
    names = {name: OURS if name == ExpertOptions.predictor else f"{OURS}-{name}" for name in COMPARED}
    # Predictors that use a text's statistics alone are left out where there are none.
    told = COMPARED if counts.alone.any() else (ExpertOptions.predictor,)
    for layer in range(len(watched.visits)):
        case = f"predictor: layer {layer}"
        rows += [row(case, "hit_rate", float(watched.hits[name][layer]), system=names[name]) for name in told]
        rows.append(row(case, "hit_rate", 1.0, system="oracle"))
    share = counts.alone / np.maximum(1.0, counts.alone.sum(-1, keepdims=True))
    for times in sorted({*plan.buffers}):
        room = min(times * choices, counts.alone.size)
        ratios = {
            OURS if name == "frequency-nearness" else name.upper(): hit_ratio(
                watched.visits, policy, room, 64 * choices * share
            )
            for name, policy in POLICIES.items()
        }
        rows += compared(f"eviction: {room} experts", "hit_rate", ratios)
    return rows


_UNKNOWN = np.zeros(0, np.int32)
COMPARED = ("paths", "router", "tokens", "frequency")


@dataclasses.dataclass(frozen=True)
class Watched:
    """The visits of a model's tokens to experts, and their predictions.

    Attributes:
      visits: `[L_sparse, M, k]` int, of M decoded tokens.
      hits: by predictor, the share of each layer's visits that it predicted when the layer before was
        computed, of the first layer when the token was known.
    """

    visits: np.ndarray
    hits: Mapping[str, np.ndarray]


class _Watching(Predictor):
    """Asks all predictors at each layer of a decoded token, and predicts nothing itself."""

    def __init__(self, counts: PathCounts, tokens: TokenExperts) -> None:
        self._all = {name: make_predictor(name, counts, tokens) for name in COMPARED}
        self._predicted: dict[str, list[np.ndarray]] = {name: [] for name in COMPARED}
        self.passes: list[np.ndarray] = []
        self.found: dict[str, list[list[float]]] = {name: [] for name in COMPARED}

    def begin(self, tokens: np.ndarray = _UNKNOWN) -> None:
        """Tells all predictors the tokens of the next pass."""
        for each in self._all.values():
            each.begin(tokens)

    def probabilities(self, visited: list[np.ndarray], ahead: np.ndarray, steps: int) -> None:
        """Keeps each predictor's order of the next layer's experts."""
        if steps == 1:
            for name, each in self._all.items():
                chances = each.probabilities(visited, ahead, 1)
                assert chances is not None
                self._predicted[name].append(np.argsort(-chances, kind="stable"))

    def learn(self, visited: list[np.ndarray]) -> None:
        """Compares predictions with visits."""
        tokens, choices = visited[0].shape
        for name, predicted in self._predicted.items():
            # After the last layer the next token's first layer was predicted, before that token was known.
            if tokens == 1:
                pairs = zip(visited, predicted[:-1], strict=True)
                self.found[name].append(
                    [float(np.isin(each[0], best[:choices]).mean()) for each, best in pairs]
                )
            self._predicted[name] = []
        if tokens == 1:
            self.passes.append(np.stack(visited)[:, 0])
        for each in self._all.values():
            each.learn(visited)


def watch(engine: Engine, counts: PathCounts, prompts: Sequence[Sequence[int]], tokens: int) -> Watched:
    """Observes the experts that an engine visits in its answers; its experts are streamed."""
    watching = _Watching(counts, read_token_experts(engine.model.bundle))
    engine.runner.experts.predictor = watching  # pyright: ignore
    for number, prompt in enumerate(prompts):
        engine.generate(list(prompt), drawn(tokens)(number))
    hits = {name: np.mean(each, axis=0) for name, each in watching.found.items()}
    return Watched(np.stack(watching.passes, axis=1), hits)


def hit_ratio(visits: np.ndarray, policy: Policy, room: int, frequency: np.ndarray) -> float:
    """Share of visits `[L, M, k]` whose expert is in a buffer with room for `room` experts.

    Args:
      visits: in the order in which tokens pass layers.
      policy: chooses the expert to evict.
      room: at least k.
      frequency: `[L, E]` earlier visits.
    """
    layers, tokens, _ = visits.shape
    frequency = frequency.astype(np.float64).copy()
    loaded, used = np.zeros(frequency.shape, int), np.zeros(frequency.shape, int)
    inside: list[tuple[int, int]] = []
    hits = tick = 0
    for token in range(tokens):
        for layer in range(layers):
            tick += 1
            wanted = [(layer, int(expert)) for expert in visits[layer, token]]
            for key in wanted:
                frequency[key] += 1
                used[key] = tick
            hits += sum(key in inside for key in wanted)
            for key in wanted:
                if key in inside:
                    continue
                if len(inside) >= room:
                    others = [other for other in inside if other not in wanted]
                    at = tuple(np.array(others).T)
                    residents = Residents(at[0], frequency[at], loaded[at], used[at])
                    inside.remove(others[int(np.argmin(policy(residents, layer, layers, tick)))])
                inside.append(key)
                loaded[key] = tick
    return hits / visits.size


_LOSS, _IN_MEMORY = r"tolerable loss (?P<x>\d+)%", "visits to experts in memory (share)"
_TIME = "time per token (ms)"
# Name, metric, cases, the axes' names.
_LINES = (
    ("predictors", "hit_rate", r"predictor: layer (?P<x>\d+)", "sparse layer", "predicted visits (share)"),
    ("evictions", "hit_rate", r"eviction: (?P<x>\d+) experts", "room (experts)", _IN_MEMORY),
    ("buffers", "tpot_ms", r"buffer of (?P<x>\d+) experts: .*", "room (experts at 4 bits)", _TIME),
    ("losses", "tpot_ms", _LOSS, "tolerable loss (%)", _TIME),
    ("rouge", "rouge2", _LOSS, "tolerable loss (%)", "Rouge-2"),
    ("encoder_hits", "hit_rate", r"encoder layer (?P<x>\d+): .*", "layer of the encoder", _IN_MEMORY),
    ("decoder_hits", "hit_rate", r"decoder layer (?P<x>\d+): .*", "layer of the decoder", _IN_MEMORY),
)
_OTHER = "(?!ablation|buffer of|tolerable loss)(?P<x>.*)"
FIGURES = (
    *(
        Figure(name=name, metric=metric, case=case, across=across, up=up)
        for name, metric, case, across, up in _LINES
    ),
    Figure(name="systems", metric="tpot_ms", case=_OTHER, up=_TIME, kind="bars"),
    Figure(name="ablations", metric="tpot_ms", case="(?P<x>ablation.*)", up=_TIME, kind="bars"),
)
draw = functools.partial(draw_figures, "experts", FIGURES)
