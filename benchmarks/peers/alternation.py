"""Times systems in alternation: every one answers the same prompts, one after the other, round by round.

Alternation spreads what changes on a machine (clock rates, other users) over all systems; medians drop what
hits one round. A sample during which other processes computed is taken again, within a limit of time. In a
first round that is not counted, each system runs each case in every setting it offers and keeps its fastest
for prefill and for decode: a baseline is shown at its best.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.measuring.quiet import wait_for_quiet
from benchmarks.measuring.report import median
from benchmarks.peers.process import Child
from serving.host.progress import Progress

_PHASES = ("prefill_ms", "decode_ms")
_KERNELS = {"prefill_ms": "prefill_kernel_ms", "decode_ms": "decode_kernel_ms"}
# Answers are repeated within a sample until it takes this long: single ones of milliseconds vary too much.
_SAMPLE_MS = 150
_MOST_REPEATS = 20
_LONG_MS = 1500


@dataclasses.dataclass(frozen=True)
class System:
    """A system at one width: its child process, and the settings it may choose from. Names are unique."""

    name: str
    child: Child
    settings: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Medians of one system and prompt length.

    Attributes:
      prefill_ms: from the prompt to its first token on the host.
      decode_ms: of all further tokens.
      prefill_kernel_ms, decode_kernel_ms: the part of these in native kernels; 0 where it is not known.
      prefill_setting, decode_setting: the fastest ones; None where there was no choice.
      readable_bytes: bytes that memory could have delivered while the further tokens were decoded, by its
        bandwidth just before and after; 0 where that is not measured.
      disturbed: samples among those kept during which other processes computed.
      samples: number of samples kept.
    """

    prefill_ms: float
    decode_ms: float
    prefill_kernel_ms: float
    decode_kernel_ms: float
    prefill_setting: str | None
    decode_setting: str | None
    readable_bytes: float
    disturbed: int
    samples: int


def alternate(
    systems: Sequence[System],
    prompts: Sequence[Sequence[int]],
    *,
    decode_tokens: int,
    rounds: int,
    patience_s: float,
    progress: Progress,
    bytes_per_s: Callable[[], float] | None = None,
) -> dict[tuple[str, int], Result]:
    """Runs all rounds.

    Args:
      systems: several may share a child.
      prompts: token ids, of different lengths.
      decode_tokens: decoded after each prompt, besides the first token.
      rounds: timed ones.
      patience_s: time in all to spend on samples that are not kept, and on waiting for quiet.
      progress: called with ("Measuring", done, total).
      bytes_per_s: measures memory's bandwidth at this moment; called before and after every sample.

    Returns:
      Results by the system's name and prompt length.
    """
    total = len(systems) * len(prompts) * (rounds + 1)
    turns = _Alternation(decode_tokens, patience_s, total, progress, bytes_per_s)
    best: dict[tuple[str, int], dict[str, str]] = {}
    for system in systems:
        for prompt in prompts:
            best[system.name, len(prompt)] = turns.fastest(system, prompt)
    kept: dict[tuple[str, int], list[dict[str, Any]]] = {key: [] for key in best}
    for round_ in range(rounds):
        # No system always runs behind the same one.
        order = list(systems if round_ % 2 else reversed(systems))
        for prompt in prompts:
            for system in order:
                key = system.name, len(prompt)
                kept[key].append(turns.sample(system.child, prompt, best[key]))
    choices = {(each.name, len(prompt)): len(each.settings) for each in systems for prompt in prompts}
    return {key: _result(samples, best[key] if choices[key] > 1 else {}) for key, samples in kept.items()}


def prompt_ids(vocab_size: int, tokens: int) -> list[int]:
    """Token ids spread over the vocabulary, the same at every run."""
    return np.random.default_rng(0).integers(0, vocab_size, tokens).tolist()


