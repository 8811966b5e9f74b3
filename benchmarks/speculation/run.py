"""Times every system's answers, and compares ours with the target's own.

The memory of a process that runs a model larger than its budget is measured by itself, and how fast it reads.
Each budget has a process of its own, which runs twice: from its second start on, a service reads its buckets
from disk. The growth of the process's resident memory above that of Python and JAX, before the model was
opened, is compared with the budget.

With all weights in memory, ours is drafted by its high planes or a small model and without, llama.cpp's with
a draft of 4 bits or the same small model and without. All systems run the same float weights at 8 bits, each
in a process of its own, and answer the same prompts in turns. A system with settings to choose from answers
the tried prompts in each, and keeps its fastest.

The gain of drafts depends on how much smaller they are than their target, and on how well they predict it.
The papers' targets have ten times and more the weights of their drafts, the packaged ones have not; random
weights of any size cannot be predicted. So a trained target is enlarged: neurons and whole layers are added
in pairs that read the same and write the opposite, and so cancel. They cost storage, memory and processors as
much as any weights, and answers stay those of the trained model (up to rounding). Rows name enlarged models.
"""

import concurrent.futures
import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.bench import Run, TimedPlan, silent
from benchmarks.harness.children import in_turns, taken_by
from benchmarks.harness.machine import Device, named_devices
from benchmarks.harness.report import OURS, Row, compared, row
from benchmarks.models import Checkpoint, float_params, made_once
from benchmarks.peers import DRAFTED, PEERS, Opening
from benchmarks.peers.peer import unavailable
from benchmarks.peers.process import Child, opened, opening_of
from benchmarks.speculation import Plan
from benchmarks.speculation import answers as replies
from benchmarks.speculation import systems as rivals
from jaxllm.bundle import Bundle, write_bundle
from jaxllm.config import ModelConfig
from jaxllm.errors import BudgetExceeded, ConfigError
from jaxllm.models.features import require_decoder_alone
from jaxllm.models.parameters import param_specs
from jaxllm.sampling import Sampling
from jaxllm.serving.engine.request import GenerationConfig
from jaxllm.serving.ground.bundles import find_model, open_model, open_tokenizer
from jaxllm.serving.ground.options import EngineOptions
from jaxllm.serving.host.direct_io import PieceReader, aligned
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.opening.engine import Engine
from jaxllm.serving.speculation.speculation import SpeculationCounts
from jaxllm.tasks.rouge import require_rouge
from jaxllm.text.tokenizer import Tokenizer

# Token ids of prompts, by task: what systems are tuned on, and shards judged, and what is counted.
Prompts = tuple[dict[str, list[list[int]]], dict[str, list[list[int]]]]


def _read_prompts(plan: Plan, tokenizer: Tokenizer, count: int, seed: int) -> dict[str, list[list[int]]]:
    most = plan.context_tokens - plan.tokens
    return replies.read_prompts(
        plan.data, tokenizer, count=count, most_tokens=most, seed=seed, file=plan.file
    )


def run(bench: Run[Plan]) -> list[Row]:
    """Measures a trained target; reports every budget that is too small, whose rows are left out. Of random
    weights, measures the memory and the reads of a process alone."""
    if bench.shape is not None:
        with open_model(bench.path(), weights="int8", progress=bench.progress) as bundle:
            budgets = [int(share * bundle.weight_bytes) for share in bench.plan.shares]
            return memory_rows(bundle.path, budgets, bench.progress)
    try:
        require_rouge()
    except ConfigError:
        bench = bench.changed(judged=False)
        if "systems" in bench.plan.parts:
            bench.tell("without BLD and STI, whose answers are judged by Rouge: pip install 'jaxllm[bench]'")
    draft = None if bench.plan.draft == "nested" else find_model(bench.plan.draft)
    rows: list[Row] = []
    # A folder or a GGUF file is prepared as the draft requires it.
    weights = "int8-nested" if draft is None else None
    model, target = bench.path(), open_model(bench.path(), weights=weights, progress=bench.progress)
    if bench.plan.enlarge:
        model = enlarged_bundle(target.path, bench.plan.enlarge, bench.progress)
        target = open_model(model)
    # Small models have small windows.
    bench = bench.changed(context_tokens=min(bench.plan.context_tokens, target.cfg.window_tokens))
    plan, tokenizer = bench.plan, open_tokenizer(target.tokenizer_files())
    # None is both tried and timed.
    found = _read_prompts(plan, tokenizer, plan.prompts + plan.tried, plan.seed)
    tried = {task: each[: plan.tried] for task, each in found.items()}
    timed = {task: each[plan.tried :] for task, each in found.items() if each[plan.tried :]}
    if not timed:
        raise ConfigError(f"all prompts are taken by the {plan.tried} of each task that systems are tuned on")
    if "in-memory" in bench.plan.parts and target.cfg.encoder is not None:
        bench.tell("without in-memory: it is of decoders alone")
    elif "in-memory" in bench.plan.parts:
        rows += in_memory_rows(model, draft, timed, tried, bench)
    if {*bench.plan.parts} - {"in-memory"}:
        rows += _budget_rows(target, draft, (tried, timed), bench)
    return rows


