"""Measures load, build and run times, prefill and decode rates, memory and perplexity of our engine beside
other engines that run the same weights at the same width.

Every system runs in a process of its own on the same cores and answers the same prompts in alternation
(`peers/process.py`). Ours decodes as the service does, a block of tokens per dispatch, and with one dispatch
per token (`jaxllm-one-token-per-dispatch`), the loop of engines without on-device sampling. A child is opened
once, though it may be compared at several widths (transformers has the same two for all) or run under two
names (ours, with and without blocks of tokens).

All systems predict the same tokens of a text, so their losses are compared token by token: the interval of
what a format costs is of the mean difference to float weights, from runs of `RUN_TOKENS` tokens that are
resampled.
"""

import contextlib
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.engine import Plan
from benchmarks.harness.bench import Run
from benchmarks.harness.report import OURS, Row, compared, interval, row
from benchmarks.models import Checkpoint
from benchmarks.peers import PEERS, process
from benchmarks.peers.ours import BLOCKS, ONE_TOKEN
from benchmarks.peers.peer import unavailable
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.serving.ground.options import DEFAULT_CONTEXT_TOKENS
from jaxllm.serving.host.bandwidth import memory_probe

MEMORY, PER_TOKEN = "memory", "jaxllm-one-token-per-dispatch"
# Neighbouring tokens, whose losses may depend on each other, are resampled together.
RUN_TOKENS = 64
# Systems that one of our widths is compared with, ours among them, by name.
Group = Mapping[str, process.System]


def run(bench: Run[Plan]) -> list[Row]:
    """Measures one model."""
    if bench.plan.text is not None and bench.shape is not None:
        raise ConfigError("--text needs a trained model: random weights have no meaningful perplexity")
    threads = process.threads_of(bench.plan.threads)
    checkpoint = Checkpoint.find(bench.path(), bench.progress)
    widths = checkpoint.widths(bench.plan.weights)
    peers = _peers(checkpoint.cfg, bench)
    # As the engine chooses: all systems need contexts of the same length.
    window = min(checkpoint.cfg.window_tokens, DEFAULT_CONTEXT_TOKENS)
    plan = bench.plan.within(bench.plan.context_tokens or window)
    text = None
    if plan.text is not None:
        text = process.Text.read(
            plan.text, checkpoint, separator=plan.separator, window_tokens=plan.context_tokens,
            limit=plan.text_windows,
        )  # fmt: skip
    rows: list[Row] = []
    speeds: list[float] = []
    timed = "speed" in plan.parts

    def memory_speed() -> float:
        speeds.append(bytes_per_s())
        return speeds[-1]

    with memory_probe(threads) as bytes_per_s, contextlib.ExitStack() as stack:

        @functools.cache
        def opened(peer: str, model: Path, format_: str) -> process.Child:
            own = {"context_tokens": plan.context_tokens} if peer == OURS else {}
            opening = process.opening_of(plan, peer, model, format_, **own)
            return stack.enter_context(process.Child(f"{peer} {format_}", opening, bench.progress))

        def ours(width: str) -> process.Child:
            """Our engine at a width; at f32 it is the reference of quality, too."""
            own = checkpoint.stored in (None, width)
            return opened(OURS, checkpoint.model if own else checkpoint.folder(bench.progress), width)

        groups: dict[str, dict[str, process.System]] = {}
        for width in widths:
            rows += opening_rows(f"{checkpoint.name} {width}", ours(width)) if timed else []
            groups[width] = {
                system: process.System(f"{system} {width}", ours(width), (setting,))
                for system, setting in ((OURS, BLOCKS), (PER_TOKEN, ONE_TOKEN))
                if timed or system == OURS
            }
        if peers and any(ours(width).facts["backend"] != "cpu" for width in widths):
            bench.tell("no peers: they are measured on CPUs alone, and ours runs on an accelerator")
            peers = []
        for width, group in groups.items():
            for peer in peers:
                for system, format_ in PEERS[peer].systems(width).items():
                    child = opened(peer, checkpoint.folder(bench.progress), format_)
                    group[system] = process.System(f"{system} {format_}", child, tuple(child.settings))
        systems = {each.name: each for group in groups.values() for each in group.values()}
        results: process.Results = {}
        if timed:
            results = process.alternate(
                list(systems.values()), checkpoint.cfg.vocab_size, plan=plan, progress=bench.progress,
                bytes_per_s=memory_speed,
            )  # fmt: skip
        for width, group in groups.items():
            name = f"{checkpoint.name} {width}"
            rows += size_rows(name, group, again=checkpoint.quantized)
            for tokens in plan.prompt_tokens if timed else ():
                rows += speed_rows(name, group, results, tokens, plan.decode_tokens)
            rows += memory_rows(name, group) if timed else []
        if text is not None and "quality" in plan.parts:
            # A system beside several widths is scored once.
            losses = functools.cache(lambda child: process.losses(child, text, bench.progress))
            for width, group in groups.items():
                children = {s: each.child for s, each in group.items() if s != PER_TOKEN}
                children[process.REFERENCE] = ours("f32")
                case = f"{checkpoint.name} {width}, {text.name}, {text.tokens} tokens"
                rows += quality_rows(case, {system: losses(child) for system, child in children.items()})
    if not timed:
        return rows
    note = f"{threads} threads, between {min(speeds) / 1e9:.1f} and {max(speeds) / 1e9:.1f} GB/s meanwhile"
    return [*rows, row(MEMORY, "read_bandwidth", median(speeds), note, system=MEMORY)]