class _Alternation:
    """Sends commands to children, one at a time, each when the child before is asleep."""

    def __init__(
        self,
        decode_tokens: int,
        patience_s: float,
        total: int,
        progress: Progress,
        bytes_per_s: Callable[[], float] | None,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._decode_tokens = decode_tokens
        self._patience_s = patience_s
        self._progress, self._done, self._total = progress, 0, total
        self._last: Child | None = None
        self._repeats: dict[tuple[Child, int], int] = {}

    def fastest(self, system: System, prompt: Sequence[int]) -> dict[str, str]:
        """The fastest setting of each phase."""
        times: dict[str, dict[str, float]] = {phase: {} for phase in _PHASES}
        for setting in system.settings:
            for _ in range(2):
                answer = self._undisturbed(system.child, prompt, setting)
                for phase in _PHASES:
                    times[phase][setting] = min(answer[phase], times[phase].get(setting, float("inf")))
                total_ms = sum(answer[phase] for phase in _PHASES)
                repeats = min(_MOST_REPEATS, max(1, round(_SAMPLE_MS / total_ms)))
                self._repeats[system.child, len(prompt)] = repeats
                # What runs first pays for cold pages; that is little of a long answer.
                if total_ms > _LONG_MS:
                    break
        self._step()
        return {phase: min(by_setting, key=by_setting.__getitem__) for phase, by_setting in times.items()}

    def sample(self, child: Child, prompt: Sequence[int], best: dict[str, str]) -> dict[str, Any]:
        """The time of each phase at its fastest setting, and whether other processes disturbed it."""
        sample: dict[str, Any] = {"disturbed": False}
        before = self._memory_speed()
        for setting in dict.fromkeys(best.values()):
            answer = self._undisturbed(child, prompt, setting)
            sample["disturbed"] |= bool(child.disturbed)
            for phase in _PHASES:
                if best[phase] == setting:
                    kernels = _KERNELS[phase]
                    sample |= {phase: answer[phase], kernels: answer.get(kernels, 0.0)}
        speed = (before + self._memory_speed()) / 2
        sample["readable_bytes"] = speed * sample["decode_ms"] / 1000
        self._step()
        return sample

    def _undisturbed(self, child: Child, prompt: Sequence[int], setting: str) -> dict[str, Any]:
        """An answer during which no other process computed, within the patience; else the last one."""
        answer = self._answer(child, prompt, setting)
        while child.disturbed and self._patience_s > 0:
            began = time.perf_counter()
            wait_for_quiet()
            answer = self._answer(child, prompt, setting)
            self._patience_s -= time.perf_counter() - began
        return answer

    def _memory_speed(self) -> float:
        if self._bytes_per_s is None:
            return 0.0
        self._wait_for_last()
        return self._bytes_per_s()

    def _wait_for_last(self) -> None:
        if self._last is not None:
            self._last.wait_until_asleep()
            self._last = None

    def _answer(self, child: Child, prompt: Sequence[int], setting: str) -> dict[str, Any]:
        self._wait_for_last()
        self._last = child
        repeats = self._repeats.get((child, len(prompt)), 1)
        return child.answer(prompt, self._decode_tokens, setting, repeats=repeats)

    def _step(self) -> None:
        self._done += 1
        self._progress("Measuring", self._done, self._total)


def _result(samples: list[dict[str, Any]], chosen_settings: dict[str, str]) -> Result:
    undisturbed = [sample for sample in samples if not sample["disturbed"]]
    # Disturbed samples count only where there are no others.
    chosen = undisturbed or samples
    return Result(
        prefill_ms=median(sample["prefill_ms"] for sample in chosen),
        decode_ms=median(sample["decode_ms"] for sample in chosen),
        prefill_kernel_ms=median(sample.get("prefill_kernel_ms", 0.0) for sample in chosen),
        decode_kernel_ms=median(sample.get("decode_kernel_ms", 0.0) for sample in chosen),
        prefill_setting=chosen_settings.get("prefill_ms"),
        decode_setting=chosen_settings.get("decode_ms"),
        readable_bytes=median(sample["readable_bytes"] for sample in chosen),
        disturbed=0 if undisturbed else len(chosen),
        samples=len(chosen),
    )
