"""Runs models in memory with drafts: ours by their own high planes, llama.cpp by a second file of 4 bits, and
both by a small model, where there is one.

llama.cpp drafts as its own tools do (`common/speculative.cpp`): a line of the draft's likeliest tokens, until
one has a probability below 0.75, of at most 16 tokens by default; then one batch of the target verifies the
line. Here the loop is in Python around its low-level binding, and 4 and 8 tokens are tried too. Both are
greedy, so that answers are those of the model alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from benchmarks.peers.llama import LlamaCppSession, gguf_of
from benchmarks.peers.ours import EngineSession
from benchmarks.peers.peer import Opening, Progress, Session
from jaxllm.bundle import WeightFormat

_DRAFT_FORMAT, _SMALL_FORMAT = "Q4_0", "Q8_0"
# The most tokens of a line, and the least probability of one that others follow.
_LINES, _LEAST = (16, 8, 4), 0.75
# Of the likeliest tokens, among which probabilities are shared out.
_TOP = 10


class NestedSession(EngineSession):
    """An engine for each draft: its own high planes, and the small model that `options` may name as `draft`.
    They name `answer_tokens`, of every answer, too."""

    def __init__(self, opening: Opening, progress: Progress) -> None:
        from jaxllm.serving.ground.options import EngineOptions
        from jaxllm.serving.ground.speculation_options import SpeculationOptions
        from jaxllm.serving.opening.engine import Engine

        self._answer_tokens = int(opening.options["answer_tokens"])
        drafts = {"drafts of high planes": SpeculationOptions(drafter="nested")}
        if small := opening.options.get("draft"):
            drafts[f"drafts of {Path(small).stem}"] = SpeculationOptions(model=small)
        self._engines = {
            setting: Engine.open(
                opening.model,
                weights=cast(WeightFormat, opening.format),
                options=EngineOptions(context_tokens=opening.context_tokens),
                speculation=speculation,
                progress=progress,
            )
            for setting, speculation in drafts.items()
        }
        self.settings = tuple(drafts)
        self._engine = self._engines[self.settings[0]]

    def passes(self) -> int:
        """Verifications so far, and tokens that were decoded without one."""
        found = [each.speculation.counts for each in self._engines.values() if each.speculation is not None]
        return sum(counts.verifications + counts.plain_tokens for counts in found)

    def prefill(self, prompt: Sequence[int], setting: str) -> int:
        """See `Session.prefill`."""
        from jaxllm.serving.engine.request import GenerationConfig

        config = GenerationConfig(max_tokens=self._answer_tokens, ignore_eos=True)
        self._answer = self._engines[setting].stream(list(prompt), config)
        self._pieces = iter(self._answer)
        self._read(1)
        return self._answer.tokens[0]

    def decode(self, tokens: int, setting: str) -> list[int]:
        """See `Session.decode`."""
        self._read(1 + tokens)
        return self._answer.tokens[1 : 1 + tokens]

    def _read(self, count: int) -> None:
        while len(self._answer.tokens) < count and next(self._pieces, None) is not None:
            pass


def open_drafted(opening: Opening, progress: Progress) -> Session:
    """llama.cpp with a draft: the same model at 4 bits, or a small model at 8. Writes and quantizes the files
    unless that was done, and loads them. `Opening.options` may name the folder of the small model's float
    weights as `draft`."""

    def file(folder: Path, format_: str) -> Path:
        return gguf_of(folder, format_, threads=opening.threads, progress=progress)

    drafts = {_DRAFT_FORMAT: file(opening.model, _DRAFT_FORMAT)}
    if small := opening.options.get("draft"):
        drafts["the small model"] = file(Path(small), _SMALL_FORMAT)
    return DraftedLlamaSession(file(opening.model, opening.format), drafts, opening)


class DraftedLlamaSession(LlamaCppSession):
    """A target and its drafts, each with a context for each setting."""

    def __init__(self, path: Path, drafts: Mapping[str, Path], opening: Opening) -> None:
        super().__init__(path, opening)
        sessions = {name: LlamaCppSession(draft, opening) for name, draft in drafts.items()}
        self._kinds = {
            f"{setting}, lines of {most} by {name}": (setting, most, draft)
            for name, draft in sessions.items()
            for setting in self.settings
            for most in _LINES
            if setting in draft.settings
        }
        self.settings = tuple(self._kinds)
        self._passes = 0

    def passes(self) -> int:
        """Verifications so far."""
        return self._passes

    def prefill(self, prompt: Sequence[int], setting: str) -> int:
        """See `Session.prefill`."""
        kind, self._most, self._draft = self._kinds[setting]
        self._seen, self._drafted = list(prompt), len(prompt)
        self._draft.begin(kind)
        self._draft.feed(prompt)
        return super().prefill(prompt, kind)

    def decode(self, tokens: int, setting: str) -> list[int]:
        """See `Session.decode`."""
        ids: list[int] = []
        while len(ids) < tokens:
            line = self._line(min(self._most, tokens - len(ids) - 1))
            picked = self.feed_all([self._token, *line], len(self._seen)).argmax(-1)
            self._passes += 1
            right = next((i for i, token in enumerate(line) if token != picked[i]), len(line))
            self._seen += [self._token, *line[:right]]
            self._token = int(picked[right])
            self.forget(len(self._seen))
            # The draft has not been fed the line's last token.
            self._drafted = min(self._drafted, len(self._seen))
            self._draft.forget(self._drafted)
            ids += [*line[:right], self._token]
        return ids

    def _line(self, most: int) -> list[int]:
        """What the draft finds likeliest after the last token."""
        line: list[int] = []
        if most <= 0:
            return line
        pending = [*self._seen[self._drafted :], self._token]
        self._drafted = len(self._seen) + 1
        while len(line) < most:
            logits = self._draft.feed(pending)
            top = np.partition(logits, -_TOP)[-_TOP:]
            line.append(int(logits.argmax()))
            if 1 / np.exp(top - top.max()).sum() < _LEAST or len(line) == most:
                break
            pending = line[-1:]
            self._drafted += 1
        return line