def _peers(cfg: ModelConfig, bench: Run[Plan]) -> list[str]:
    """The peers to measure; one that was named has to be there."""
    chosen, wanted = [], () if "none" in bench.plan.peers else bench.plan.peers
    for name, peer in PEERS.items():
        if name not in wanted and "all" not in wanted:
            continue
        reason = unavailable(peer, cfg)
        if reason is None and peer.slow and not bench.plan.slow_peers and name not in wanted:
            reason = f"it takes minutes; --peer {name} measures it even so"
        if reason is None:
            chosen.append(name)
        elif name in wanted:
            raise ConfigError(f"peer {name}: {reason}")
        else:
            bench.tell(f"without {name}: {reason}")
    return chosen


def opening_rows(name: str, child: process.Child) -> list[Row]:
    """Times and memory of opening our engine."""
    facts = child.facts
    note = f"{facts['buckets_read']} buckets read from disk" if facts["buckets_read"] else None
    memory = child.open_peak_bytes + facts["device_bytes"]
    return [
        row(name, "load_ms", facts["load_ms"]),
        row(name, "build_ms", facts["build_ms"], note),
        row(name, "buckets", facts["buckets"]),
        row(f"{name}, load and build", "peak_memory_bytes", memory),
    ]


def size_rows(name: str, group: Group, *, again: bool) -> list[Row]:
    """Sizes of the weights; `again` says that peers were made from weights that were quantized before."""
    facts = {system: each.child.facts for system, each in group.items() if system != PER_TOKEN}
    twice = ", quantized twice" if again else ""
    notes = {system: fact["format"] + twice for system, fact in facts.items() if "format" in fact}
    bits = {system: fact["bits_per_weight"] for system, fact in facts.items()}
    weights = row(name, "weight_bytes", facts[OURS]["weight_bytes"])
    return [weights, *compared(name, "bits_per_weight", bits, notes)]


def speed_rows(name: str, group: Group, results: process.Results, prompt: int, tokens: int) -> list[Row]:
    """Prefill and decode at one prompt length, and the share of memory's bandwidth that decoding reaches."""
    found = {system: results[each.name, prompt] for system, each in group.items()}
    ours, rows, case = found[OURS], [], ""
    for phase in process.PHASES:
        case = f"{name}, {process.phase_case(phase, prompt, tokens)}"
        systems = [each for each in found if phase == "decode" or each != PER_TOKEN]
        notes: dict[str, str | None] = {}
        for system, each in found.items():
            # How it ran, and whether others ran beside it.
            disturbed = f"{each.disturbed} of {each.samples} rounds disturbed" if each.disturbed else None
            notes[system] = ", ".join(filter(None, (each.settings.get(phase), disturbed))) or None
        if phase == "prefill":
            rows.append(row(case, "ttft_ms", ours.ms[phase], notes[OURS]))
        count = prompt if phase == "prefill" else tokens
        rates = {system: found[system].rate(phase, count) for system in systems}
        rows += compared(case, f"{phase}_tokens_per_s", rates, notes)
        if ours.kernel_ms[phase]:
            rows.append(row(case, "kernel_share", ours.kernel_ms[phase] / ours.ms[phase]))
    for system, each in found.items():
        if system != PER_TOKEN:
            share = group[system].child.facts["step_bytes"] * tokens / each.readable_bytes
            rows.append(row(case, "bandwidth_share", share, system=system))
    return rows


def quality_rows(case: str, losses: Mapping[str, np.ndarray]) -> list[Row]:
    """Perplexities of the same text, and what each system loses against float weights.

    Args:
      losses: by system, of each token in nats, those of `process.REFERENCE` among them.
    """
    notes: dict[str, str | None] = {}
    for system, each in losses.items():
        more = each - losses[process.REFERENCE]
        low, high = interval(more, np.arange(len(more)) // RUN_TOKENS)
        mean, low, high = (f"{math.expm1(part):+.2%}" for part in (more.mean(), low, high))
        notes[system] = f"{mean} against float, paired 95 % in [{low}, {high}]"
    notes[process.REFERENCE] = None
    values = {system: math.exp(each.mean()) for system, each in losses.items()}
    return compared(case, "perplexity", values, notes)


def memory_rows(name: str, group: Group) -> list[Row]:
    """Peak memory of each process while it answered, its libraries and mapped files included."""
    values = {
        system: each.child.peak_bytes + each.child.facts.get("device_bytes", 0)
        for system, each in group.items()
        if system != PER_TOKEN
    }
    return compared(f"{name}, run", "peak_memory_bytes", values)
