"""Decodes speculatively with token trees (LLMCad): the target's own tokens, in fewer passes over its weights.

The drafter grows a tree, the target verifies it in one pass, and accepted tokens go into both caches. The
tokens equal those of plain decoding, because `jaxllm.speculation.tree.choices` samples each of them in the
same way. Any runner can be the target, compiled buckets or exported programs.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from jaxllm.sampling_state import NO_TOKEN
from jaxllm.serving.engine.decoding import Decoding
from jaxllm.serving.ground.speculation_options import SpeculationOptions
from jaxllm.serving.runners.runner import BatchRow, DecodedRow, Runner, Verdict
from jaxllm.serving.speculation.costs import Payoff, SizeCost, running_mean
from jaxllm.serving.speculation.drafter import Drafter, LookupDrafter
from jaxllm.speculation.token_tree import (
    Fallback,
    Growing,
    PassTimes,
    TokenTree,
    by_confidence,
    matching_tokens,
    open_confidence,
    some_nodes,
    verified_nodes,
    worthwhile,
)


@dataclasses.dataclass
class SpeculationCounts:
    """Counts and times of speculation so far.

    Attributes:
      verifications: number of verified trees.
      nodes: number of verified draft tokens.
      accepted: number of accepted draft tokens.
      tokens: number of tokens from verifications, including the target's own.
      plain_tokens: number of tokens decoded without drafts.
      draft_s: time spent drafting before verifications.
      verify_s: time spent verifying.
      hidden_steps: steps of the drafter while the target waited for weights.
      hidden_s: time of these steps, a part of `verify_s`.
    """

    verifications: int = 0
    nodes: int = 0
    accepted: int = 0
    tokens: int = 0
    plain_tokens: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    hidden_steps: int = 0
    hidden_s: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a verification."""
        return self.tokens / self.verifications if self.verifications else 0.0

    @property
    def useful_share(self) -> float:
        """The share of verified draft tokens that was accepted."""
        return self.accepted / self.nodes if self.nodes else 0.0


