"""Times answers with all weights in memory: ours drafted by their high planes or a small model and without,
llama.cpp's with a draft of 4 bits or the same small model and without.

All systems run the same float weights at 8 bits, each in a process of its own, and answer the same prompts in
turns. A system with settings to choose from answers the tried prompts in each, and keeps its fastest.

The gain of drafts depends on how much smaller they are than their target, and on how well they predict it.
The papers' targets have ten times and more the weights of their drafts, the packaged ones have not; random
weights of any size cannot be predicted. So a trained target is enlarged: neurons and whole layers are added
in pairs that read the same and write the opposite, and so cancel. They cost storage, memory and processors as
much as any weights, and answers stay those of the trained model (up to rounding). Rows name enlarged models.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.bench import Run, TimedPlan, silent
from benchmarks.harness.children import in_turns
from benchmarks.harness.report import Row
from benchmarks.models import Checkpoint, float_params, made_once
from benchmarks.peers import DRAFTED, OURS, PEERS, Opening
from benchmarks.peers.peer import unavailable
from benchmarks.peers.process import Child, opened, opening_of
from benchmarks.speculation import Plan
from benchmarks.speculation.answers import ALL, Spent, spent_rows, token_ms
from jaxllm.bundle import Bundle, write_bundle
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.models.features import require_decoder_alone
from jaxllm.models.parameters import param_specs
from jaxllm.serving.host.progress import Progress

NESTED, LLAMA_DRAFTED = (each.name for each in DRAFTED)
PLAIN, LLAMA = OURS.name, PEERS["llama.cpp"].name
_WIDTH = "int8-nested"


@dataclasses.dataclass
class Turns:
    """A system, and what its answers took.

    Attributes:
      child: the system.
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
    def times(self) -> Spent:
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

    Raises:
      PeerFailed: a system cannot be opened.
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
    return spent_rows(NESTED, times, f"{checkpoint.name}, all weights in memory: {ALL}", notes)


def _openings(checkpoint: Checkpoint, draft: Path | None, bench: Run[Plan]) -> dict[str, Opening]:
    """What each system opens, with what it takes besides; tells of each system that is left out."""
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
        times[setting] = token_ms(turns.times)
    return min(times, key=times.__getitem__)


_VERSION = 1


def enlarged_bundle(model: Path, times: int, progress: Progress = silent) -> Path:
    """The bundle of a model with `times` as many layers, each with `times` as many neurons, made unless it is
    there.

    Args:
      model: a bundle; the larger one has its width.
      times: at least 2.

    Raises:
      ConfigError: the model has experts or is a sub-model, or its units do not come in pairs.
      CheckpointError: it cannot be read.
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
    """The larger model's config, and its parameters as they are drawn (see `enlarged_bundle`).

    Args:
      params: its float32 parameters.
      times: at least 2.
      progress: called with ("Enlarging the model", parameters drawn, parameters in all).
    """
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
