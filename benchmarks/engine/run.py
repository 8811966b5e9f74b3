"""Measures load, build and run times, prefill and decode rates, memory and perplexity of our engine beside
other engines that run the same weights at the same width.

Every system runs in a process of its own on the same cores (`peers/process.py`) and answers the same prompts
in alternation (`peers/alternation.py`). Ours decodes as the service does, a block of tokens per dispatch,
and with one dispatch per token (`jaxllm-one-token-per-dispatch`), the loop of engines without on-device
sampling.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.engine.rows import memory_rows, opening_rows, quality_rows, row, size_rows, speed_rows
from benchmarks.engine.systems import PER_TOKEN, Conditions, OpenSystems
from benchmarks.measuring.bandwidth import MemoryProbe
from benchmarks.measuring.report import Row, median
from benchmarks.models.checkpoint import Checkpoint
from benchmarks.models.shapes import shape_folder
from benchmarks.peers import PEERS
from benchmarks.peers.alternation import alternate, prompt_ids
from benchmarks.peers.peer import unavailable
from benchmarks.peers.perplexity import REFERENCE, Text, perplexity
from benchmarks.peers.process import Child, threads_of
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from serving.host.progress import Progress
from serving.options import DEFAULT_CONTEXT_TOKENS, EngineOptions

MEMORY = "memory"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of one measurement.

    Attributes:
      prompt_tokens: lengths of prompts.
      decode_tokens: decoded after each of them.
      rounds: of which medians are taken.
      text_windows: most windows of text to score; 0 means all.
      patience_s: for repeating what other processes disturbed, in all.
      slow_peers: whether "all" peers holds those too that take minutes.
    """

    prompt_tokens: tuple[int, ...] = (64, 256, 1024)
    decode_tokens: int = 128
    rounds: int = 5
    text_windows: int = 0
    patience_s: float = 120.0
    slow_peers: bool = True

    @classmethod
    def quick(cls) -> "Plan":
        """Fits in a minute on two cores for a model of some hundred million parameters."""
        return cls(
            prompt_tokens=(64, 256),
            decode_tokens=32,
            rounds=3,
            text_windows=8,
            patience_s=5.0,
            slow_peers=False,
        )

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
      threads: that every system may compute with; 0 takes all cores of this process.
      text: a UTF-8 file to measure perplexity on.
      separator: splits it into documents.
    """

    model: Path | None = None
    shape: str | None = None
    weights: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    threads: int = 0
    text: Path | None = None
    separator: str | None = None


def run(
    subject: Subject,
    *,
    options: EngineOptions,
    plan: Plan,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
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
    progress, tell = progress or (lambda *_: None), tell or (lambda _: None)
    threads = threads_of(subject.threads)
    model = subject.model if subject.shape is None else shape_folder(subject.shape, progress)
    checkpoint = Checkpoint.find(model)
    widths = checkpoint.widths(subject.weights)
    peers = _peers(subject.peers, checkpoint.cfg, plan, tell)
    # As the engine chooses: all systems need contexts of the same length.
    context = options.context_tokens or min(checkpoint.cfg.window_tokens, DEFAULT_CONTEXT_TOKENS)
    plan = plan.within(context)
    text = _text(subject, checkpoint, context, plan.text_windows)
    given = Conditions(
        checkpoint=checkpoint,
        options=dataclasses.replace(options, context_tokens=context),
        threads=threads,
        context_tokens=context,
    )
    rows: list[Row] = []
    speeds: list[float] = []

    def memory_speed() -> float:
        speeds.append(probe.bytes_per_s())
        return speeds[-1]

    with MemoryProbe(threads) as probe, OpenSystems(given, progress) as systems:
        backends = set()
        for width in widths:
            child = systems.open_ours(width)
            backends.add(child.facts["backend"])
            rows += opening_rows(f"{checkpoint.name} {width}", child)
        if peers and backends != {"cpu"}:
            tell("no peers: they are measured on CPUs alone, and ours runs on an accelerator")
            peers = []
        for peer in peers:
            systems.open_peer(peer)
        prompts = [prompt_ids(checkpoint.cfg.vocab_size, tokens) for tokens in plan.prompt_tokens]
        results = alternate(
            systems.systems,
            prompts,
            decode_tokens=plan.decode_tokens,
            rounds=plan.rounds,
            patience_s=plan.patience_s,
            progress=progress,
            bytes_per_s=memory_speed,
        )
        for width in widths:
            name, group = f"{checkpoint.name} {width}", systems.beside(width)
            rows += size_rows(name, group, again=checkpoint.quantized)
            for tokens in plan.prompt_tokens:
                rows += speed_rows(name, group, results, tokens, plan.decode_tokens)
            rows += memory_rows(name, group)
        if text is not None:
            # A system beside several widths is scored once.
            values: dict[Child, float] = {}
            for width in widths:
                children = {s: c.child for s, c in systems.beside(width).items() if s != PER_TOKEN}
                children[REFERENCE] = systems.float_child()
                for child in children.values():
                    if child not in values:
                        values[child] = perplexity(child, text, progress)
                rows += quality_rows(f"{checkpoint.name} {width}", children, values, text)
    note = f"{threads} threads, between {min(speeds) / 1e9:.1f} and {max(speeds) / 1e9:.1f} GB/s meanwhile"
    return [*rows, row(MEMORY, "read_bandwidth", median(speeds), "bytes/s", system=MEMORY, note=note)]


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
