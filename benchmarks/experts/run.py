"""Runs all parts: time per token of every system and without each technique, losses, and predictors."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.experts import PARTS
from benchmarks.experts.nested import NestedPlan, nested_rows, quality_rows, text_windows
from benchmarks.experts.replay import COMPARED, hit_ratio, watch
from benchmarks.experts.systems import (
    FOUR_BIT,
    OURS,
    SYSTEMS,
    NestedSetting,
    Setting,
    ablations,
    config_of,
    make_bundles,
    make_nested,
    opened,
    planned_bytes,
)
from benchmarks.experts.widened import widened_folder
from benchmarks.measuring.report import Row, compared, median
from benchmarks.measuring.storage import BOARDS, REAL, Device, named_devices
from benchmarks.samples.stories import SEPARATOR
from jaxllm.bundle import Bundle
from jaxllm.bundle.experts import expert_facts, read_path_counts
from jaxllm.errors import ConfigError
from jaxllm.experts.eviction import POLICIES
from jaxllm.models.rooms import require_decoder_alone
from jaxllm.sampling import Sampling
from jaxllm.text.tokenizer import Tokenizer
from serving.bundles import open_model
from serving.commands.console import read_text
from serving.engine import Engine
from serving.host.progress import Progress
from serving.request import GenerationConfig
from serving.weights.experts.options import ExpertOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
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

    devices: tuple[Device, ...] = named_devices(BOARDS)
    tokens: int = 32
    repeats: int = 3
    prompt_tokens: int = 24
    context_tokens: int = 256
    share: float = 0.25
    buffers: tuple[int, ...] = (2, 5, 10, 20)
    watched_tokens: int = 400
    parts: tuple[str, ...] = tuple(PARTS)
    text: Path | None = None
    widened: int = 64
    shares: tuple[float, ...] = (0.25, 0.5)
    nested_answers: int = 16
    windows: int = 100
    quantized_again: bool = False

    @classmethod
    def quick(cls) -> "Plan":
        """Fits in a minute for a small model, once its bundles are made."""
        return cls(
            devices=named_devices(["tx2-ssd"]),
            tokens=12,
            repeats=1,
            buffers=(2, 10),
            watched_tokens=60,
            windows=10,
            shares=(0.25,),
            nested_answers=2,
        )


def run(
    folder: Path, mixed: Sequence[Path], cache: Path, plan: Plan, progress: Progress | None = None
) -> list[Row]:
    """Measures everything.

    Args:
      folder: a mixture's Hugging Face folder.
      mixed: bundles that `jaxllm quantize-experts` made of it; the first is ours, the others are of other
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
        if progress is not None:
            progress("Measuring", number + 1, stages)
    if "predictors" in plan.parts:
        rows += _watched_rows(fast, plan, choices)
    if progress is not None:
        progress("Measuring", stages, stages)
    return rows


def _token_ms(engines: dict[str, Engine], plan: Plan) -> dict[str, float]:
    """Time per token of each system, the median over answers to the same prompts, in turns."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number, prompt in enumerate(_prompts(next(iter(engines.values())), plan)):
        # Drawn: a greedy answer of random weights repeats one token, and visits the same experts.
        sampling = Sampling(temperature=1.0, seed=number)
        config = GenerationConfig(max_tokens=plan.tokens, ignore_eos=True, sampling=sampling)
        order = list(engines) if number % 2 else list(engines)[::-1]
        for name in order:
            answer = engines[name].generate(prompt, config)
            # The first answer warms up: code runs for the first time, and expert buffers are empty.
            if number:
                found[name].append(answer.timings.tpot_ms(len(answer.tokens)))
    return {name: median(each) for name, each in found.items()}


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
        parts.append(f"{facts['caching']} reads")
        if "hit_rate" in facts:
            parts.append(f"{facts['hit_rate']:.0%} of experts were in memory, {facts['foreseen']} prefetched")
    return "; ".join(parts)


def _timed(names: Sequence[str], setting: Setting, device: Device, plan: Plan, case: str) -> list[Row]:
    engines = {name: opened(name, setting) for name in names}
    times = _token_ms(engines, plan)
    notes: dict[str, str | None] = {
        name: _note(name, engine, device, plan) for name, engine in engines.items()
    }
    rows = compared(
        times, ours=OURS, case=case, metric="tpot_ms", unit="ms", notes=notes, lower_is_better=True
    )
    for each in engines.values():
        each.close()
    return rows


def _system_rows(setting: Setting, device: Device, plan: Plan, *, first: bool) -> list[Row]:
    rows = _timed(SYSTEMS, setting, device, plan, device.name)
    if not first:
        return rows
    memory = {}
    for name in SYSTEMS:
        engine = opened(name, setting)
        memory[name] = float(planned_bytes(engine))
        engine.close()
    return rows + compared(
        memory, ours=OURS, case="memory", metric="peak_memory_bytes", unit="bytes", lower_is_better=True
    )


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
            rows.append(Row(case=case, system=OURS, metric=metric, value=facts[key], unit="share", note=note))
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
        rows += [_hits(case, names[name], float(watched.hits[name][layer])) for name in told]
        rows.append(_hits(case, "oracle", 1.0))
    share = counts.alone / np.maximum(1.0, counts.alone.sum(-1, keepdims=True))
    for times in sorted({*plan.buffers}):
        room = min(times * choices, counts.alone.size)
        ratios = {
            OURS if name == "frequency-nearness" else name.upper(): hit_ratio(
                watched.visits, policy, room, 64 * choices * share
            )
            for name, policy in POLICIES.items()
        }
        rows += compared(ratios, ours=OURS, case=f"eviction: {room} experts", metric="hit_rate", unit="share")
    return rows


def _hits(case: str, system: str, value: float) -> Row:
    return Row(case=case, system=system, metric="hit_rate", value=value, unit="share")
