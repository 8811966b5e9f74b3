"""Runs all parts: time per token of every system and without each technique, losses, and predictors, which
are judged, as eviction policies are, by the experts that a model visited.

Switch Transformers, EdgeMoE's own models, are measured on tasks: sources that are answered greedily, and what
answers are worth. The systems are the same, all with the same bytes for experts: those that load on demand
keep the experts that were used last. Each expert of an encoder is loaded at most once for a source, in all of
them.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.experts import Plan, systems
from benchmarks.harness.bench import Run
from benchmarks.harness.machine import REAL, Device, named_devices
from benchmarks.harness.report import OURS, Figure, Row, compared, draw_figures, row
from benchmarks.models import SWITCHES, Checkpoint, made_once, switch_bundle
from benchmarks.samples import (
    SEPARATOR,
    SOURCE_TASKS,
    chosen_tasks,
    read_lines,
    source_examples,
    stories_file,
)
from benchmarks.speculation.run import memory_rows
from jaxllm.bundle import Bundle
from jaxllm.bundle.calibrations import expert_facts, read_path_counts, read_token_experts
from jaxllm.cli.console import read_text
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.experts.prediction import POLICIES, PathCounts, Policy, Residents, TokenExperts
from jaxllm.models.features import require_decoder_alone
from jaxllm.models.parameters import sparse_layers
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.experts.weights import Predictor, make_predictor
from jaxllm.serving.ground.bundles import open_model, open_tokenizer
from jaxllm.serving.ground.expert_options import ExpertOptions
from jaxllm.serving.opening.engine import Engine
from jaxllm.tasks.example import paired_lines
from jaxllm.tasks.rouge import require_rouge, rouge
from jaxllm.text.tokenizer import Tokenizer


def run(bench: Run[Plan]) -> list[Row]:
    """Measures a mixture: of random weights, calibrated, or of an encoder-decoder by its tasks."""
    plan, progress = bench.plan, bench.progress
    if bench.shape in SWITCHES:
        # A context of 512 tokens takes a quarter of this budget.
        path, budgets = switch_bundle(bench.shape, progress), plan.budgets or (300_000_000,)
        return memory_rows(path, budgets, progress, context_tokens=128)
    again, text, tasks = False, None, []
    if bench.shape is not None:
        folder = bench.path()
        write = functools.partial(systems.write_random_mixed, folder, progress=progress)
        model = made_once("experts", f"{bench.shape}.jaxllm", write=write)
    else:
        model = bench.path()
        found = Checkpoint.find(model)
        of = f"{model} is of {found.cfg.model_type}"
        if plan.is_asked and found.cfg.encoder is None:
            raise ConfigError(f"{of}, a decoder alone: it is measured on a text; give --text instead")
        if found.cfg.encoder is not None and not plan.is_asked:
            raise ConfigError(
                f"{of}, an encoder-decoder: it is measured on a task; give --task or its --pairs"
            )
        again = plan.checkpoint is None and found.quantized
        folder, text = plan.checkpoint or found.folder(progress), plan.text or stories_file(None)
        tasks = TaskPairs.chosen(model, plan) if plan.is_asked else []
    mixed = (model, *plan.others)
    rows = [
        row
        for task in (tasks or [None])
        for row in Mixture(bench, folder, mixed, text=text, again=again, task=task).rows()
    ]
    return rows + (memory_rows(model, plan.budgets, progress) if plan.budgets else [])


class Mixture:
    """A mixture that is measured by its answers to a text, or to the sources of a task."""

    def __init__(
        self,
        bench: Run[Plan],
        folder: Path,
        mixed: Sequence[Path],
        *,
        text: Path | None = None,
        again: bool = False,
        task: "TaskPairs | None" = None,
    ) -> None:
        """Makes the baselines' bundles unless they are there.

        Args:
          folder: the mixture's Hugging Face folder.
          mixed: bundles that `jaxllm calibrate experts` made of it; the first is ours, the others are of
            other losses.
          text: UTF-8, whose pieces are the prompts; None draws tokens, for random weights.
          again: whether the folder's weights have been quantized, so that baselines of fewer bits are
            quantized a second time.
          task: of an encoder-decoder; None for a decoder alone.
        """
        self._bench, self._plan, self._folder, self._mixed = bench, bench.plan, folder, mixed
        self._text, self._again, self._task, plan = text, again, task, bench.plan
        cfg = systems.config_of(mixed)
        if task is None:
            require_decoder_alone(cfg, "a text", "measure it by its task: --task or --pairs")
        elif "losses" in plan.parts:
            require_rouge()
        self._layers = sparse_layers(cfg)
        experts, choices = cfg.experts * len(self._layers), cfg.experts_per_token
        self._rooms = [each * choices for each in plan.buffers]
        if task is not None:
            self._rooms = [max(1, int(share * experts)) for share in plan.task_buffers]
        self._setting = systems.Setting(
            bundles=systems.make_bundles(folder, mixed[0], bench.progress),
            buffer_experts=max(1 if task else choices, int(plan.share * experts)),
            context_tokens=plan.task_context_tokens if task else plan.context_tokens,
            storage=REAL.storage,
            equal=task is not None,
        )

    def rows(self) -> list[Row]:
        """All parts of the plan."""
        plan, rows, devices = self._plan, [], named_devices(self._plan.devices)
        for number, device in enumerate(devices):
            setting = dataclasses.replace(self._setting, storage=device.storage)
            if "systems" in plan.parts:
                rows += self._system_rows(setting, device, first=number == 0)
            if number == 0:
                rows += self._nested_rows(device) if "nested" in plan.parts else []
                if "ablations" in plan.parts:
                    with Bundle.open(setting.bundles["mixed"]) as bundle:
                        names = (OURS, *systems.ablations(bundle))
                    rows += self._time_rows(names, setting, device, f"ablation: {device.name}")
                for experts in self._rooms if "buffers" in plan.parts else ():
                    room = dataclasses.replace(setting, buffer_experts=experts)
                    case = f"buffer of {experts} experts: {device.name}"
                    rows += self._time_rows((OURS, f"{OURS}-lru"), room, device, case)
                rows += self._loss_rows(setting, device) if "losses" in plan.parts else []
            self._bench.progress("Measuring", number + 1, len(devices) + 1)
        rows += self._watched_rows() if "predictors" in plan.parts else []
        self._bench.progress("Measuring", len(devices) + 1, len(devices) + 1)
        if self._task is not None and self._task.called:
            rows = [dataclasses.replace(each, case=f"{self._task.called}: {each.case}") for each in rows]
        return rows

    def _measured(
        self, names: Sequence[str], setting: systems.Setting, device: Device
    ) -> tuple[dict[str, systems.Measured], dict[str, str | None]]:
        """Times all systems in turns, and how each ran; of baselines of a task that do not fit into the
        memory, says so."""
        engines: dict[str, Engine] = {}
        for name in names:
            try:
                engines[name] = systems.opened(name, setting)
            except BudgetExceeded as error:
                if name == OURS or self._task is None:
                    raise
                self._bench.tell(f"without {name}: {error}")
        if self._task is None:
            prompts, config = self._prompts(engines[names[0]]), systems.sampled(self._plan.tokens)
        else:
            sources = self._task.tokens(engines[OURS])[: self._plan.task_answers + 1]
            prompts, config = [source for source, _ in sources], lambda _: greedy(self._plan)
        found = systems.measured(engines, prompts, config)
        notes = {name: self._note(name, each, engines[name], device) for name, each in found.items()}
        notes[OURS] = "; ".join(filter(None, (notes[OURS], systems.widths_of(setting.bundles["mixed"]))))
        for each in engines.values():
            each.close()
        return found, notes

    def _note(self, name: str, each: systems.Measured, engine: Engine, device: Device) -> str | None:
        parts = [device.note] if device.note else []
        if self._again and name in systems.FOUR_BIT:
            parts.append("weights quantized twice")
        if self._task is not None:
            parts.append(f"{each.prompts} answers")
        if engine.model.streamed is not None:
            facts, read = engine.model.streamed.facts(), engine.model.streamed.counts.read_bytes
            parts.append(f"{facts['caching']} reads, {read / 1e6:,.0f} MB in all")
            if "hit_rate" in facts:
                parts.append(
                    f"{facts['hit_rate']:.0%} of experts were in memory, {facts['foreseen']} prefetched"
                )
        return "; ".join(parts)

    def _time_rows(
        self, names: Sequence[str], setting: systems.Setting, device: Device, case: str
    ) -> list[Row]:
        return median_rows(case, *self._measured(names, setting, device))

    def _system_rows(self, setting: systems.Setting, device: Device, *, first: bool) -> list[Row]:
        if self._task is None:
            # As published, systems that load on demand have no buffer; one has as many bytes as ours.
            names = (*systems.SYSTEMS, systems.EQUAL)
            rows = self._time_rows(names, setting, device, device.name)
            return rows + systems.memory_rows(names, setting, "memory") if first else rows
        found, notes = self._measured(systems.SYSTEMS, setting, device)
        return [
            *median_rows(device.name, found, notes),
            *layer_rows(found, self._layers, device.name),
            *systems.memory_rows(list(found), setting, f"memory: {device.name}"),
        ]

    def _loss_rows(self, setting: systems.Setting, device: Device) -> list[Row]:
        """What widths of experts lose and times per token, by tolerable loss."""
        rows, task, judged = [], self._task, {}
        if task is not None:
            judged = {
                name: task.quality(systems.resident(name, setting), self._plan)
                for name in systems.SYSTEMS
                if name != "IO-EXP"
            }
            # What it reads on demand has the checkpoint's own widths.
            judged["IO-EXP"] = judged["IO-FREE"]
        for path in self._mixed:
            with Bundle.open(path) as bundle:
                facts = expert_facts(bundle)
            if "most_loss" not in facts:
                continue
            case = f"tolerable loss {facts['most_loss']:.0%}"
            own = dataclasses.replace(setting, bundles={**setting.bundles, "mixed": path})
            if task is not None:
                values = {**judged, OURS: task.quality(systems.resident(OURS, own), self._plan)}
                rows += quality_rows(task, values, facts, case, self._plan)
            else:
                note = widths_note(facts)
                for prefix in ("", "held_out_"):
                    rows.append(row(case, f"{prefix}perplexity_loss", facts[f"{prefix}loss"], note))
            rows += self._time_rows((OURS,), own, device, case)
        return rows

    def _ids(self, tokenizer: Tokenizer) -> list[int]:
        text = "" if self._text is None else read_text(self._text).replace(SEPARATOR, "\n")
        return tokenizer.encode(text) if text else []

    def _prompts(self, engine: Engine, count: int = 0) -> list[list[int]]:
        return self._drawn(self._ids(engine.tokenizer), engine.cfg.vocab_size, count or self._plan.repeats)

    def _drawn(self, ids: Sequence[int], vocabulary: int, count: int) -> list[list[int]]:
        """So many prompts and one to warm up, of a text or else of tokens that are drawn."""
        draw, size = np.random.default_rng(0), self._plan.prompt_tokens
        if self._text is None:
            return draw.integers(0, vocabulary, (count + 1, size)).tolist()
        if len(ids) < 2 * size:
            raise ConfigError(f"{self._text}: {len(ids)} tokens are too few for prompts; give a longer text")
        at = draw.integers(0, len(ids) - size, count + 1)
        return np.array(ids)[at[:, None] + np.arange(size)].tolist()

    def _nested_rows(self, device: Device) -> list[Row]:
        """Nested experts beside IO-QEXP, of a trained mixture with wider experts; by loss with its own."""
        plan, mixed, windows = self._plan, self._mixed[0], []
        trained = self._text is not None
        wide = self._folder
        if trained and plan.widened > 1:
            wide = systems.widened_folder(self._folder, plan.widened)

        def setting(of: Path, device: Device, share: float) -> systems.NestedSetting:
            how = {"share": share, "context_tokens": plan.context_tokens, "storage": device.storage}
            return systems.NestedSetting.of(of, mixed, **how)

        with open_model(mixed) as bundle:
            ids = self._ids(Tokenizer(bundle.tokenizer_files()))
            prompts = self._drawn(ids, bundle.cfg.vocab_size, plan.nested_answers)
        if trained:
            windows = systems.text_windows(ids, plan.windows)
        rows = []
        for share in plan.shares:
            rows += systems.nested_rows(setting(wide, device, share), device, prompts, plan.tokens)
        return rows + systems.quality_of_losses(setting(self._folder, REAL, plan.share), windows)

    def _watched_rows(self) -> list[Row]:
        """Predictors by layer, and eviction policies by room, on the same visits."""
        engine, plan = systems.opened(OURS, self._setting), self._plan
        counts = read_path_counts(engine.model.bundle)
        each = max(1, plan.context_tokens - plan.prompt_tokens - 1)
        runs = -(-plan.watched_tokens // each)
        prompts = self._prompts(engine, runs)[:runs]
        visits, hits = watch(engine, counts, prompts, min(each, plan.watched_tokens))
        engine.close()
        rows = []
        names = {name: OURS if name == ExpertOptions.predictor else f"{OURS}-{name}" for name in COMPARED}
        # Predictors that use a text's statistics alone are left out where there are none.
        compared_fields = COMPARED if counts.alone.any() else (ExpertOptions.predictor,)
        for layer in range(len(visits)):
            rates = {names[name]: float(hits[name][layer]) for name in compared_fields} | {"oracle": 1.0}
            rows += [
                row(f"predictor: layer {layer}", "hit_rate", rate, system=system)
                for system, rate in rates.items()
            ]
        choices = visits.shape[-1]
        share = counts.alone / np.maximum(1.0, counts.alone.sum(-1, keepdims=True))
        for room in sorted({min(each, counts.alone.size) for each in self._rooms}):
            ratios = {
                OURS if name == "frequency-nearness" else name.upper(): hit_ratio(
                    visits, policy, room, 64 * choices * share
                )
                for name, policy in POLICIES.items()
            }
            rows += compared(f"eviction: {room} experts", "hit_rate", ratios)
        return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskPairs:
    """A task.

    Attributes:
      prefix: in front of each source; None for the model's own.
      called: in rows; empty for the only one.
      labels: whether targets are labels: an answer is then right or wrong, instead of judged by Rouge-2.
    """

    pairs: Sequence[tuple[str, str]]
    prefix: str | None = None
    called: str = ""
    labels: bool = False

    @classmethod
    def chosen(cls, model: Path, plan: Plan) -> "list[TaskPairs]":
        """What is answered: the pairs of two files, or tasks of the model."""
        if plan.pairs is not None:
            return [cls.read(*plan.pairs, plan.prefix)]
        with open_model(model) as bundle:
            tokenizer = open_tokenizer(bundle.tokenizer_files())
        return [cls.of_data(name, plan.data, tokenizer) for name in plan.tasks]

    @classmethod
    def of_data(cls, name: str, data: Path | None, tokenizer: Tokenizer) -> "TaskPairs":
        """The held-out examples of one of a model's tasks."""
        chosen_tasks(tokenizer, [name])
        task = SOURCE_TASKS[name]
        return cls(
            pairs=[(each.user, each.answer) for each in source_examples(name, data)],
            prefix=tokenizer.files.tasks[name],
            called=task.called,
            labels=task.labels,
        )

    @classmethod
    def read(cls, source: Path, target: Path, prefix: str | None = None) -> "TaskPairs":
        """The pairs of two text files, whose lines of the same number are one; none has an empty side."""
        found = paired_lines(source, target, read_lines)
        if not found:
            raise ConfigError(f"{source} and {target} have no pair; give texts, one per line")
        return cls(pairs=found, prefix=prefix)

    def tokens(self, engine: Engine) -> list[tuple[list[int], str]]:
        """The token ids of each source, and its target; of a model's own task those that are too long are
        left out."""
        lead = engine.tokenizer.files.source_prefix if self.prefix is None else f"{self.prefix.strip()} "
        found = [(list(engine.tokenizer.encode(lead + source)), target) for source, target in self.pairs]
        most = engine.options.context_tokens
        if self.called:
            found = [(source, target) for source, target in found if len(source) <= most]
        longest = max((len(source) for source, _ in found), default=0)
        if longest > most:
            raise ConfigError(
                f"a source has {longest} tokens, and this bench reads at most {most}; give shorter ones"
            )
        return found

    def quality(self, engine: Engine, plan: Plan) -> float:
        """Mean Rouge-2 of an engine's answers, or the share of right labels; the engine is closed."""
        scores = []
        for source, target in self.tokens(engine)[-plan.judged :]:
            said = str(engine.generate(source, greedy(plan)).text)
            right = float(said.strip() == target)
            scores.append(right if self.labels else rouge([target], said)["rouge2"])
        engine.close()
        return sum(scores) / len(scores)


