"""Measures load, build and run times, prefill and decode rates, memory and perplexity of our engine beside
other engines that run the same weights at the same width.

Every system runs in a process of its own on the same cores (`peers/process.py`) and answers the same prompts
in alternation (`peers/process.py`). Ours decodes as the service does, a block of tokens per dispatch,
and with one dispatch per token (`jaxllm-one-token-per-dispatch`), the loop of engines without on-device
sampling.

Opens the systems of one run, each in a child process, and groups them by the width they are compared at.

A child is opened once, though it may be compared at several widths (transformers has the same two for all)
or run under two names (ours, with and without blocks of tokens).

Makes rows of what was measured of engines.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.machine import MemoryProbe
from benchmarks.harness.plan import silent, sized, unheard
from benchmarks.harness.report import OURS, Row, compared, median, row
from benchmarks.models import Checkpoint, shape_folder
from benchmarks.peers import PEERS, Opening
from benchmarks.peers.ours import BLOCKS, ONE_TOKEN
from benchmarks.peers.peer import unavailable
from benchmarks.peers.process import (
    REFERENCE,
    Child,
    Result,
    System,
    Text,
    TimedPlan,
    alternate,
    perplexity,
    prompt_ids,
    threads_of,
)
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.serving.ground.options import DEFAULT_CONTEXT_TOKENS, EngineOptions
from jaxllm.serving.host.progress import Progress

MEMORY = "memory"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(TimedPlan):
    """Sizes of one measurement; `slow_peers`: whether "all" peers holds those too that take minutes."""

    prompt_tokens: tuple[int, ...] = sized((64, 256, 1024), quick=(64, 256))
    decode_tokens: int = sized(128, quick=32)
    rounds: int = sized(5, quick=3)
    text_windows: int = sized(0, quick=8)
    patience_s: float = sized(120.0, quick=5.0)
    slow_peers: bool = sized(True, quick=False)

    def within(self, context_tokens: int) -> "Plan":
        """The plan for a context that may be too short for it.

        Raises:
          ConfigError: there is no room for one token of prompt and one of the answer.
        """
        if context_tokens < 2:
            raise ConfigError(
                "bench engine needs a context of at least 2 tokens, one to feed and one to decode, got "
                f"{context_tokens}; give a larger --context"
            )
        decode = min(self.decode_tokens, context_tokens // 2)
        prompts = {min(tokens, context_tokens - decode) for tokens in self.prompt_tokens}
        return dataclasses.replace(self, prompt_tokens=tuple(sorted(prompts)), decode_tokens=decode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, and the peers it is compared with.

    Attributes:
      model: a bundle, a Hugging Face folder, or None for the packaged model.
      shape: a name of `shapes.SHAPES` instead: random weights.
      weights: widths of ours; empty takes the model's own.
      peers: names in `peers.PEERS`, or "all" for those that are installed and can run the model.
      text: a UTF-8 file to measure perplexity on.
      separator: splits it into documents.
    """

    model: Path | None = None
    shape: str | None = None
    weights: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    text: Path | None = None
    separator: str | None = None


