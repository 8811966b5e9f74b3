"""Starts one child process per system, and sends it commands.

Every system, ours included, runs in a process of its own, pinned to the same cores. Systems share neither
allocator nor thread pools, and only one computes at a time: before each timed command the parent waits until
the others sleep (OpenMP workers spin for a while after their work).

Times systems in alternation: every one answers the same prompts, one after the other, round by round.

Alternation spreads what changes on a machine (clock rates, other users) over all systems; medians drop what
hits one round. A sample during which other processes computed is taken again, within a limit of time. In a
first round that is not counted, each system runs each case in every setting it offers and keeps its fastest
for prefill and for decode: a baseline is shown at its best.

Computes the perplexity of every system on the same token ids, to compare the quality of formats.

Text is cut as `jaxllm.serving.evaluation.texts` cuts it, by the model's tokenizer, and every system gets
the ids: no tokenizer of a peer takes part. `float` is our engine with the checkpoint's weights in float32.
"""

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.machine import Disturbance, wait_for_quiet, wait_until_asleep
from benchmarks.harness.plan import BasePlan
from benchmarks.harness.report import median
from benchmarks.models import Checkpoint
from benchmarks.peers.peer import Opening
from jaxllm.bundle import Bundle
from jaxllm.errors import ConfigError, JaxllmError, one_line
from jaxllm.serving.host.progress import Progress
from jaxllm.text.tokenizer import Tokenizer

_COMMAND = (sys.executable, "-m", "benchmarks.peers.child")
_CLOSE_TIMEOUT_S = 5.0
_SHOWN_STDERR_BYTES = 2000


class PeerFailed(JaxllmError):
    """A system under test could not be started, refused a command, or died."""


class Child:
    """A system with an open model in a process of its own. A context manager; closing it ends the process.

    Attributes:
      label: its name in messages.
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
        """Starts the process and opens the model.

        Args:
          label: its name in messages.
          opening: the model to open.
          progress: called as the child reports it.
          command: a program that speaks the protocol of `child.py`.

        Raises:
          PeerFailed: it did not start, or could not open the model.
        """
        self.label = label
        self.peak_bytes = 0
        self.disturbed: bool | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `close`)
        self._process: subprocess.Popen[bytes] | None = _start(command, opening.threads, self._stderr)
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

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def answer(self, prompt: Sequence[int], tokens: int, setting: str, *, repeats: int = 1) -> dict[str, Any]:
        """Feeds a prompt, then decodes greedily, `repeats` times: the median `prefill_ms` and `decode_ms`,
        and the `ids`, the first of them from the prefill."""
        command = {"do": "answer", "prompt": list(prompt), "tokens": tokens, "setting": setting}
        return self._ask(command | {"repeats": repeats})

    def score(self, tokens: Sequence[int], targets: Sequence[int]) -> float:
        """Negative log-likelihood (nats) of the targets, each after its token and all before it."""
        return self._ask({"do": "score", "tokens": list(tokens), "targets": list(targets)})["loss"]

    def close(self) -> None:
        """Ends the process, by force if it must be."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            self._commands.close()
        try:
            process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._answers.close()
        self._stderr.close()

    def wait_until_asleep(self) -> None:
        """Returns once the process computes nothing, or after a second."""
        if self._process is not None:
            wait_until_asleep(self._process.pid)

    def _ask(self, command: dict[str, Any], progress: Progress | None = None) -> dict[str, Any]:
        if self._process is None:
            raise PeerFailed(f"{self.label} is closed; start it again")
        disturbance = Disturbance()
        try:
            self._commands.write(json.dumps(command).encode() + b"\n")
            self._commands.flush()
            answer = self._read(progress)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise PeerFailed(f"{self.label} {self._death(self._process)}")
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

    def _death(self, process: "subprocess.Popen[bytes]") -> str:
        """How the process ended, with the last line of its standard error."""
        code = process.wait()
        how = f"exited with {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (most often for want of memory)"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - _SHOWN_STDERR_BYTES))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f"{how}; it said last: {one_line(lines[-1])}" if lines else how


def last_words(stderr: str) -> str:
    """The last line of a failed process's standard error."""
    lines = stderr.strip().splitlines()
    return one_line(lines[-1]) if lines else "it said nothing"