def greedy(plan: Plan) -> GenerationConfig:
    """How sources are answered."""
    return GenerationConfig(max_tokens=plan.task_tokens, sampling=Sampling(temperature=0))


def layer_rows(found: Mapping[str, systems.Measured], prefixes: Sequence[str], device: str) -> list[Row]:
    """Hit rates and loads by layer, of the systems that load experts."""
    rows, loading = [], {name: each for name, each in found.items() if each.counts["visits"]}
    for index, prefix in enumerate(prefixes):
        side, _, layer = prefix.rstrip(".").rpartition("layers.")
        case = f"{'encoder' if side else 'decoder'} layer {int(layer) + 1}: {device}"
        counted = [(name, each, each.counts) for name, each in loading.items()]
        hits = {name: of["hits", index] / max(1, of["visits", index]) for name, _, of in counted}
        loads = {name: of["loads", index] / max(1, each.prompts) for name, each, of in counted}
        rows += compared(case, "hit_rate", hits) + compared(case, "loads_per_prompt", loads)
    return rows


def quality_rows(
    task: TaskPairs, values: Mapping[str, float], facts: Mapping[str, Any], case: str, plan: Plan
) -> list[Row]:
    """Rouge-2 of every system, or its share of right labels, beside the tolerable loss of a calibration."""
    count, metric = min(plan.judged, len(task.pairs)), "accuracy" if task.labels else "rouge2"
    tolerable, measure = facts["most_loss"], facts.get("measure", "perplexity")
    notes: dict[str, str | None] = {
        name: f"{count} answers; {share_lost(value, values['IO-FREE'], tolerable)}"
        for name, value in values.items()
    }
    notes[OURS] = f"{notes[OURS]}; calibrated by {measure}"
    note = widths_note(facts)
    losses = [row(case, f"{measure}_{name}", facts[name], note) for name in ("loss", "held_out_loss")]
    return [*compared(case, metric, values, notes), *losses]