def _budget_rows(target: Bundle, draft: Path | None, prompts: Prompts, bench: Run[Plan]) -> list[Row]:
    """Rows of every storage and budget."""
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
    asked = {
        "baselines": "systems" in plan.parts,
        "drafters": "drafters" in plan.parts,
        "ablations": "ablations" in plan.parts,
        "presets": plan.presets,
        "pipelined": draft is not None,
    }
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
        engines: dict[str, Engine] = {}
        try:
            for name, opened in rivals.systems(**asked).items():
                try:
                    engines[name] = opened(setting)
                except BudgetExceeded as error:
                    if name == OURS:
                        raise
                    bench.tell(f"{case}, without {name}: {error}")
            rows += _answer_rows(engines, asked, setting, device, case, prompts, bench)
            # What answers say depends neither on storage nor on memory.
            if "same-answers" in plan.parts and not any(row.metric == "agreement" for row in rows):
                rows += _same_rows(engines[OURS], target.path, bench)
        except BudgetExceeded as error:
            bench.tell(f"without {case}: {error}")
        finally:
            for each in engines.values():
                each.close()
    if not rows:
        raise ConfigError(
            "no budget holds two layers and the small model that drafts; give a larger one, or --enlarge "
            "the model"
        )
    return rows


def _answer_rows(
    engines: dict[str, Engine],
    asked: Mapping[str, Any],
    setting: rivals.Setting,
    device: Device,
    case: str,
    prompts: Prompts,
    bench: Run[Plan],
) -> list[Row]:
    """Times per token of every system, what drafts came to, and answers that nobody can guess.

    Args:
      engines: of the systems that are not tuned; those that are join them.
      asked: which systems there are.
    """
    plan, rows, (tried, timed) = bench.plan, list[Row](), prompts
    config = GenerationConfig(max_tokens=plan.tokens)
    if asked["baselines"] or asked["drafters"] or asked["ablations"]:
        how = {}
        # All have learned as much when time counts: the others answer what systems are tuned on, too.
        replies.ask(engines, tried, config, "Warming up", bench.progress)
        truth = engines.get(rivals.STDPL, engines[OURS])
        for name, candidates in rivals.tuned_systems(**asked).items():
            missing = {rivals.BLD: setting.draft is None, rivals.STI: not setting.narrow}
            if missing.get(name, False) or (name in missing and not plan.judged):
                continue
            try:
                engines[name], how[name] = replies.tuned(
                    name, candidates, setting, truth, tried, config, bench.progress
                )
            except BudgetExceeded as error:
                bench.tell(f"{case}, without {name}: {error}")
        for each in engines.values():
            if each.speculation is not None:
                each.speculation.counts = SpeculationCounts()
        if rivals.STI in how and Checkpoint.find(setting.model).quantized:
            how[rivals.STI] += "; weights quantized twice"
        answers = replies.ask(engines, timed, config, f"Measuring on {device.name}", bench.progress)
        rows += replies.time_rows(case, answers, replies.notes_of(engines, device, how))
        rows += replies.quality_rows(case, answers) if asked["baselines"] else []
        rows += replies.draft_rows(engines, device, case)
    if "unguessable" in plan.parts:
        # Sampled at a temperature at which any token may come.
        config = dataclasses.replace(config, sampling=Sampling(temperature=5.0, seed=1), ignore_eos=True)
        alone = engines.get(rivals.STDPL) or rivals.plain(setting)
        chosen = {OURS: engines[OURS], rivals.STDPL: alone}
        answers = replies.ask(chosen, timed, config, "Measuring unguessable answers", bench.progress)
        if rivals.STDPL not in engines:
            alone.close()
        times = {name: replies.token_ms(replies.spent(found)) for name, found in answers.items()}
        rows += compared(f"{case}: unguessable", "tpot_ms", times)
    return rows


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


