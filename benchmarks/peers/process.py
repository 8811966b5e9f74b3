"""Starts one child process per system, sends it commands, and times systems in alternation.

Every system, ours included, runs in a process of its own, pinned to the same cores. Systems share neither
allocator nor thread pools, and only one computes at a time: before each timed command the parent waits until
the others sleep (OpenMP workers spin for a while after their work).

Every system answers the same prompts, one after the other, round by round. Alternation spreads what changes
on a machine (clock rates, other users) over all systems; medians drop what hits one round. A sample during
which other processes computed is taken again, within a limit of time. In a first round that is not counted,
each system runs each case in every setting it offers and keeps its fastest for prefill and for decode: a
baseline is shown at its best.

Perplexities compare the quality of formats. Text is cut as `jaxllm.serving.evaluation.texts` cuts it, by the
model's tokenizer, and every system gets the ids: no tokenizer of a peer takes part. `float` is our engine
with the checkpoint's weights in float32.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Self

import numpy as np

from benchmarks.harness.bench import TimedPlan
from benchmarks.harness.machine import Disturbance, wait_for_quiet, wait_until_asleep
from benchmarks.harness.report import Row, compared
from benchmarks.models import Checkpoint
from benchmarks.peers.peer import Opening
from jaxllm.errors import ConfigError, JaxllmError, one_line
from jaxllm.serving.host.machine import usable_cores
from jaxllm.serving.host.progress import Progress

_COMMAND = (sys.executable, "-m", "benchmarks.peers.child")
_CLOSE_TIMEOUT_S = 15.0


class PeerFailed(JaxllmError):
    """A system under test could not be started, refused a command, or died."""


class Process:
    """A process that computes with so many threads, pinned to as many cores. A context manager."""

    def __init__(
        self, command: Sequence[str], threads: int, environment: Mapping[str, str] | None = None, **how: Any
    ) -> None:
        """Starts the process.

        Args:
          **how: further arguments of `subprocess.Popen`; what it prints goes into a file otherwise.
        """
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        streams = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": self._log} | how
        variables = environment_of(threads) | dict(environment or {})
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
        try:
            if cores is not None:
                # Of this thread, hence of the process that it starts.
                os.sched_setaffinity(0, sorted(cores)[:threads])
            # Ctrl-C is for the parent alone, which then closes its children.
            started: Any = subprocess.Popen(command, env=variables, start_new_session=True, **streams)
        finally:
            if cores is not None:
                os.sched_setaffinity(0, cores)
        self._process: subprocess.Popen[bytes] = started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def close(self) -> None:
        """Ends the process, by force if it must be."""
        if self._log.closed:
            return
        process = self._process
        with contextlib.suppress(OSError):
            # A process that is sent commands ends with them.
            (process.terminate if process.stdin is None else process.stdin.close)()
        try:
            process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._log.close()

    def how_it_ended(self) -> str:
        """Waits for its end; with the last line of what it wrote."""
        code = self._process.wait()
        how = f"exited with {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (most often for want of memory)"
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 4000))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f"{how}; it said last: {one_line(lines[-1])}" if lines else how


class Child(Process):
    """A system with an open model in a process of its own. A context manager; closing it ends the process.

    Attributes:
      facts: of its session (see `Session.facts`).
      settings: of its session (see `Session`).
      open_peak_bytes: peak of resident memory while it opened the model.
      peak_bytes: peak since then, where the operating system can reset it.
      disturbed: whether other processes took noticeable processor time during the last command; None where
        that is not known.
    """

    def __init__(
        self,
        label: str,
        opening: Opening,
        progress: Progress | None = None,
        *,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        """Starts the process and opens the model."""
        self.label = label
        self.peak_bytes = 0
        self.disturbed: bool | None = None
        super().__init__(command, opening.threads, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout
        try:
            opened = self._ask({"do": "open", "opening": opening.to_json()}, progress)
        except BaseException:
            self.close()
            raise
        self.open_peak_bytes, self.peak_bytes = self.peak_bytes, 0
        self.facts: dict[str, Any] = opened["facts"]
        self.settings: list[str] = opened["settings"]

    def answer(self, prompt: Sequence[int], tokens: int, setting: str, *, repeats: int = 1) -> dict[str, Any]:
        """Feeds a prompt, then decodes greedily, `repeats` times: the median `prefill_ms` and `decode_ms`,
        and the `ids`, the first of them from the prefill."""
        command = {"do": "answer", "prompt": list(prompt), "tokens": tokens, "setting": setting}
        return self._ask(command | {"repeats": repeats})

    def score(self, tokens: Sequence[int], targets: Sequence[int]) -> list[float]:
        """Negative log-likelihood (nats) of each target, after its token and all before it."""
        return self._ask({"do": "score", "tokens": list(tokens), "targets": list(targets)})["losses"]

    def wait_until_asleep(self) -> None:
        """Returns once the process computes nothing, or after a second."""
        wait_until_asleep(self.pid)

    def _ask(self, command: dict[str, Any], progress: Progress | None = None) -> dict[str, Any]:
        if self._log.closed:
            raise PeerFailed(f"{self.label} is closed; start it again")
        disturbance = Disturbance()
        try:
            self._commands.write(json.dumps(command).encode() + b"\n")
            self._commands.flush()
            answer = self._read(progress)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise PeerFailed(f"{self.label} {self.how_it_ended()}")
        self.disturbed = disturbance.ended(own_s=answer["cpu_s"])
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        if "error" in answer:
            raise PeerFailed(f"{self.label} cannot {command['do']}: {answer['error']}")
        return answer

    def _read(self, progress: Progress | None) -> dict[str, Any] | None:
        """The answer to a command, None if the process ends instead."""
        for line in self._answers:
            try:
                message = json.loads(line)
            except ValueError as error:
                shown = line[:80].decode(errors="replace")
                raise PeerFailed(f"{self.label} broke the protocol: {shown!r} is not JSON") from error
            if "progress" not in message:
                return message
            if progress is not None:
                progress(*message["progress"])
        return None


def threads_of(wanted: int) -> int:
    """The threads that a system computes with: so many, or for 0 all cores of this process."""
    cores = usable_cores()
    if not 0 <= wanted <= cores:
        raise ConfigError(f"--threads must be in [1, {cores}], the cores of this process; got {wanted}")
    return wanted or cores


def environment_of(threads: int) -> dict[str, str]:
    """The environment of a system that computes with so many threads."""
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        "JAXLLM_THREADS": str(threads),
        # No library may look for a newer model.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


@contextlib.contextmanager
def opened(
    openings: Mapping[str, Opening], progress: Progress, label: str = ""
) -> Iterator[dict[str, Child]]:
    """Systems, each in a process of its own, by name; messages say the `label`, too."""
    with contextlib.ExitStack() as stack:
        yield {
            system: stack.enter_context(Child(f"{system} {label}".rstrip(), opening, progress))
            for system, opening in openings.items()
        }


def opening_of(plan: TimedPlan, peer: str, model: Path, format_: str = "", **options: Any) -> Opening:
    """What a system opens, with the threads and the context of a plan."""
    return Opening(
        peer=peer,
        model=model,
        format=format_,
        threads=threads_of(plan.threads),
        context_tokens=plan.context_tokens,
        options=options,
    )


PHASES = ("prefill", "decode")


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
      ms: by phase: from the prompt to its first token on the host, and of all further tokens.
      kernel_ms: the part of these in native kernels; 0 where it is not known.
      settings: the fastest one of each phase; none where there was no choice.
      readable_bytes: bytes that memory could have delivered while the further tokens were decoded, by its
        bandwidth just before and after; 0 where that is not measured.
      disturbed: samples among those kept during which other processes computed.
    """

    ms: Mapping[str, float]
    kernel_ms: Mapping[str, float]
    settings: Mapping[str, str]
    readable_bytes: float
    disturbed: int
    samples: int

    def rate(self, phase: str, tokens: int) -> float:
        """Tokens per second in a phase of so many tokens."""
        return 1000 * tokens / self.ms[phase]


