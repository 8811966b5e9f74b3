"""Times answers with all weights in memory: ours drafted by their high planes or a small model and without,
llama.cpp's with a draft of 4 bits or the same small model and without.

All systems run the same float weights at 8 bits, each in a process of its own, and answer the same prompts in
turns. A system with settings to choose from answers the tried prompts in each, and keeps its fastest.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring.report import Row
from benchmarks.models.checkpoint import Checkpoint
from benchmarks.peers import DRAFTED, OURS, PEERS, Opening, Peer
from benchmarks.peers.peer import unavailable
from benchmarks.peers.process import Child, threads_of
from benchmarks.speculative.answers import Spent, token_ms
from benchmarks.speculative.rows import ALL, spent_rows
from serving.host.progress import Progress

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
    prompts: Mapping[str, Sequence[Sequence[int]]],
    tried: Mapping[str, Sequence[Sequence[int]]],
    *,
    tokens: int,
    context_tokens: int,
    progress: Progress,
    tell: Callable[[str], None],
    draft: Path | None = None,
) -> list[Row]:
    """Times per token of every system that is installed.

    Args:
      model: a bundle or a folder; its weights in floats are what all systems quantize.
      prompts: token ids by task, timed.
      tried: by task, that settings are chosen on; without any, the first timed ones.
      tokens: of each answer after the first.
      context_tokens: of every context.
      progress: called with what is done, its part that is done, and all of it.
      tell: given a line for each system that is left out.
      draft: a small model that may draft; None for none.

    Raises:
      PeerFailed: a system cannot be opened.
    """
    checkpoint = Checkpoint.find(model)
    opened = _Opened(checkpoint, tokens + 1, context_tokens, progress, draft)
    with opened:
        opened.open(DRAFTED[0], _WIDTH)
        opened.open(OURS, _WIDTH)
        for peer in (PEERS[LLAMA], DRAFTED[1]):
            if reason := unavailable(peer, checkpoint.cfg):
                tell(f"without {peer.name}: {reason}")
                continue
            (format_,) = peer.systems("int8").values()
            opened.open(peer, format_)
        chosen = {task: each for task, each in tried.items() if each} or {
            task: each[:1] for task, each in prompts.items()
        }
        systems = {
            name: Turns(child, _fastest(child, chosen, tokens)) for name, child in opened.children.items()
        }
        asked = [(task, prompt) for task, each in prompts.items() for prompt in each]
        for number, (task, prompt) in enumerate(asked):
            # No system always runs behind the same one.
            for turns in list(systems.values())[:: 1 if number % 2 else -1]:
                turns.answer(task, prompt, tokens)
            progress("Measuring in memory", number + 1, len(asked))
    plain = systems[PLAIN].answers
    notes = {name: turns.note(plain) for name, turns in systems.items()}
    times = {name: turns.times for name, turns in systems.items()}
    return spent_rows(NESTED, times, f"{checkpoint.name}, all weights in memory: {ALL}", notes)


class _Opened:
    """Systems in processes of their own; leaving it ends them.

    Attributes:
      children: by name.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        answer_tokens: int,
        context_tokens: int,
        progress: Progress,
        draft: Path | None,
    ) -> None:
        self._folder, self._progress = checkpoint.folder(progress), progress
        self._context_tokens = context_tokens
        # What systems take beside that.
        self._own: dict[str, dict[str, Any]] = {
            NESTED: {"answer_tokens": answer_tokens},
            PLAIN: {"context_tokens": context_tokens},
        }
        if draft is not None:
            folder = Checkpoint.find(draft).folder(progress)
            self._own[NESTED] |= {"draft": str(draft)}
            self._own[LLAMA_DRAFTED] = {"draft": str(folder)}
        self._stack = contextlib.ExitStack()
        self.children: dict[str, Child] = {}

    def __enter__(self) -> "_Opened":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def open(self, peer: Peer, format_: str) -> None:
        """Opens a system at a format of its own."""
        opening = Opening(
            peer=peer.name,
            model=self._folder,
            format=format_,
            threads=threads_of(0),
            context_tokens=self._context_tokens,
            options=self._own.get(peer.name, {}),
        )
        child = Child(f"{peer.name} {format_}", opening, self._progress)
        self.children[peer.name] = self._stack.enter_context(child)


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