def run(
    subject: Subject,
    *,
    options: EngineOptions,
    plan: Plan,
    progress: Progress = silent,
    tell: Callable[[str], None] = unheard,
) -> list[Row]:
    """Measures one model.

    Args:
      subject: see there.
      options: of our engine.
      plan: how much is measured.
      progress: called with (stage, done, total).
      tell: called with messages for the user, such as peers that are left out.

    Raises:
      JaxllmError: the model, a peer or the plan does not fit; or a system fails.
    """
    threads = threads_of(plan.threads)
    model = subject.model if subject.shape is None else shape_folder(subject.shape, progress)
    checkpoint = Checkpoint.find(model)
    widths = checkpoint.widths(subject.weights)
    peers = _peers(subject.peers, checkpoint.cfg, plan, tell)
    # As the engine chooses: all systems need contexts of the same length.
    context = options.context_tokens or min(checkpoint.cfg.window_tokens, DEFAULT_CONTEXT_TOKENS)
    plan = plan.within(context)
    text = _text(subject, checkpoint, context, plan.text_windows)
    options = dataclasses.replace(options, context_tokens=context)
    rows: list[Row] = []
    speeds: list[float] = []

    def memory_speed() -> float:
        speeds.append(probe.bytes_per_s())
        return speeds[-1]

    with MemoryProbe(threads) as probe, OpenSystems(checkpoint, options, threads, progress) as systems:
        backends = set()
        for width in widths:
            child = systems.open_ours(width)
            backends.add(child.facts["backend"])
            rows += opening_rows(f"{checkpoint.name} {width}", child)
        if peers and backends != {"cpu"}:
            tell("no peers: they are measured on CPUs alone, and ours runs on an accelerator")
            peers = []
        for width in widths:
            systems.compare(width, peers)
        prompts = [prompt_ids(checkpoint.cfg.vocab_size, tokens) for tokens in plan.prompt_tokens]
        results = alternate(
            systems.systems,
            prompts,
            plan=plan,
            progress=progress,
            bytes_per_s=memory_speed,
        )
        for width in widths:
            name, group = f"{checkpoint.name} {width}", systems.beside[width]
            rows += size_rows(name, group, again=checkpoint.quantized)
            for tokens in plan.prompt_tokens:
                rows += speed_rows(name, group, results, tokens, plan.decode_tokens)
            rows += memory_rows(name, group)
        if text is not None:
            # A system beside several widths is scored once.
            values: dict[Child, float] = {}
            for width in widths:
                children = {s: c.child for s, c in systems.beside[width].items() if s != PER_TOKEN}
                children[REFERENCE] = systems.open_ours("f32")
                for child in children.values():
                    if child not in values:
                        values[child] = perplexity(child, text, progress)
                rows += quality_rows(f"{checkpoint.name} {width}", children, values, text)
    note = f"{threads} threads, between {min(speeds) / 1e9:.1f} and {max(speeds) / 1e9:.1f} GB/s meanwhile"
    return [*rows, row(MEMORY, "read_bandwidth", median(speeds), note, system=MEMORY)]


def _peers(wanted: Sequence[str], cfg: ModelConfig, plan: Plan, tell: Callable[[str], None]) -> list[str]:
    """The peers to measure; one that was named has to be there."""
    chosen = []
    for name, peer in PEERS.items():
        if name not in wanted and "all" not in wanted:
            continue
        reason = unavailable(peer, cfg)
        if reason is None and peer.slow and not plan.slow_peers and name not in wanted:
            reason = f"it takes minutes; --peer {name} measures it even so"
        if reason is None:
            chosen.append(name)
        elif name in wanted:
            raise ConfigError(f"peer {name}: {reason}")
        else:
            tell(f"without {name}: {reason}")
    return chosen


def _text(subject: Subject, checkpoint: Checkpoint, context_tokens: int, limit: int) -> Text | None:
    if subject.text is None:
        return None
    if subject.shape is not None:
        raise ConfigError("--text needs a trained model: random weights have no meaningful perplexity")
    return Text.read(
        subject.text, checkpoint, separator=subject.separator, window_tokens=context_tokens, limit=limit
    )


PER_TOKEN = "jaxllm-one-token-per-dispatch"


class OpenSystems:
    """Open systems, all of the same model, threads and contexts. A context manager: leaving it ends all of
    their processes.

    Attributes:
      beside: by width of ours, ours and the systems that it is compared with, by name.
    """

    def __init__(
        self, checkpoint: Checkpoint, options: EngineOptions, threads: int, progress: Progress
    ) -> None:
        self._checkpoint, self._options, self._threads = checkpoint, options, threads
        self._progress = progress
        self._stack = contextlib.ExitStack()
        self._children: dict[tuple[str, str], Child] = {}
        self.beside: dict[str, dict[str, System]] = {}

    def __enter__(self) -> "OpenSystems":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    @property
    def systems(self) -> list[System]:
        """All systems, once each."""
        return list({each.name: each for group in self.beside.values() for each in group.values()}.values())

    def open_ours(self, width: str) -> Child:
        """Opens our engine at a width; at f32 it is the reference of quality, too.

        Raises:
          PeerFailed: it cannot be opened.
        """
        checkpoint = self._checkpoint
        own = checkpoint.stored in (None, width)
        model = checkpoint.model if own else checkpoint.folder(self._progress)
        options = dataclasses.asdict(self._options)
        # A child has all weights in memory and no draft, and reads prompts as engines do by themselves.
        for name in ("storage", "trees", "experts", "prefill"):
            del options[name]
        return self._open(OURS, model, width, options)

    def compare(self, width: str, peers: Sequence[str]) -> None:
        """Puts ours at a width beside peers, which are opened unless they are.

        Raises:
          PeerFailed: one cannot be opened.
        """
        child = self.open_ours(width)
        group = self.beside[width] = {
            system: System(f"{system} {width}", child, (setting,))
            for system, setting in ((OURS, BLOCKS), (PER_TOKEN, ONE_TOKEN))
        }
        for name in peers:
            folder = self._checkpoint.folder(self._progress)
            for system, format_ in PEERS[name].systems(width).items():
                child = self._open(name, folder, format_, {})
                group[system] = System(f"{system} {format_}", child, tuple(child.settings))

    def _open(self, peer: str, model: Path, format_: str, options: dict[str, Any]) -> Child:
        if (peer, format_) not in self._children:
            opening = Opening(
                peer=peer,
                model=model,
                format=format_,
                threads=self._threads,
                context_tokens=self._options.context_tokens,
                options=options,
            )
            child = Child(f"{peer} {format_}", opening, self._progress)
            self._children[peer, format_] = self._stack.enter_context(child)
        return self._children[peer, format_]