_TOKENS = 9
# The disk is read for comparison in blocks of so many bytes.
_BLOCK_BYTES = 4 << 20


def memory_rows(
    model: Path,
    budgets: Sequence[int],
    progress: Progress = silent,
    *,
    context_tokens: int = 512,
) -> list[Row]:
    """Memory, bytes read and time per token under several budgets.

    Args:
      model: a bundle larger than each budget.
      budgets: in bytes.
      context_tokens: of the context and of the longest source, at most those of the model's window.
    """
    rows = []
    for number, budget in enumerate(budgets):
        disk = disk_bytes_per_s(model)
        taken_by(_answered, model, budget, context_tokens)
        taken = taken_by(_answered, model, budget, context_tokens)
        # Measured before and after: disks of shared machines change from minute to minute.
        disk = (disk + disk_bytes_per_s(model)) / 2
        found, ratio = taken.found, budget / taken.peak_bytes
        context, speed = found["context_tokens"], found["read_bytes"] / found["took_s"]
        case = f"{model.stem}, budget {budget / 1e6:,.0f} MB, context of {context:.0f} tokens"
        kept = (
            f"{found['resident']:.0f} pieces are resident"
            if "resident" in found
            else f"{found['hit_rate']:.0%} of visits to experts found them resident"
        )
        read = f"{kept}; reads {found['read_bytes'] / 1e6:,.0f} MB for {_TOKENS} passes"
        note = f"above {taken.idle_bytes / 1e6:,.0f} MB of Python and JAX; {read}"
        share = f"{speed / 1e9:.2f} of {disk / 1e9:.2f} GB/s of reads alone"
        rows += [
            row(case, "peak_memory_bytes", taken.peak_bytes, note, baseline="budget", ratio=ratio),
            row(case, "tpot_ms", found["tpot_ms"]),
            row(case, "bandwidth_share", speed / disk, share),
        ]
        progress("Measuring", number + 1, len(budgets))
    return rows


def disk_bytes_per_s(path: Path) -> float:
    """Bandwidth of a file read in blocks past the page cache, at the best of a few queue depths."""
    depths, found = (1, 2, 4, 8), []
    memory = [aligned(_BLOCK_BYTES) for _ in range(depths[-1])]
    with PieceReader(path) as reader, concurrent.futures.ThreadPoolExecutor(depths[-1]) as pool:

        def read(lane: int, depth: int) -> None:
            for offset in range(lane * _BLOCK_BYTES, reader.size_bytes, depth * _BLOCK_BYTES):
                size = min(_BLOCK_BYTES, reader.size_bytes - offset)
                reader.read_into(memory[lane], 0, offset, size)

        for depth in depths:
            began = time.perf_counter()
            list(pool.map(read, range(depth), itertools.repeat(depth)))
            found.append(reader.size_bytes / (time.perf_counter() - began))
    return max(found)


def _answered(model: Path, budget: int, context_tokens: int) -> dict[str, float]:
    """Answers twice, with the model's buckets compiled or read: facts of the second answer."""
    with open_model(model) as bundle:
        context = min(context_tokens, bundle.cfg.window_tokens)
    engine = Engine.open(model, options=EngineOptions(context_tokens=context, memory_bytes=budget))
    if engine.model.streamed is None:
        raise ConfigError(f"all of the model fits into {budget:,} bytes")
    config = GenerationConfig(max_tokens=_TOKENS, ignore_eos=True)
    # Of encoder-decoders the longest source, which takes the most memory.
    prompt = list(range(engine.options.source_tokens(engine.cfg) or 64))
    counts = engine.model.streamed.counts
    engine.generate(prompt, config)
    read, began = counts.read_bytes, time.perf_counter()
    generation = engine.generate(prompt, config)
    facts = engine.model.streamed.facts()
    # Of layers, or of experts alone.
    how = {"hit_rate": facts["hit_rate"]} if "hit_rate" in facts else {"resident": facts["resident_layers"]}
    return {
        **how,
        "context_tokens": context,
        "tpot_ms": generation.timings.tpot_ms(len(generation.tokens)),
        "read_bytes": counts.read_bytes - read,
        "took_s": time.perf_counter() - began,
    }


NESTED, LLAMA_DRAFTED = (each.name for each in DRAFTED)
PLAIN, LLAMA = OURS, PEERS["llama.cpp"].name
_WIDTH = "int8-nested"