# Results by the system's name and prompt length.
Results = Mapping[tuple[str, int], Result]


def rate_rows(
    results: Results, systems: Iterable[str], plan: TimedPlan, case: str = "", **how: Any
) -> list[Row]:
    """Rows of the rates of both phases at each prompt length.

    Args:
      results: of `alternate`.
      systems: ours among them.
      case: of the rows, before the phase.
      **how: arguments of `compared`.
    """
    rows = []
    for prompt in sorted({length for _, length in results}):
        for phase, tokens in (("prefill", prompt), ("decode", plan.decode_tokens)):
            rates = {system: results[system, prompt].rate(phase, tokens) for system in systems}
            rows += compared(case + phase_case(phase, prompt, tokens), f"{phase}_tokens_per_s", rates, **how)
    return rows


def phase_case(phase: str, prompt: int, tokens: int) -> str:
    """A phase in the cases of rows."""
    return f"prompt {prompt}" if phase == "prefill" else f"decode {tokens} after {prompt}"


def alternate(
    systems: Sequence[System],
    vocab_size: int,
    *,
    plan: TimedPlan,
    progress: Progress,
    bytes_per_s: Callable[[], float] | None = None,
) -> Results:
    """Runs all rounds.

    Args:
      systems: several may share a child.
      plan: the lengths of prompts, how many tokens are decoded after each besides the first one, in how many
        rounds, and how much time is spent on samples that are not kept and on waiting for quiet.
      bytes_per_s: measures memory's bandwidth at this moment; called before and after every sample.
    """
    prompts = [prompt_ids(vocab_size, tokens) for tokens in plan.prompt_tokens]
    total = len(systems) * len(prompts) * (plan.rounds + 1)
    steps, patience_s, last = itertools.count(1), plan.patience_s, None
    repeats: dict[tuple[Child, int], int] = {}

    def wait_for_last(following: Child | None) -> None:
        nonlocal last
        if last is not None:
            last.wait_until_asleep()
        last = following

    def answered(child: Child, prompt: Sequence[int], setting: str) -> dict[str, Any]:
        """An answer during which no other process computed, within the patience; else the last one."""
        nonlocal patience_s
        while True:
            wait_for_last(child)
            times = repeats.get((child, len(prompt)), 1)
            answer = child.answer(prompt, plan.decode_tokens, setting, repeats=times)
            if not child.disturbed or patience_s <= 0:
                return answer
            began = time.perf_counter()
            wait_for_quiet()
            patience_s -= time.perf_counter() - began

    def fastest(system: System, prompt: Sequence[int]) -> dict[str, str]:
        """The fastest setting of each phase."""
        times: dict[str, dict[str, float]] = {phase: {} for phase in PHASES}
        for setting in system.settings:
            for _ in range(2):
                answer = answered(system.child, prompt, setting)
                for phase, by_setting in times.items():
                    by_setting[setting] = min(answer[f"{phase}_ms"], by_setting.get(setting, math.inf))
                total_ms = sum(answer[f"{phase}_ms"] for phase in PHASES)
                # Repeated within a sample until it takes 150 ms: single ones of milliseconds vary too much.
                repeats[system.child, len(prompt)] = min(20, max(1, round(150 / total_ms)))
                # What runs first pays for cold pages; that is little of a long answer.
                if total_ms > 1500:
                    break
        progress("Measuring", next(steps), total)
        return {phase: min(by_setting, key=by_setting.__getitem__) for phase, by_setting in times.items()}

    def memory_speed() -> float:
        if bytes_per_s is None:
            return 0.0
        wait_for_last(None)
        return bytes_per_s()

    def sample(child: Child, prompt: Sequence[int], best: Mapping[str, str]) -> dict[str, Any]:
        """The time of each phase at its fastest setting, and whether other processes disturbed it."""
        found: dict[str, Any] = {"disturbed": False}
        before = memory_speed()
        for setting in dict.fromkeys(best.values()):
            answer = answered(child, prompt, setting)
            found["disturbed"] |= bool(child.disturbed)
            for phase in (each for each in PHASES if best[each] == setting):
                found[phase] = answer[f"{phase}_ms"]
                found[f"{phase}_kernels"] = answer.get(f"{phase}_kernel_ms", 0.0)
        found["readable_bytes"] = (before + memory_speed()) / 2 * found["decode"] / 1000
        progress("Measuring", next(steps), total)
        return found

    best = {(system.name, len(prompt)): fastest(system, prompt) for system in systems for prompt in prompts}
    kept: dict[tuple[str, int], list[dict[str, Any]]] = {key: [] for key in best}
    for round_ in range(plan.rounds):
        for prompt in prompts:
            # No system always runs behind the same one.
            for system in systems if round_ % 2 else reversed(systems):
                key = system.name, len(prompt)
                kept[key].append(sample(system.child, prompt, best[key]))
    several = {each.name for each in systems if len(each.settings) > 1}
    return {key: _result(each, best[key] if key[0] in several else {}) for key, each in kept.items()}


