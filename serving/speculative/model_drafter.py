"""Drafting with a model that fits into memory."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.kv.cache import KVCache
from jaxllm.speculative.tree import TokenTree
from serving.buckets import BucketTable
from serving.engine import Engine
from serving.generation import common_prefix
from serving.models import open_model
from serving.progress import Progress
from serving.speculative.host_tree import on_host, root_alone
from serving.speculative.options import SpeculationOptions, TreeShape
from serving.speculative.thrift import running_mean
from serving.streaming.footprint import draft_options

# While the target waits, drafting never ends for lack of confidence: what would be done instead is nothing.
_ANY_CONFIDENCE = np.float32(1e-30)


def model_drafter(
    target: Engine, options: SpeculationOptions, progress: Progress | None = None
) -> "ModelDrafter":
    """A drafter with a model of the target's tokenizer.

    Raises:
      ConfigError: its tokenizer is another.
      CheckpointError: it cannot be opened.
    """
    bundle = open_model(options.model)
    wanted = draft_options(bundle.cfg, options, target.options.context_tokens)
    wanted = dataclasses.replace(wanted, executables_bytes=target.options.executables_bytes)
    engine = Engine(bundle, wanted, progress)
    if not engine.tokenizer.same_tokens(target.tokenizer):
        raise ConfigError(
            f"{engine.bundle.path} has another tokenizer than {target.bundle.path}: a draft must speak the "
            "target's tokens; train one on the target's tokenizer (jaxllm pretrain --tokenizer)"
        )
    assert isinstance(engine.table, BucketTable)
    return ModelDrafter(engine.table, options.trees)


class ModelDrafter:
    """Grows trees with a model whose weights are in memory (see `Drafter`).

    Attributes:
      step_s: a running mean.
      steps: how often the model was run.
    """

    def __init__(self, table: BucketTable, shape: TreeShape) -> None:
        self.step_s, self.steps = 0.0, 0
        self._table, self._shape = table, shape
        # The tokens whose rows are in the cache, and the tree behind them.
        self._held: list[int] = []
        self._cache: KVCache | None = None
        self._version = table.weights_version
        self._tree: TokenTree | None = None
        self._fed: jax.Array | np.ndarray | None = None

    def warm_up(self, progress: Progress | None = None, *, tokens: int | None = None) -> None:
        """See `Drafter`. All is run once."""
        buckets = [*self._table.all_buckets(), *self._table.draft_buckets()]
        caches = self._table.options.cache_tokens
        if tokens is not None:
            caches = (self._table.cache_for(tokens + 1 + self._shape.room),)
            buckets = self._table.of_cache(buckets, *caches)
        self._table.fill(buckets, progress)
        for capacity in caches:
            if capacity > self._shape.room:
                self._forget()
                self._cache = self._table.start(capacity)
                self.grow([0], 0, float(_ANY_CONFIDENCE), 2)
                self.step()
                self.follow([0], 0)
        self._forget()
        self.step_s, self.steps = 0.0, 0

    def grow(self, sequence: Sequence[int], root: int, alpha: float, most: int) -> TokenTree:
        """See `Drafter`."""
        if len(sequence) + 1 + self._shape.room > self._table.options.context_tokens:
            self._tree = None
            return root_alone(root, self._shape.room)
        self._catch_up(sequence)
        if self._tree is None or int(np.asarray(self._tree.tokens)[0]) != root:
            self._tree = root_alone(root, self._shape.room)
            self._fed = np.zeros(self._shape.room, bool)
        self._run(np.float32(alpha), most, self._shape.room)
        return on_host(self._tree)

    def step(self) -> bool:
        """See `Drafter`."""
        if self._tree is None or int(self._tree.count) >= self._shape.room:
            return False
        return self._run(_ANY_CONFIDENCE, self._shape.room, 1) > 0

    def follow(self, path: Sequence[int], token: int) -> None:
        """See `Drafter`."""
        if self._tree is None or self._cache is None:
            return
        tokens = np.asarray(self._tree.tokens)
        nodes = np.full(self._shape.room, path[-1], np.int32)
        nodes[: len(path)] = path
        graph = self._table.graph(self._table.follow_bucket(self._cache.capacity_tokens))
        cache, self._cache = self._cache, None
        self._cache, self._tree, self._fed, missing = graph(
            cache, self._tree, self._fed, nodes, np.int32(len(path)), np.int32(token)
        )
        self._held += [int(tokens[node]) for node in path[: len(path) - int(missing)]]

    def _run(self, alpha: np.float32, most: int, limit: int) -> int:
        """Grows the tree by up to `limit` readings; returns how many there were."""
        began = time.perf_counter()
        cache, self._cache = self._cache, None
        assert cache is not None
        graph = self._table.graph(self._table.draft_bucket(cache.capacity_tokens))
        self._tree, self._fed, self._cache, done = graph(
            self._table.params, self._tree, self._fed, cache, alpha, np.int32(most), np.int32(limit)
        )
        count = int(done)
        if count:
            self.step_s = running_mean(self.step_s or None, (time.perf_counter() - began) / count)
            self.steps += count
        return count

    def _catch_up(self, sequence: Sequence[int]) -> None:
        """Brings the cache to just this sequence."""
        if self._version != self._table.weights_version:
            self._forget()
            self._version = self._table.weights_version
        common = common_prefix(self._held, sequence)
        if common == len(sequence) == len(self._held) and self._cache is not None:
            self._cache = self._table.make_room(self._cache, len(sequence) + 1 + self._shape.room)
            return
        self._tree = None
        cache, self._cache = self._cache, None
        if cache is None:
            cache, common = self._table.start(len(sequence) + 1 + self._shape.room), 0
        cache = self._table.make_room(cache, len(sequence) + 1 + self._shape.room)
        # Of a sequence that only became shorter the last token is fed again: its length is what changes.
        common = min(common, len(sequence) - 1)
        _, self._cache = self._table.prefill(cache, sequence[common:], common)
        self._held = list(sequence)

    def _forget(self) -> None:
        self._held, self._cache, self._tree = [], None, None