@dataclasses.dataclass
class Turns:
    """A system, and what its answers took.

    Attributes:
      setting: the one it answers in.
      spent: milliseconds and tokens of each answer after its first token, by task.
      passes: of its weights; 0 where it does not count them.
      answers: token ids of all answers.
    """

    child: Child
    setting: str
    spent: dict[str, tuple[list[float], list[int]]] = dataclasses.field(default_factory=dict)
    passes: int = 0
    answers: list[list[int]] = dataclasses.field(default_factory=list)

    def answer(self, task: str, prompt: Sequence[int], tokens: int) -> None:
        """Answers a prompt with a first token and so many more."""
        self.child.wait_until_asleep()
        found = self.child.answer([int(token) for token in prompt], tokens, self.setting)
        times, counts = self.spent.setdefault(task, ([], []))
        times.append(found["decode_ms"])
        counts.append(tokens)
        self.passes += found["passes"]
        self.answers.append(found["ids"])

    @property
    def times(self) -> replies.Spent:
        """Of each task."""
        return list(self.spent.values())

    def note(self, others: Sequence[list[int]]) -> str:
        """The setting, tokens of a pass, and how many answers are those of another system."""
        same = sum(a == b for a, b in zip(self.answers, others, strict=True))
        parts = [self.setting, f"{same} of {len(others)} answers are those of {PLAIN}"]
        if self.passes:
            tokens = sum(sum(counts) for _, counts in self.spent.values())
            parts.append(f"{tokens / self.passes:.1f} tokens a pass")
        return "; ".join(parts)


def in_memory_rows(
    model: Path,
    draft: Path | None,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    tried: Mapping[str, Sequence[Sequence[int]]],
    bench: Run[Plan],
) -> list[Row]:
    """Times per token of every system that is installed.

    Args:
      model: a bundle or a folder; its weights in floats are what all systems quantize.
      draft: a small model that may draft; None for none.
      prompts: token ids by task, timed.
      tried: by task, that settings are chosen on; without any, the first timed ones.
    """
    # After the first one.
    checkpoint, tokens = Checkpoint.find(model), bench.plan.tokens - 1
    chosen = {task: each for task, each in tried.items() if each} or {
        task: each[:1] for task, each in prompts.items()
    }
    with opened(_openings(checkpoint, draft, bench), bench.progress) as children:
        systems = {name: Turns(child, _fastest(child, chosen, tokens)) for name, child in children.items()}
        asked = [(task, prompt) for task, each in prompts.items() for prompt in each]
        for number, (task, prompt), turns in in_turns(systems.values(), asked):
            turns.answer(task, prompt, tokens)
            bench.progress("Measuring in memory", number + 1, len(asked))
    plain = systems[PLAIN].answers
    notes = {name: turns.note(plain) for name, turns in systems.items()}
    times = {name: turns.times for name, turns in systems.items()}
    return replies.spent_rows(
        NESTED, times, f"{checkpoint.name}, all weights in memory: {replies.ALL}", notes
    )


def _openings(checkpoint: Checkpoint, draft: Path | None, bench: Run[Plan]) -> dict[str, Opening]:
    """What each system opens, with what else it requires; reports each system that is left out."""
    own: dict[str, dict[str, Any]] = {
        NESTED: {"answer_tokens": bench.plan.tokens},
        PLAIN: {"context_tokens": bench.plan.context_tokens},
    }
    if draft is not None:
        own[NESTED] |= {"draft": str(draft)}
        own[LLAMA_DRAFTED] = {"draft": str(Checkpoint.find(draft).folder(bench.progress))}
    formats: dict[str, str] = {NESTED: _WIDTH, PLAIN: _WIDTH}
    for peer in (PEERS[LLAMA], DRAFTED[1]):
        if reason := unavailable(peer, checkpoint.cfg):
            bench.tell(f"without {peer.name}: {reason}")
        else:
            (formats[peer.name],) = peer.systems("int8").values()
    folder = checkpoint.folder(bench.progress)
    plan = TimedPlan(context_tokens=bench.plan.context_tokens)
    return {name: opening_of(plan, name, folder, each, **own.get(name, {})) for name, each in formats.items()}


def _fastest(child: Child, tried: Mapping[str, Sequence[Sequence[int]]], tokens: int) -> str:
    """The setting in which a system answers the tried prompts in the least time, once it has warmed up."""
    times: dict[str, float] = {}
    for setting in child.settings:
        turns = Turns(child, setting)
        Turns(child, setting).answer("warm-up", next(iter(tried.values()))[0], tokens)
        for task, prompts in tried.items():
            for prompt in prompts:
                turns.answer(task, prompt, tokens)
        times[setting] = replies.token_ms(turns.times)
    return min(times, key=times.__getitem__)