def widths_note(facts: Mapping[str, Any]) -> str:
    """How many experts a calibration has lowered."""
    return f"{facts['lowered']} of {facts['experts']} at {facts['lower']} bits, others {facts['upper']}"


def share_lost(value: float, whole: float, tolerable: float) -> str:
    """How much of what the float model reaches is lost, and whether that is tolerable."""
    if not whole:
        return "the float model has none to lose"
    lost = 1 - value / whole
    return f"lost {lost:.1%}, {'within' if lost <= tolerable else 'more than'} {tolerable:.0%}"


def median_rows(
    case: str, found: Mapping[str, systems.Measured], notes: Mapping[str, str | None]
) -> list[Row]:
    """Medians per token, and per source of encoder-decoders."""
    rows = []
    for metric, of in {"tpot_ms": "token_ms", "encode_ms": "encode_ms"}.items():
        taken = {name: getattr(each, of) for name, each in found.items()}
        times = {name: median(values) for name, values in taken.items() if values}
        if OURS in times:
            rows += compared(case, metric, times, notes)
    return rows


_UNKNOWN = np.zeros(0, np.int32)
COMPARED = ("paths", "router", "tokens", "frequency")


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


def watch(
    engine: Engine, counts: PathCounts, prompts: Sequence[Sequence[int]], tokens: int
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Observes the experts that an engine visits in its answers; its experts are streamed.

    Returns:
      Visits `[L_sparse, M, k]` int, of M decoded tokens; and by predictor the share of each layer's visits
      that it predicted when the layer before was computed, of the first layer when the token was known.
    """
    watching = _Watching(counts, read_token_experts(engine.model.bundle))
    engine.runner.experts.predictor = watching  # pyright: ignore
    for number, prompt in enumerate(prompts):
        engine.generate(list(prompt), systems.sampled(tokens)(number))
    hits = {name: np.mean(each, axis=0) for name, each in watching.found.items()}
    return np.stack(watching.passes, axis=1), hits


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
FIGURES = (
    *(
        Figure(name=name, metric=metric, case=case, across=across, up=up)
        for name, metric, case, across, up in _LINES
    ),
    Figure(
        name="systems",
        metric="tpot_ms",
        case="(?!ablation|buffer of|tolerable loss)(?P<x>.*)",
        up=_TIME,
        kind="bars",
    ),
    Figure(name="ablations", metric="tpot_ms", case="(?P<x>ablation.*)", up=_TIME, kind="bars"),
)
draw = functools.partial(draw_figures, "experts", FIGURES)
