"""Times every system's answers, and compares ours with the target's own."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path

from benchmarks.harness.bench import Run
from benchmarks.harness.machine import Device, named_devices
from benchmarks.harness.report import OURS, Row, compared, row
from benchmarks.models import Checkpoint
from benchmarks.speculation import Plan
from benchmarks.speculation import answers as replies
from benchmarks.speculation import systems as rivals
from benchmarks.speculation.in_memory import enlarged_bundle, in_memory_rows
from benchmarks.speculation.memory import memory_rows
from jaxllm.bundle import Bundle
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.bundles import find_model, open_model, open_tokenizer
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.speculation.speculation import SpeculationCounts
from jaxllm.tasks.rouge import require_rouge
from jaxllm.text.tokenizer import Tokenizer


def shape_rows(bench: Run[Plan]) -> list[Row]:
    """Memory and reads of a process that runs random weights."""
    with open_model(bench.path(), weights="int8", progress=bench.progress) as bundle:
        budgets = [int(share * bundle.weight_bytes) for share in bench.plan.shares]
        return memory_rows(bundle.path, budgets, bench.progress)


# Token ids of prompts, by task: what systems are tuned on, and shards judged, and what is counted.
Prompts = tuple[dict[str, list[list[int]]], dict[str, list[list[int]]]]


def _prompts(plan: Plan, tokenizer: Tokenizer) -> Prompts:
    """As many as a plan asks for; none is both tried and timed.

    Raises:
      ConfigError: a file is missing or malformed, or no task has more prompts than are tried.
    """
    found = _read_prompts(plan, tokenizer, plan.prompts + plan.tried, plan.seed)
    timed = {task: each[plan.tried :] for task, each in found.items() if each[plan.tried :]}
    if not timed:
        raise ConfigError(f"all prompts are taken by the {plan.tried} of each task that systems are tuned on")
    return {task: each[: plan.tried] for task, each in found.items()}, timed


def _read_prompts(plan: Plan, tokenizer: Tokenizer, count: int, seed: int) -> dict[str, list[list[int]]]:
    most = plan.context_tokens - plan.tokens
    return replies.read_prompts(
        plan.data, tokenizer, count=count, most_tokens=most, seed=seed, file=plan.file
    )


def run(bench: Run[Plan]) -> list[Row]:
    """Measures a trained target; tells of every budget that is too small, whose rows are left out.

    Raises:
      ConfigError: a file of the tasks is missing, or no budget is large enough.
      CheckpointError: a model cannot be opened.
    """
    try:
        require_rouge()
    except ConfigError:
        bench = bench.changed(judged=False)
        if "systems" in bench.plan.parts:
            bench.tell("without BLD and STI, whose answers are judged by Rouge: pip install 'jaxllm[bench]'")
    model = bench.path()
    if bench.plan.enlarge:
        model = enlarged_bundle(model, bench.plan.enlarge, bench.progress)
    draft = None if bench.plan.draft == "nested" else find_model(bench.plan.draft)
    rows: list[Row] = []
    target = open_model(model)
    # Small models have small windows.
    bench = bench.changed(context_tokens=min(bench.plan.context_tokens, target.cfg.window_tokens))
    tried, timed = _prompts(bench.plan, open_tokenizer(target.tokenizer_files()))
    if "in-memory" in bench.plan.parts and target.cfg.encoder is not None:
        bench.tell("without in-memory: it is of decoders alone")
    elif "in-memory" in bench.plan.parts:
        rows += in_memory_rows(model, draft, timed, tried, bench)
    if {*bench.plan.parts} - {"in-memory"}:
        rows += _budget_rows(target, draft, (tried, timed), bench)
    return rows


def _budget_rows(target: Bundle, draft: Path | None, prompts: Prompts, bench: Run[Plan]) -> list[Row]:
    """Rows of every storage and budget.

    Raises:
      ConfigError: no budget is large enough.
    """
    plan, rows = bench.plan, list[Row]()
    narrow: Mapping[float, Path] = {}
    judged = "systems" in plan.parts and plan.judged
    if judged and draft is None:
        bench.tell("without BLD: its small model answers by itself; name one by --draft")
    if judged and target.cfg.encoder is not None:
        bench.tell("without STI: the shards of encoder-decoders are not judged yet")
    elif judged:
        texts = [each for all_ in prompts[0].values() for each in all_]
        # Without tuning the middle is taken.
        bits = rivals.NARROW_BITS if texts else rivals.NARROW_BITS[len(rivals.NARROW_BITS) // 2 :][:1]
        narrow = rivals.narrow_bundles(target.path, bits, texts, bench.progress)
    for device, share in itertools.product(named_devices(plan.devices), plan.shares):
        setting = rivals.Setting(
            model=target.path,
            draft=draft,
            narrow=narrow,
            weights_bytes=int(share * target.weight_bytes),
            context_tokens=plan.context_tokens,
            storage=device.storage,
        )
        case = f"{device.name}, {share:.0%} of the model in memory"
        try:
            found = _Systems(setting, device, prompts, bench)
        except BudgetExceeded as error:
            bench.tell(f"without {case}: {error}")
            continue
        rows += found.rows(case, twice=Checkpoint.find(target.path).quantized)
        # What answers say depends neither on storage nor on memory.
        if "same-answers" in plan.parts and not any(row.metric == "agreement" for row in rows):
            rows += _same_rows(found.engines[OURS], target.path, bench)
        found.close()
    if not rows:
        raise ConfigError(
            "no budget holds a draft and two layers; give a larger --budget, or --enlarge the model"
        )
    return rows


class _Systems:
    """The systems on one storage in one budget, and what they answer.

    Attributes:
      engines: by system.
    """

    def __init__(self, setting: rivals.Setting, device: Device, prompts: Prompts, bench: Run[Plan]) -> None:
        plan = bench.plan
        self._setting, self._device, self._plan, self._progress = setting, device, plan, bench.progress
        self._asked = {
            "baselines": "systems" in plan.parts,
            "ablations": "ablations" in plan.parts,
            "presets": plan.presets,
        }
        self._tried, self._timed = prompts
        self._config = GenerationConfig(max_tokens=plan.tokens)
        self.engines: dict[str, Engine] = {}
        try:
            for name, opened in rivals.systems(**self._asked).items():
                self.engines[name] = opened(setting)
        except BudgetExceeded:
            self.close()
            raise

    def rows(self, case: str, *, twice: bool) -> list[Row]:
        """Times per token of every system, what drafts came to, and answers that nobody can guess.

        Args:
          twice: whether STI's weights had been quantized before.
        """
        rows = []
        if {*self._plan.parts} & {"systems", "ablations"}:
            how = self._tune()
            if rivals.STI in how and twice:
                how[rivals.STI] += "; weights quantized twice"
            label = f"Measuring on {self._device.name}"
            answers = replies.ask(self.engines, self._timed, self._config, label, self._progress)
            notes = replies.notes_of(self.engines, self._device, how)
            rows += replies.time_rows(case, answers, notes)
            if "systems" in self._plan.parts:
                rows += replies.quality_rows(case, answers)
            rows += replies.draft_rows(self.engines, self._device, case)
        if "unguessable" in self._plan.parts:
            rows += self._unguessable_rows(case)
        return rows

    def close(self) -> None:
        """Closes all engines."""
        for each in self.engines.values():
            each.close()

    def _tune(self) -> dict[str, str]:
        """Opens the systems that are tuned, and says by what, by system.

        The others answer the prompts that these are tuned on, too: all have learned as much when time counts.
        """
        how, tried = {}, self._tried
        replies.ask(self.engines, tried, self._config, "Warming up", self._progress)
        target = self.engines.get(rivals.STDPL, self.engines[OURS])
        for name, candidates in rivals.tuned_systems(**self._asked).items():
            missing = {rivals.BLD: self._setting.draft is None, rivals.STI: not self._setting.narrow}
            if missing.get(name, False) or (name in missing and not self._plan.judged):
                continue
            self.engines[name], how[name] = replies.tuned(
                name, candidates, self._setting, target, tried, self._config, self._progress
            )
        for each in self.engines.values():
            if each.speculation is not None:
                each.speculation.counts = SpeculationCounts()
        return how

    def _unguessable_rows(self, case: str) -> list[Row]:
        """Answers that no draft can guess: drawn at a temperature at which any token may come."""
        config = dataclasses.replace(
            self._config, sampling=Sampling(temperature=5.0, seed=1), ignore_eos=True
        )
        chosen = {
            OURS: self.engines[OURS],
            rivals.STDPL: self.engines.get(rivals.STDPL) or rivals.plain(self._setting),
        }
        answers = replies.ask(chosen, self._timed, config, "Measuring unguessable answers", self._progress)
        if rivals.STDPL not in self.engines:
            chosen[rivals.STDPL].close()
        times = {name: replies.token_ms(replies.spent(found)) for name, found in answers.items()}
        case = f"{case}: unguessable"
        return compared(case, "tpot_ms", times)


def _same_rows(engine: Engine, model: Path, bench: Run[Plan]) -> list[Row]:
    """The share of our answers that equal, token for token, those of the target in memory without a draft."""
    plan = bench.plan
    whole = Engine.open(model, options=EngineOptions(context_tokens=plan.context_tokens))
    prompts = _read_prompts(plan, whole.tokenizer, plan.compared_answers, plan.seed + 1)
    count = -(-plan.compared_answers // len(prompts))
    asked, same = [each for all_ in prompts.values() for each in all_[:count]][: plan.compared_answers], 0
    for place, prompt in enumerate(asked):
        # Every other answer is drawn, not greedy.
        sampling = Sampling() if place % 2 else Sampling(temperature=0.8, top_p=0.95, seed=place)
        config = GenerationConfig(max_tokens=plan.tokens, sampling=sampling)
        same += engine.generate(prompt, config).tokens == whole.generate(prompt, config).tokens
        bench.progress("Comparing answers", place + 1, len(asked))
    note = f"{same} of {len(asked)} answers, half of them greedy and half drawn"
    return [row("same answers", "agreement", same / len(asked), note)]