class Speculation(Decoding):
    """Decodes with drafts (see `jaxllm.serving.engine.decoding.Decoding`).

    Attributes:
      runner: runner of the target; the drafter runs under its lock, too.
      drafter: grows the trees.
      options: options of speculation.
      counts: see `SpeculationCounts`.
      drafting: whether drafting is allowed; see `draft`.
      payoff: measured times per token with drafts and without.
    """

    one_pass = True

    def __init__(self, runner: Runner, drafter: Drafter, options: SpeculationOptions) -> None:
        super().__init__(runner)
        self.options, self.counts = options, SpeculationCounts()
        self.drafting = True
        looked_up = options.lookup and options.drafter != "ngram"
        self.drafter = LookupDrafter(drafter, options.trees) if looked_up else drafter
        self._fallback, self.payoff = Fallback(options.alpha), Payoff()
        sizes = options.trees.nodes
        self._verify_cost = SizeCost(sizes[-1], sizes)
        # Sizes of trees verified so far.
        self._verified = set[int]()
        # Sum of the confidences of a branch's new nodes, as a share of its own.
        self._yields: float | None = None

    def of(self, source: tuple[int, ...]) -> "SourcedSpeculation":
        """Decodes the answer to one source of an encoder-decoder."""
        return SourcedSpeculation(self, source)

    def draft(self, on: bool) -> None:
        """Allows drafting or not, from the next dispatch on; without drafts the drafter releases its
        memory."""
        if self.drafting and not on:
            self.drafter.release()
        self.drafting = on

    def cache_tokens(self, tokens: int) -> int:
        """Positions for `tokens` and a tree after them, at most those of the context."""
        return max(tokens, min(tokens + self.options.trees.nodes[-1], self.runner.options.context_tokens))

    def limit(self, pace: int, remaining: int) -> int:
        """The `limit` of the next `decode`, of `remaining` wanted tokens: as many as a verification can give,
        regardless of the pace."""
        return min(remaining, self.options.trees.nodes[-1])

    def decode(self, row: BatchRow, cached: Sequence[int]) -> DecodedRow:
        """Runs a draft and its verification, or plain decoding if that is faster."""
        limit, root = row.limit, int(np.asarray(row.token)[0])
        cache = dataclasses.replace(row.cache, length=np.int32(len(cached)))
        row = dataclasses.replace(row, cache=cache)
        room = min(cache.capacity_tokens - len(cached), self.options.trees.nodes[-1])
        paused = self.options.pausing and not self.payoff.worthwhile
        if paused or not self.drafting:
            # A block of plain tokens, at most those for which drafting pauses.
            most = min(limit, self.payoff.paused_tokens) if self.drafting else limit
            return self._plain(row, cached, self.runner.decode_limit(self.payoff.pace, most))
        if limit < 2 or room < self.options.trees.nodes[0]:
            return self._plain(row, cached)
        began = time.perf_counter()
        # The root is verified in any case.
        self.runner.expect(np.array([root]))
        most = max(each for each in self.options.trees.nodes if each <= room)
        growing = self._growing(most, row)
        tree, cache = self.drafter.grow(cached, root, growing, cache)
        row = dataclasses.replace(row, cache=cache)
        draft_s = time.perf_counter() - began
        if int(tree.count) < 2:
            # Nothing to verify: a plain token is cheaper.
            if growing.run + growing.branch >= 1:
                # Not even a certain token would be worth a run of the drafter.
                self.payoff.pause()
            return self._plain(row, cached)
        return self._verify(tree, min(most, int(tree.count)), draft_s, row)

    def _verify(self, tree: TokenTree, count: int, draft_s: float, row: BatchRow) -> DecodedRow:
        began = time.perf_counter()
        in_order = self.options.trees.pacer == "order"
        order = np.arange(int(tree.count)) if in_order else by_confidence(tree)
        # A tree that grew meanwhile may be deeper than the rest of the answer.
        order = order[np.asarray(tree.depths)[order] < row.limit]
        count = min(count, len(order))
        # The size of the tree to verify, among those with buckets.
        nodes = min(each for each in self.options.trees.nodes if each >= count)
        if self.options.trees.trimmed:
            confidences = np.asarray(tree.confidences)[order[:count]]
            nodes = verified_nodes(confidences, self._times(), self.payoff.rate)
        chosen = np.sort(order[: min(count, nodes)])
        part = some_nodes(tree, chosen, nodes)
        verdict, cache, sampler = self.runner.verify(part, row.cache, row.sampler, row.limit, self._meanwhile)
        verify_s = time.perf_counter() - began
        if verdict.tokens[-1] == NO_TOKEN:
            # The answer ends here with an error: nothing is learned from it.
            return DecodedRow(verdict.tokens.tolist(), cache, sampler)
        self.drafter.follow(chosen[verdict.path].tolist(), int(verdict.tokens[-1]))
        if (drafted := int(tree.count)) > 1:
            # How much of a branch's confidence its new nodes have, of the tree as it was drafted.
            confidences = np.asarray(tree.confidences)[:drafted]
            grown_from = float(confidences[np.unique(np.asarray(tree.parents)[1:drafted])].sum())
            yields = float(confidences[1:].sum()) / max(grown_from, 1e-9)
            self._yields = max(0.1, running_mean(self._yields, yields))
        self._learn(part, verdict, row.limit, draft_s, verify_s)
        return DecodedRow(verdict.tokens.tolist(), cache, sampler, len(verdict.tokens) - 1)

    def _growing(self, most: int, row: BatchRow) -> Growing:
        """End rule of the next draft."""
        stops = tuple(each for each in row.stop_ids.tolist() if each >= 0)
        # The target adds a token of its own.
        growing = Growing(
            self._fallback.alpha, most, float(row.sampler.temperature), depth=row.limit - 1, stop_ids=stops
        )
        if self.options.fallback != "measured":
            return growing
        tips, yields = self.options.trees.tips, self._yields or 1.0
        return worthwhile(growing, self._times(), self.payoff.rate, tips=tips, yields=yields)

    def _times(self) -> PassTimes:
        times = self.drafter.times
        verify_s = {nodes: self._verify_cost.seconds(nodes) for nodes in self.options.trees.nodes}
        free_s = self.runner.idle_read_s if self.options.pipelined else 0.0
        return PassTimes(run_s=times.run_s, branch_s=times.branch_s, verify_s=verify_s, free_s=free_s)

    def _plain(self, row: BatchRow, cached: Sequence[int], limit: int = 1) -> DecodedRow:
        began = time.perf_counter()
        found = super().decode(dataclasses.replace(row, limit=limit), cached)
        count = len(found.tokens)
        self.payoff.plain(took_ms=1000 * (time.perf_counter() - began), tokens=count)
        self.counts.plain_tokens += count
        return found

    def _meanwhile(self, busy_s: float) -> bool:
        """Runs one step of the drafter, if it ends before the target continues."""
        began = time.perf_counter()
        if not self.options.pipelined or busy_s < self.drafter.times.step_s or not self.drafter.step():
            return False
        self.counts.hidden_steps += 1
        self.counts.hidden_s += time.perf_counter() - began
        return True

    def _learn(self, tree: TokenTree, verdict: Verdict, limit: int, draft_s: float, verify_s: float) -> None:
        counts, tokens = self.counts, len(verdict.tokens)
        counts.verifications += 1
        counts.nodes += int(tree.count) - 1
        counts.accepted += tokens - 1
        counts.tokens += tokens
        counts.draft_s += draft_s
        counts.verify_s += verify_s
        # A bucket's first run sets its kernels up, so it is not representative.
        if tree.room in self._verified:
            self._verify_cost.measured(tree.room, verify_s)
            self.payoff.drafted(draft_ms=1000 * draft_s, verify_ms=1000 * verify_s, tokens=tokens)
        self._verified.add(tree.room)
        if self.options.fallback == "learned":
            drafted = matching_tokens(tree, int(verdict.path[-1]))
            # Where the limit cut the answer, the number of right tokens is not known.
            if drafted and tokens < limit:
                self._fallback = self._fallback.after(
                    drafted=drafted, correct=tokens - 1, confidence=open_confidence(tree)
                )


class SourcedSpeculation(Decoding):
    """Decodes with drafts the answer to one source (see `Speculation`), which the drafter reads, too."""

    one_pass = True

    def __init__(self, speculation: Speculation, source: tuple[int, ...]) -> None:
        super().__init__(speculation.runner)
        self._speculation, self._source = speculation, source
        self.cache_tokens, self.limit = speculation.cache_tokens, speculation.limit

    def decode(self, row: BatchRow, cached: Sequence[int]) -> DecodedRow:
        """See `Speculation`; answers to other sources may come in between."""
        self._speculation.drafter.read(self._source)
        return self._speculation.decode(row, cached)
