"""Decoding with drafts: the same calls as a target's own, and the same tokens, in fewer passes.

A round is one tree: the drafter grows it, the target reads it at once, what is accepted goes into both
caches. A sequence is what it would be without: `jaxllm.speculative.acceptance.choices` draws each token as
plain decoding would. Targets may be tables of graphs or exported programs: nothing here knows a model.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import jax
import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.sampling import NO_TOKEN, SamplerState
from jaxllm.speculative.fallback import LEAST, MOST, START, Fallback
from jaxllm.speculative.tree import TokenTree
from serving.generation import Decoder, Window
from serving.speculative.drafter import Drafter
from serving.speculative.host_tree import by_confidence, matching_tokens, open_confidence, some_nodes
from serving.speculative.lookup_drafter import LookupDrafter
from serving.speculative.options import SpeculationOptions
from serving.speculative.thrift import Thrift
from serving.speculative.verdict import Verdict
from serving.speculative.verify_cost import VerifyCost


class Target(Decoder, Protocol):
    """What a drafter works for: a decoder that also reads trees. Its caches have a `length`, and room for
    `capacity_tokens`."""

    @property
    def streams_layers(self) -> bool:
        """Whether layers come from storage while a tree is read, so that drafting meanwhile is free."""
        ...

    def expect(self, tokens: np.ndarray) -> None:
        """Says what will be read next (see `GraphTable.expect`)."""
        ...

    def verify(
        self,
        tree: TokenTree,
        cache: Any,
        sampler: SamplerState,
        limit: int,
        meanwhile: Callable[[float], bool] | None = None,
    ) -> tuple[Verdict, Any, SamplerState]:
        """What the model says of a token tree behind the sequence in the cache (see `BucketTable.verify`)."""
        ...


AnyTarget = TypeVar("AnyTarget", bound=Target)


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


class Rounds(Generic[AnyTarget]):
    """A target with a drafter, whose calls are a `Decoder`'s.

    Attributes:
      target: whose tokens come out.
      counts: see `SpeculationCounts`.
    """

    def __init__(self, target: AnyTarget, drafter: Drafter, options: SpeculationOptions) -> None:
        self.target, self.counts = target, SpeculationCounts()
        looked_up = options.lookup and options.drafter != "ngram"
        self._drafter = LookupDrafter(drafter, options.trees) if looked_up else drafter
        self._options = options
        self._fallback, self._thrift = Fallback(options.alpha), Thrift()
        self._verify_cost = VerifyCost(options.trees.nodes[-1])

    @property
    def lock(self) -> threading.RLock:
        """The target's, under which the drafter is run, too."""
        return self.target.lock

    @property
    def cfg(self) -> ModelConfig:
        """The target."""
        return self.target.cfg

    @property
    def options(self) -> Window:
        """The target's."""
        return self.target.options

    @property
    def weights_version(self) -> tuple[int, int]:
        """The target's."""
        return self.target.weights_version

    def require_usable(self) -> None:
        """The target's. What a drafter says wrongly, the target refuses."""
        self.target.require_usable()

    # -- calls of a decoder ----------------------------------------------------------------------

    def start(self, tokens: int) -> Any:
        """An empty cache with room for `tokens` positions, and for a tree where there is any."""
        return self.target.start(self.with_tree(tokens))

    def make_room(self, cache: Any, tokens: int) -> Any:
        """The cache, or a longer one (see `GraphTable.make_room`)."""
        return self.target.make_room(cache, self.with_tree(tokens))

    def prefill(self, cache: Any, tokens: Sequence[int], at: int) -> tuple[Any, Any]:
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
        cache: Any,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
        held: Sequence[int] = (),
    ) -> tuple[np.ndarray, int, Any, SamplerState]:
        """One round, or plain tokens where no draft pays: up to `limit` further tokens `[1, count]` behind
        those `held` that the cache has and `token`, their count, cache, sampler."""
        root = int(np.asarray(token)[0])
        cache = dataclasses.replace(cache, length=np.int32(len(held)))
        room = min(cache.capacity_tokens - len(held), self._options.trees.nodes[-1])
        if not self._worthwhile:
            # As many as a dispatch may have while drafting pauses.
            most = min(limit, self._thrift.paused_tokens)
            most = self.target.decode_limit(self._thrift.pace, most)
            return self._plain(root, cache, sampler, stop_ids, held, most)
        if limit < 2 or room < self._options.trees.nodes[0]:
            return self._plain(root, cache, sampler, stop_ids, held)
        began = time.perf_counter()
        # Whatever is drafted, the root is read.
        self.target.expect(np.array([root]))
        most = max(each for each in self._options.trees.nodes if each <= room)
        tree = self._drafter.grow(held, root, self._fallback.alpha, most)
        draft_s = time.perf_counter() - began
        if int(tree.count) < 2:
            # Nothing to check: a plain token is cheaper.
            return self._plain(root, cache, sampler, stop_ids, held)
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
        cache: Any,
        sampler: SamplerState,
        limit: int,
    ) -> tuple[np.ndarray, int, Any, SamplerState]:
        began = time.perf_counter()
        order = by_confidence(tree) if self._options.trees.paced else np.arange(int(tree.count))
        nodes = self._size(np.asarray(tree.confidences)[order[:count]], draft_s)
        chosen = np.sort(order[: min(count, nodes)])
        part = some_nodes(tree, chosen, nodes)
        verdict, cache, sampler = self.target.verify(part, cache, sampler, limit, self._meanwhile)
        verify_s = time.perf_counter() - began
        if verdict.tokens[-1] == NO_TOKEN:
            # The answer ends here, and nobody learns of it.
            return verdict.tokens[None], len(verdict.tokens), cache, sampler
        self._verify_cost.measured(nodes, verify_s)
        self._drafter.follow(chosen[verdict.path].tolist(), int(verdict.tokens[-1]))
        self._learn(part, verdict, limit, draft_s, verify_s)
        return verdict.tokens[None], len(verdict.tokens), cache, sampler

    def _size(self, confidences: np.ndarray, draft_s: float) -> int:
        """With how much of a tree tokens come fastest, of the sizes that there are graphs for.

        The nodes that are read, in their order, promise as many tokens as their `confidences` add up to, the
        root's standing for the target's own.
        """
        promised, count = np.cumsum(confidences), len(confidences)
        best, chosen = 0.0, self._options.trees.nodes[0]
        for nodes in self._options.trees.nodes:
            takes_s = draft_s + self._verify_cost.seconds(nodes)
            rate = promised[min(count, nodes) - 1] / max(takes_s, 1e-9)
            if rate > best:
                best, chosen = rate, nodes
            if nodes >= count:
                break
        return chosen

    def _plain(
        self,
        root: int,
        cache: Any,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        held: Sequence[int],
        limit: int = 1,
    ) -> tuple[np.ndarray, int, Any, SamplerState]:
        began = time.perf_counter()
        token = np.array([root], np.int32)
        rows, count, cache, sampler = self.target.decode(token, cache, sampler, stop_ids, limit, held)
        tokens = int(count)
        rows = np.asarray(rows)[:, :tokens]
        self._thrift.plain(took_ms=1000 * (time.perf_counter() - began), tokens=tokens)
        self.counts.plain_tokens += tokens
        return rows, tokens, cache, sampler

    def _meanwhile(self, wait_s: float) -> bool:
        """One step of the drafter, if it ends before the target goes on."""
        if not self._options.pipelined or wait_s < self._drafter.step_s or not self._drafter.step():
            return False
        self.counts.hidden_steps += 1
        return True

    def _learn(self, tree: TokenTree, verdict: Verdict, limit: int, draft_s: float, verify_s: float) -> None:
        counts, tokens = self.counts, len(verdict.tokens)
        counts.rounds += 1
        counts.nodes += int(tree.count) - 1
        counts.accepted += tokens - 1
        counts.tokens += tokens
        counts.draft_s += draft_s
        counts.verify_s += verify_s
        self._thrift.drafted(draft_ms=1000 * draft_s, verify_ms=1000 * verify_s, tokens=tokens)
        if self._options.fallback == "learned":
            drafted = matching_tokens(tree, int(verdict.path[-1]))
            # Where the answer was full, nobody knows what else was right.
            if drafted and tokens < limit:
                self._fallback = self._fallback.after(
                    drafted=drafted, correct=tokens - 1, confidence=open_confidence(tree)
                )
        elif self._options.fallback == "measured":
            # What a reading brings is at most the confidences of the paths that it goes on, in tokens.
            alpha = 1000 * self._drafter.step_s / self._thrift.token_ms / self._options.trees.tips
            # While weights are read ahead, drafting costs less than its own time.
            most = START if self.target.streams_layers else MOST
            self._fallback = Fallback(min(most, max(LEAST, alpha)))

    def with_tree(self, tokens: int) -> int:
        """Positions for `tokens` and a tree behind them, as far as the context reaches."""
        return max(tokens, min(tokens + self._options.trees.nodes[-1], self.options.context_tokens))
