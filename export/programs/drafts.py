"""Drafts by exported programs: another folder of programs, or another level of the same.

Trees have the sizes of the `verify` programs. A drafter that is a program decodes one token at a time, so
it grows one line of the most likely tokens; other likely tokens on the way become leaves.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxllm.export.programs.runner import ProgramCache, ProgramRunner
from jaxllm.serving.engine.request import common_prefix
from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.runner import prefill_prompt
from jaxllm.serving.speculation.costs import DraftTimes, running_mean
from jaxllm.serving.speculation.drafter import Drafter
from jaxllm.speculation.token_tree import Growing, TokenTree, grown, root_alone

# Maximum number of tokens that are decoded one by one: a chunk costs as much as a few.
_FEW_TOKENS = 3


class ProgramDrafter(Drafter):
    """Grows lines of tokens, with leaves, by a program that decodes (see `Drafter`).

    Attributes:
      times: running mean of seconds per run, and number of the program's runs.
    """

    def __init__(self, runner: ProgramRunner, shape: TreeShape) -> None:
        self.times = DraftTimes()
        self._runner, self._shape = runner, shape
        # The tokens in the cache.
        self._cached: list[int] = []
        self._cache: ProgramCache | None = None
        self._version = runner.weights_version
        self._source: tuple[int, ...] = ()

    def warm_up(self, progress: Progress | None = None, *, tokens: int | None = None) -> None:
        """See `Drafter`."""
        wanted = self._runner.signatures
        if tokens is not None:
            wanted = self._runner.request_signatures(min(tokens, self._runner.options.context_tokens), 0)
        self._runner.executor.prepare(
            [each for each in wanted if each.kind in ("prefill", "decode", "encode")], progress
        )

    def read(self, source: tuple[int, ...]) -> None:
        """See `Drafter`; its own programs read the source."""
        if source != self._source:
            self._cached, self._cache, self._source = [], None, source

    def grow(self, sequence: Sequence[int], root: int, growing: Growing, cache: Any) -> tuple[TokenTree, Any]:
        """See `Drafter`; it has a cache of its own."""
        # Each run extends the one line.
        alpha = max(growing.alpha, growing.run + growing.branch)
        text, tree = [*sequence, root], root_alone(root, self._shape.room)
        options = self._runner.options
        most = min(growing.most, growing.depth + 1, options.context_tokens - len(text), self._shape.room)
        # Or the source is longer than its encoder supports.
        if most < 2 or len(self._source) > options.source_tokens(self._runner.cfg):
            return tree, cache
        logits = self._logits_after(text, len(text) + most)
        line: list[int] = []
        leaves: list[tuple[int, int, float]] = []
        confidences = [1.0]
        while True:
            # The most likely tokens, at most as many as a node's children, and their probabilities.
            count = self._shape.branches
            likely = logits.argpartition(-count)[-count:]
            likely = likely[np.argsort(-logits[likely], kind="stable")]
            top = logits[likely[0]]
            shares = (np.exp(logits[likely] - top) / np.exp(logits - top).sum()).tolist()
            tokens = likely.tolist()
            confidence, node = confidences[-1], len(line)
            leaves += [
                (node, token, confidence * share)
                for token, share in zip(tokens[1:], shares[1:], strict=True)
                if share > self._shape.threshold
            ]
            line.append(tokens[0])
            confidences.append(confidence * shares[0])
            if confidences[-1] < alpha or len(line) + 1 >= most or tokens[0] in growing.stop_ids:
                break
            logits = self._step(tokens[0])
        parents = [*range(len(line)), *(parent for parent, _, _ in leaves)]
        drafted = [*line, *(token for _, token, _ in leaves)]
        # Leaves come after the line, so that its accepted nodes are already at their positions.
        shares = [*confidences[1:], *(share for _, _, share in leaves)]
        return grown(tree, drafted, parents, shares), cache

    def _logits_after(self, text: Sequence[int], room: int) -> np.ndarray:
        """Returns logits `[V]` after a text, whose last token is always run, in a cache of `room`
        positions."""
        if self._version != self._runner.weights_version:
            # Rows of another adapter.
            self._cached, self._version = [], self._runner.weights_version
        common = min(common_prefix(self._cached, text), len(text) - 1)
        cache, self._cache = self._cache, None
        if cache is None:
            cache, common = self._runner.start(room), 0
            if self._source:
                cache = self._runner.read_source(cache, self._source)
        self._cache = self._runner.make_room(cache, room)
        self._cached = list(text[:common])
        rest = text[common:]
        if len(rest) > _FEW_TOKENS:
            logits, self._cache = prefill_prompt(self._runner, self._cache, rest, common)
            self._cached += rest
            return np.asarray(logits)[0]
        logits = np.zeros(0)
        for token in rest:
            logits = self._step(token)
        return logits

    def _step(self, token: int) -> np.ndarray:
        began = time.perf_counter()
        assert self._cache is not None
        logits, self._cache = self._runner.step(self._cache, token, len(self._cached))
        logits = np.asarray(logits)[0]
        self._cached.append(token)
        self.times.run_s = running_mean(self.times.run_s or None, time.perf_counter() - began)
        self.times.steps += 1
        return logits
