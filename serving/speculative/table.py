"""Decoding with drafts: the same calls as a target's own table, and the same tokens, in fewer passes.

A round is one tree: the drafter grows it, the target reads it at once, what is accepted goes into both
caches. A sequence is what it would be without: `jaxllm.speculative.acceptance.choices` draws each token as
plain decoding would.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.config import Bucket, ModelConfig
from jaxllm.kv.cache import KVCache
from jaxllm.sampling import SamplerState
from jaxllm.speculative.fallback import LEAST, MOST, START, Fallback
from jaxllm.speculative.tree import TokenTree
from serving.buckets import BucketTable
from serving.options import EngineOptions
from serving.progress import Progress
from serving.speculative.drafters import Drafter
from serving.speculative.host_tree import by_confidence, open_confidence, some_nodes
from serving.speculative.options import SpeculationOptions
from serving.speculative.thrift import Thrift, running_mean
from serving.streaming.table import StreamedTable


@dataclasses.dataclass
class SpeculationCounts:
    """What speculation has done.

    Attributes:
      rounds: trees that the target has read.
      nodes: drafted tokens that it has read.
      accepted: of those the ones that were right.
      tokens: that rounds gave, the target's own among them.
      plain_tokens: that came without drafts.
      draft_s: time spent drafting before verifications.
      verify_s: time spent verifying.
      hidden_steps: readings of the drafter while the target waited for weights.
    """

    rounds: int = 0
    nodes: int = 0
    accepted: int = 0
    tokens: int = 0
    plain_tokens: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    hidden_steps: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a round."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def useful_share(self) -> float:
        """Of drafted tokens that were read, the share that was right."""
        return self.accepted / self.nodes if self.nodes else 0.0


class SpeculativeTable:
    """A target with a drafter (see `BucketTable`, whose calls these are).

    Attributes:
      target: whose tokens come out.
      counts: see `SpeculationCounts`.
    """

    def __init__(
        self, target: BucketTable | StreamedTable, drafter: Drafter, options: SpeculationOptions
    ) -> None:
        self.target, self.counts = target, SpeculationCounts()
        self._drafter, self._options = drafter, options
        self._fallback, self._thrift = Fallback(options.alpha), Thrift()
        # What verifying takes, by size.
        self._verify_s: dict[int, float] = {}

    @property
    def cfg(self) -> ModelConfig:
        """The target."""
        return self.target.cfg

    @property
    def options(self) -> EngineOptions:
        """The target's."""
        return self.target.options

    @property
    def weights_version(self) -> tuple[int, int]:
        """The target's."""
        return self.target.weights_version

    def fill(self, progress: Progress | None = None, *, tokens: int | None = None) -> None:
        """Compiles all that rounds take, the target's own graphs left aside; with `tokens` what a request of
        so many takes, the answer's among them."""
        buckets = [
            bucket for nodes in self._options.trees.nodes for bucket in self.target.tree_buckets(nodes)
        ]
        if tokens is not None:
            buckets = self.target.of_cache(buckets, self.target.cache_for(self._with_tree(tokens)))
        self.target.fill(buckets, progress)
        self._drafter.warm_up(progress, tokens=tokens)

    def request_buckets(self, prompt_tokens: int, max_tokens: int) -> list[Bucket]:
        """The target's own graphs for one request (see `BucketPlan.request_buckets`)."""
        return self.target.request_buckets(prompt_tokens, self._with_tree(max_tokens))

    # -- calls of a table ------------------------------------------------------------------------

    def start(self, tokens: int) -> KVCache:
        """An empty cache with room for `tokens` positions, and for a tree where there is any."""
        return self.target.start(self._with_tree(tokens))

    def make_room(self, cache: KVCache, tokens: int) -> KVCache:
        """The cache, or a longer one (see `GraphTable.make_room`)."""
        return self.target.make_room(cache, self._with_tree(tokens))

    def prefill(self, cache: KVCache, tokens: Sequence[int], at: int) -> tuple[Any, KVCache]:
        """Feeds `tokens` at position `at`: logits `[1, V]` after the last, cache."""
        return self.target.prefill(cache, tokens, at)

    def sample(self, logits: jax.Array | np.ndarray, sampler: SamplerState) -> tuple[jax.Array, SamplerState]:
        """The first token `[1]` of an answer, and the sampler."""
        return self.target.sample(logits, sampler)

    def decode_limit(self, pace: int, remaining: int) -> int:
        """How many tokens `decode` should be asked for, where `remaining` are wanted: a round is not to be
        cut short."""
        del pace
        return min(remaining, self._options.trees.nodes[-1])

    def decode(
        self,
        token: jax.Array | np.ndarray,
        cache: KVCache,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
        held: Sequence[int] = (),
    ) -> tuple[np.ndarray, int, KVCache, SamplerState]:
        """One round: up to `limit` further tokens `[1, count]` behind those `held` that the cache has and
        `token`, their count, cache, sampler."""
        root = int(np.asarray(token)[0])
        cache = dataclasses.replace(cache, length=np.int32(len(held)))  # pyright: ignore
        room = min(cache.capacity_tokens - len(held), self._options.trees.nodes[-1])
        if limit < 2 or room < self._options.trees.nodes[0] or not self._worthwhile:
            return self._plain(root, cache, sampler, stop_ids)
        began = time.perf_counter()
        # Whatever is drafted, the root is read.
        self.target.expect(np.array([root]))
        most = max(each for each in self._options.trees.nodes if each <= room)
        tree = self._drafter.grow(held, root, self._fallback.alpha, most)
        draft_s = time.perf_counter() - began
        if int(tree.count) < 2:
            # Nothing to check: a plain token is cheaper.
            return self._plain(root, cache, sampler, stop_ids)
        return self._round(tree, min(most, int(tree.count)), draft_s, cache, sampler, limit)

    # -- rounds ----------------------------------------------------------------------------------

    @property
    def _worthwhile(self) -> bool:
        return not self._options.thrifty or self._thrift.worthwhile

    def _round(
        self,
        tree: TokenTree,
        count: int,
        draft_s: float,
        cache: KVCache,
        sampler: SamplerState,
        limit: int,
    ) -> tuple[np.ndarray, int, KVCache, SamplerState]:
        began = time.perf_counter()
        order = by_confidence(tree) if self._options.trees.paced else np.arange(int(tree.count))
        nodes = self._size(np.asarray(tree.confidences)[order[:count]], draft_s)
        chosen = np.sort(order[: min(count, nodes)])
        part = some_nodes(tree, chosen, nodes)
        verdict, cache, sampler = self.target.verify(part, cache, sampler, limit, self._meanwhile)
        verify_s = time.perf_counter() - began
        self._verify_s[nodes] = running_mean(self._verify_s.get(nodes), verify_s)
        self._drafter.follow(chosen[verdict.path].tolist(), int(verdict.tokens[-1]))
        self._learn(part, len(verdict.tokens), draft_s, verify_s)
        return verdict.tokens[None], len(verdict.tokens), cache, sampler

    def _size(self, confidences: np.ndarray, draft_s: float) -> int:
        """With how much of a tree tokens come fastest, of the sizes that there are graphs for.

        The nodes that are read, in their order, promise as many tokens as their `confidences` add up to, the
        root's standing for the target's own. What a size takes that was never tried is taken to be what a
        smaller one takes.
        """
        promised, count = np.cumsum(confidences), len(confidences)
        best, chosen, takes_s = 0.0, self._options.trees.nodes[0], 0.0
        for nodes in self._options.trees.nodes:
            takes_s = max(takes_s, self._verify_s.get(nodes, 0.0))
            rate = promised[min(count, nodes) - 1] / max(draft_s + takes_s, 1e-9)
            if rate > best:
                best, chosen = rate, nodes
            if nodes >= count:
                break
        return chosen

    def _plain(
        self, root: int, cache: KVCache, sampler: SamplerState, stop_ids: np.ndarray
    ) -> tuple[np.ndarray, int, KVCache, SamplerState]:
        began = time.perf_counter()
        token = np.array([root], np.int32)
        rows, _, cache, sampler = self.target.decode(token, cache, sampler, stop_ids, 1)  # pyright: ignore
        rows = np.asarray(rows)[:, :1]
        self._thrift.plain(took_ms=1000 * (time.perf_counter() - began), tokens=1)
        self.counts.plain_tokens += 1
        return rows, 1, cache, sampler

    def _meanwhile(self, wait_s: float) -> bool:
        """One step of the drafter, if it ends before the target goes on."""
        if not self._options.pipelined or wait_s < self._drafter.step_s or not self._drafter.step():
            return False
        self.counts.hidden_steps += 1
        return True

    def _learn(self, tree: TokenTree, tokens: int, draft_s: float, verify_s: float) -> None:
        counts, drafted = self.counts, int(np.max(tree.depths))
        counts.rounds += 1
        counts.nodes += int(tree.count) - 1
        counts.accepted += tokens - 1
        counts.tokens += tokens
        counts.draft_s += draft_s
        counts.verify_s += verify_s
        self._thrift.drafted(draft_ms=1000 * draft_s, verify_ms=1000 * verify_s, tokens=tokens)
        if self._options.fallback == "learned" and drafted:
            correct = min(tokens - 1, drafted)
            self._fallback = self._fallback.after(
                drafted=drafted, correct=correct, confidence=open_confidence(tree)
            )
        elif self._options.fallback == "measured":
            # What a reading brings is at most the confidences of the paths that it goes on, in tokens.
            alpha = 1000 * self._drafter.step_s / self._thrift.token_ms / self._options.trees.tips
            # While weights are read ahead, drafting costs less than its own time.
            most = START if isinstance(self.target, StreamedTable) else MOST
            self._fallback = Fallback(min(most, max(LEAST, alpha)))

    def _with_tree(self, tokens: int) -> int:
        """Positions for `tokens` and a tree behind them, as far as the context reaches."""
        return max(tokens, min(tokens + self._options.trees.nodes[-1], self.options.context_tokens))