def opening_rows(name: str, child: Child) -> list[Row]:
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


def size_rows(name: str, group: Mapping[str, System], *, again: bool) -> list[Row]:
    """Sizes of the weights; `again` says that peers were made from weights that were quantized before."""
    facts = {system: each.child.facts for system, each in group.items() if system != PER_TOKEN}
    notes = {
        system: fact["format"] + (", quantized twice" if again else "")
        for system, fact in facts.items()
        if "format" in fact
    }
    bits = {system: fact["bits_per_weight"] for system, fact in facts.items()}
    return [
        row(name, "weight_bytes", facts[OURS]["weight_bytes"]),
        *compared(name, "bits_per_weight", bits, notes),
    ]


def speed_rows(
    name: str,
    group: Mapping[str, System],
    results: Mapping[tuple[str, int], Result],
    prompt: int,
    tokens: int,
) -> list[Row]:
    """Prefill and decode at one prompt length, and the share of memory's bandwidth that decoding reaches."""
    found = {system: results[each.name, prompt] for system, each in group.items()}
    ours, rows = found[OURS], []
    rates = {system: each.rates(prompt, tokens) for system, each in found.items()}
    for phase, case in (
        ("prefill", f"{name}, prompt {prompt}"),
        ("decode", f"{name}, decode {tokens} after {prompt}"),
    ):
        spent_ms = getattr(ours, f"{phase}_ms")
        if phase == "prefill":
            rows.append(row(case, "ttft_ms", spent_ms, _note(ours, None)))
        metric = f"{phase}_tokens_per_s"
        systems = [each for each in found if phase == "decode" or each != PER_TOKEN]
        notes = {
            system: _note(found[system], getattr(found[system], f"{phase}_setting")) for system in systems
        }
        rows += compared(case, metric, {system: rates[system][metric] for system in systems}, notes)
        if kernel_ms := getattr(ours, f"{phase}_kernel_ms"):
            rows.append(row(case, "kernel_share", kernel_ms / spent_ms))
    for system, each in found.items():
        if system != PER_TOKEN:
            share = group[system].child.facts["step_bytes"] * tokens / each.readable_bytes
            rows.append(row(case, "bandwidth_share", share, system=system))
    return rows


def memory_rows(name: str, group: Mapping[str, System]) -> list[Row]:
    """Peak memory of each process while it answered, its libraries and mapped files included."""
    values = {
        system: each.child.peak_bytes + each.child.facts.get("device_bytes", 0)
        for system, each in group.items()
        if system != PER_TOKEN
    }
    return compared(f"{name}, run", "peak_memory_bytes", values)


def quality_rows(
    name: str, children: Mapping[str, Child], values: Mapping[Child, float], text: Text
) -> list[Row]:
    """Perplexity of every system on a text; `float` is ours in float32."""
    return compared(
        f"{name}, {text.name}, {text.tokens} tokens",
        "perplexity",
        {system: values[child] for system, child in children.items()},
        {system: child.facts.get("format") for system, child in children.items()},
    )


def _note(result: Result, setting: str | None) -> str | None:
    """How a system ran, and whether others ran beside it."""
    disturbed = f"{result.disturbed} of {result.samples} rounds disturbed" if result.disturbed else ""
    return ", ".join(filter(None, (setting, disturbed))) or None