def prompt_ids(vocab_size: int, tokens: int) -> list[int]:
    """Token ids spread over the vocabulary, the same at every run."""
    return np.random.default_rng(0).integers(0, vocab_size, tokens).tolist()


def _result(samples: list[dict[str, Any]], settings: Mapping[str, str]) -> Result:
    undisturbed = [sample for sample in samples if not sample["disturbed"]]
    # Disturbed samples count only where there are no others.
    chosen = undisturbed or samples
    medians = {key: median(sample[key] for sample in chosen) for key in chosen[0] if key != "disturbed"}
    return Result(
        ms={phase: medians[phase] for phase in PHASES},
        kernel_ms={phase: medians[f"{phase}_kernels"] for phase in PHASES},
        settings=settings,
        readable_bytes=medians["readable_bytes"],
        disturbed=0 if undisturbed else len(chosen),
        samples=len(chosen),
    )


REFERENCE = "float"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A text to score: documents as token ids, in windows that do not overlap.

    Attributes:
      windows: (tokens, targets) pairs; each target follows its token.
    """

    name: str
    windows: Sequence[tuple[list[int], list[int]]]

    @property
    def tokens(self) -> int:
        """Predicted tokens."""
        return sum(len(targets) for _, targets in self.windows)

    @classmethod
    def read(
        cls, path: Path, checkpoint: Checkpoint, *, separator: str | None, window_tokens: int, limit: int = 0
    ) -> "Text":
        """Reads a UTF-8 file, tokenized as the model does.

        Args:
          separator: splits the text into documents, scored apart.
          window_tokens: most tokens that a prediction sees.
          limit: most windows; 0 means all.
        """
        from jaxllm.cli.console import read_text

        text, tokenizer = read_text(path), checkpoint.tokenizer()
        windows = []
        for document in text.split(separator) if separator else [text]:
            ids = tokenizer.encode(document) if document.strip() else []
            for at in range(0, len(ids) - 1, window_tokens):
                targets = ids[at + 1 : at + window_tokens + 1]
                windows.append((ids[at : at + len(targets)], targets))
        if not windows:
            raise ConfigError(f"{path} holds no token to predict; give a longer text")
        return cls(name=path.name, windows=windows[:limit] if limit else windows)


def perplexity(child: Child, text: Text, progress: Progress) -> float:
    """exp of a system's mean negative log-likelihood per predicted token."""
    return math.exp(losses(child, text, progress).mean())


def losses(child: Child, text: Text, progress: Progress) -> np.ndarray:
    """A system's negative log-likelihood (nats) of each predicted token, `[text.tokens]`."""
    found: list[float] = []
    for tokens, targets in text.windows:
        found += child.score(tokens, targets)
        progress("score", len(found), text.tokens)
    return np.array(found)