_VERSION = 1


def enlarged_bundle(model: Path, times: int, progress: Progress = silent) -> Path:
    """The bundle of a model with `times` as many layers, each with `times` as many neurons, made unless it is
    there.

    Args:
      model: a bundle; the larger one has its width.
    """
    bundle = Bundle.open(model)
    require_decoder_alone(bundle.cfg, "enlarged models")

    def write(path: Path) -> None:
        cfg, enlarged = enlarge(bundle.cfg, float_params(bundle), times, progress)
        name = f"{bundle.layout.name}, {times} times as deep and wide"
        write_bundle(
            path, cfg=cfg, params=enlarged, weights=bundle.layout.weights,
            tokenizer=bundle.tokenizer_files(), name=name,
        )  # fmt: skip

    name = f"v{_VERSION}-{bundle.fingerprint[:16]}-{times}.jaxllm"
    return made_once("enlarged", name, write=write)


def enlarge(
    cfg: ModelConfig, params: Mapping[str, np.ndarray], times: int, progress: Progress = silent
) -> tuple[ModelConfig, Iterator[tuple[str, np.ndarray]]]:
    """The larger model's config, and its parameters as they are drawn (see `enlarged_bundle`)."""
    added = (times - 1) * cfg.ffn_size
    if times < 2 or cfg.experts or cfg.layer_units or added % 2:
        raise ConfigError(
            "a model is enlarged 2 times and more, without experts and by an even number of neurons; got "
            f"{times} times, {cfg.experts} experts, {added} neurons"
        )
    if cfg.heads // cfg.kv_heads % 2 and cfg.kv_heads % 2:
        raise ConfigError(
            f"{cfg.heads} heads of {cfg.kv_heads} kv heads do not come in pairs, so the model cannot be "
            "enlarged"
        )
    large = dataclasses.replace(
        cfg,
        layers=times * cfg.layers,
        ffn_size=times * cfg.ffn_size,
        attention_windows=tuple(window for window in cfg.attention_windows for _ in range(times)),
    )
    specs = param_specs(large)

    def enlarged() -> Iterator[tuple[str, np.ndarray]]:
        for number, (name, spec) in enumerate(specs.items()):
            # A generator for each: the draw of one does not depend on the others' sizes.
            draw = np.random.default_rng((_VERSION, number))
            if not name.startswith("layers."):
                value = params[name]
            else:
                _, layer, part = name.split(".", 2)
                value = origin = params[f"layers.{int(layer) // times}.{part}"]
                if int(layer) % times:
                    value = _cancelling(part, origin, spec.shape, cfg, draw)
                elif part.startswith("ffn.") and origin.shape != spec.shape:
                    rest = (spec.shape[0] - origin.shape[0], *spec.shape[1:])
                    value = np.concatenate([origin, _cancelling(part, origin, rest, cfg, draw)])
            yield name, value
            progress("Enlarging the model", number + 1, len(specs))

    return large, enlarged()


def _cancelling(
    part: str, origin: np.ndarray, shape: tuple[int, ...], cfg: ModelConfig, draw: np.random.Generator
) -> np.ndarray:
    """A parameter of units in pairs, of which one subtracts what the other adds."""
    if "norm" in part:
        return origin
    if "bias" in part or origin.ndim < 2:
        return np.zeros(shape, np.float32)
    writes = part in ("attn.o", "ffn.down")
    # They read with half the trained deviation, so that scales of activations stay the same.
    deviation = np.float32(origin.std()) * np.float32(1 if writes else 0.5)
    sign = np.float32(-1 if writes else 1)
    # Pairs are neighbours: neurons, the query heads of a kv-group, or else whole kv-groups.
    queries = cfg.heads // cfg.kv_heads
    by_heads = part in ("attn.q", "attn.o") and queries % 2 == 0
    lone = part in ("attn.k", "attn.v") and queries % 2 == 0
    if lone:
        return deviation * draw.standard_normal(shape, np.float32)
    split = (shape[0] * queries, -1, *shape[2:]) if by_heads else shape
    units = np.zeros(shape, np.float32).reshape(split)
    units[::2] = deviation * draw.standard_normal(units[::2].shape, np.float32)
    units[1::2] = sign * units[::2]
    return units.reshape(shape)