def threads_of(wanted: int) -> int:
    """The threads that a system computes with: so many, or for 0 all cores of this process.

    Raises:
      ConfigError: there are fewer cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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
def pinned(threads: int) -> Iterator[None]:
    """Pins this thread, hence a process that it starts, to the first `threads` of its cores."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _start(command: Sequence[str], threads: int, stderr: Any) -> "subprocess.Popen[bytes]":
    with pinned(threads):
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment_of(threads),
            # Ctrl-C is for the parent alone, which then closes its children.
            start_new_session=True,
        )


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedPlan(BasePlan):
    """Sizes of what is timed in alternation.

    Attributes:
      prompt_tokens: lengths of prompts.
      decode_tokens: decoded after each of them.
      rounds: of which medians are taken.
      text_windows: most windows of a text to score; 0 means all.
      patience_s: for repeating what other processes disturbed, in all.
      threads: that every system computes with; 0 takes all cores of this process.
    """

    prompt_tokens: tuple[int, ...]
    decode_tokens: int
    rounds: int
    text_windows: int = 0
    patience_s: float
    threads: int = 0


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

    def rates(self, prompt: int, tokens: int) -> dict[str, float]:
        """Tokens per second by metric, of a prompt of so many tokens and of so many further ones."""
        return {
            "prefill_tokens_per_s": 1000 * prompt / self.prefill_ms,
            "decode_tokens_per_s": 1000 * tokens / self.decode_ms,
        }


def alternate(
    systems: Sequence[System],
    prompts: Sequence[Sequence[int]],
    *,
    plan: TimedPlan,
    progress: Progress,
    bytes_per_s: Callable[[], float] | None = None,
) -> dict[tuple[str, int], Result]:
    """Runs all rounds.

    Args:
      systems: several may share a child.
      prompts: token ids, of different lengths.
      plan: how many tokens are decoded after each prompt besides the first one, in how many rounds, and how
        much time is spent on samples that are not kept and on waiting for quiet.
      progress: called with ("Measuring", done, total).
      bytes_per_s: measures memory's bandwidth at this moment; called before and after every sample.

    Returns:
      Results by the system's name and prompt length.
    """
    total = len(systems) * len(prompts) * (plan.rounds + 1)
    turns = _Alternation(plan, total, progress, bytes_per_s)
    best: dict[tuple[str, int], dict[str, str]] = {}
    for system in systems:
        for prompt in prompts:
            best[system.name, len(prompt)] = turns.fastest(system, prompt)
    kept: dict[tuple[str, int], list[dict[str, Any]]] = {key: [] for key in best}
    for round_ in range(plan.rounds):
        for prompt in prompts:
            # No system always runs behind the same one.
            for system in systems if round_ % 2 else reversed(systems):
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
        plan: TimedPlan,
        total: int,
        progress: Progress,
        bytes_per_s: Callable[[], float] | None,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._decode_tokens, self._patience_s = plan.decode_tokens, plan.patience_s
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


REFERENCE = "float"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """A text to score: documents as token ids, in windows that do not overlap.

    Attributes:
      name: of the file.
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
        """Reads and tokenizes a file.

        Args:
          path: UTF-8 text.
          checkpoint: the model, for its tokenizer.
          separator: splits the text into documents, scored apart.
          window_tokens: most tokens that a prediction sees.
          limit: most windows; 0 means all.

        Raises:
          ConfigError: the file cannot be read, or nothing is left to predict.
        """
        from jaxllm.cli.console import read_text

        text = read_text(path)
        documents = text.split(separator) if separator else [text]
        tokenizer = _tokenizer(checkpoint)
        windows = list(_windows(documents, tokenizer, window_tokens))
        if not windows:
            raise ConfigError(f"{path} holds no token to predict; give a longer text")
        return cls(name=path.name, windows=windows[:limit] if limit else windows)


def perplexity(child: Child, text: Text, progress) -> float:
    """exp of a system's mean negative log-likelihood per predicted token."""
    loss, done = 0.0, 0
    for tokens, targets in text.windows:
        loss += child.score(tokens, targets)
        done += len(targets)
        progress("score", done, text.tokens)
    return math.exp(loss / text.tokens)


def _windows(
    documents: Sequence[str], tokenizer: Tokenizer, window_tokens: int
) -> Iterator[tuple[list[int], list[int]]]:
    for document in documents:
        if not document.strip():
            continue
        ids = tokenizer.encode(document)
        for at in range(0, len(ids) - 1, window_tokens):
            targets = ids[at + 1 : at + window_tokens + 1]
            yield ids[at : at + len(targets)], targets


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    from jaxllm.checkpoints.tokenizer_folder import read_tokenizer

    if checkpoint.stored is None:
        return Tokenizer(read_tokenizer(checkpoint.model))
    with Bundle.open(checkpoint.model) as bundle:
        return Tokenizer(bundle.tokenizer_files())
