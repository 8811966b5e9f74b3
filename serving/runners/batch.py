"""Decodes several answers of one model in one dispatch."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxllm.kv.cache import KVCache
from jaxllm.sampling import Sampling, sampler_state
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.model import BatchBucket
from jaxllm.serving.ground.text_stream import MAX_STOP_IDS
from jaxllm.serving.runners.level_runner import LevelRunner
from jaxllm.serving.runners.runner import BatchRow, DecodedRow
from jaxllm.steps.batch import RowLimits, can_decode_rows, can_mix_levels


class Batch:
    """Decodes answers of a runner in one dispatch, which reads the weights once for all of them; also with
    those of the model's other levels, unless a level has adapters of its own.

    Attributes:
      family: runners of the same family can share a batch, decoded by any of them: levels that share
        weights, else one level.
      units: numbers of units of its level (see `BatchRow`).
    """

    def __init__(self, runner: LevelRunner) -> None:
        self._runner, cfg = runner, runner.cfg
        mixes = can_mix_levels(runner.params)
        sizes = [cfg.units(layer) for layer in range(cfg.layers)]
        counts = np.array([(each.kv_heads, each.neurons) for each in sizes], np.int32)
        self.units = counts if mixes else None
        self.family: object = runner.buckets if mixes else runner
        # Of the last dispatch's padding rows, which never change them.
        self._padding: list[KVCache] = []
        self._idle_sampler = sampler_state(Sampling(), [], cfg.vocab_size, 0)

    @classmethod
    def of(cls, runner: LevelRunner) -> "Batch | None":
        """The batch of a runner; None if batched answers would not be bitwise equal to unbatched ones (see
        `can_decode_rows`), and for models with state or mixed layers."""
        options, params, cfg = runner.options, runner.params, runner.cfg
        if cfg.states is not None or cfg.mixed is not None:
            return None
        return cls(runner) if can_decode_rows(params, jnp.dtype(options.cache_dtype)) else None

    def buckets(self) -> list[Bucket]:
        """The buckets of batches, of any number of rows and cache length. If memory is spared, they are
        loaded when so many answers first run (see `sizes`)."""
        options = self._runner.options
        return [self._bucket(rows, cache) for cache in options.cache_tokens for rows in options.batch_rows]

    def decode_batch(self, rows: Sequence[BatchRow]) -> list[DecodedRow]:
        """Decodes up to each row's limit in one dispatch, or in several if no bucket has enough rows; returns
        results in the order of `rows`. Their caches and samplers are donated. Caches of different lengths
        first become as long as the longest."""
        if not rows:
            return []
        capacity, sizes = _capacity(rows), self.sizes(rows)
        groups = [rows[first : first + sizes[-1]] for first in range(0, len(rows), sizes[-1])]
        return [found for group in groups for found in self._dispatch(group, sizes, capacity)]

    def sizes(self, rows: Sequence[BatchRow]) -> Sequence[int]:
        """The numbers of rows with buckets for a batch, ascending. Where they are loaded when first used,
        this begins to load the best one; smaller ones serve until it is ready, and at first none."""
        runner = self._runner
        sizes = runner.options.batch_rows
        if runner.options.spare_memory:
            capacity = _capacity(rows)
            best = next((each for each in sizes if each >= len(rows)), sizes[-1])
            if len(rows) > 1:
                runner.buckets.begin_loading(self._bucket(best, capacity))
            sizes = [each for each in sizes if runner.buckets.is_ready(self._bucket(each, capacity))]
        return sizes

    def rehearse(self) -> None:
        """Runs each bucket once (see `LevelRunner.rehearse`)."""
        runner = self._runner
        for capacity in runner.options.cache_tokens:
            for rows in runner.options.batch_rows:
                if self._bucket(rows, capacity) in runner.buckets:
                    caches = [runner.empty_cache(capacity) for _ in range(rows)]
                    self._dispatch([self._idle_row(each, limit=1) for each in caches], (rows,), capacity)

    def _dispatch(self, rows: Sequence[BatchRow], sizes: Sequence[int], capacity: int) -> list[DecodedRow]:
        runner = self._runner
        size = next(each for each in sizes if each >= len(rows))
        compiled = runner.buckets.get(self._bucket(size, capacity))
        # Reuses the padding of the last dispatch; none is left after a failure.
        there, self._padding = self._padding, []
        padding = [each for each in there if each.capacity_tokens == capacity][: size - len(rows)]
        padding += [runner.empty_cache(capacity) for _ in range(size - len(rows) - len(padding))]
        filled = [*rows, *(self._idle_row(each, limit=0) for each in padding)]
        units = None
        if self.units is not None:
            units = np.stack([self.units if row.units is None else row.units for row in filled])
        stop_ids = np.stack([row.stop_ids for row in filled])
        limits = RowLimits(stop_ids, np.array([row.limit for row in filled], np.int32), units)
        tokens, counts, caches, progress = compiled(
            runner.params,
            np.array([int(np.asarray(row.token)[0]) for row in filled], np.int32),
            tuple(runner.make_room(row.cache, capacity) for row in filled),
            tuple(row.sampler.fixed for row in filled),
            tuple(row.sampler.progress for row in filled),
            limits,
        )
        # Both transfers wait for the device.
        sampled, taken = np.asarray(tokens), np.asarray(counts)
        self._padding = list(caches[len(rows) :])
        return [
            DecodedRow(sampled[at, : taken[at]].tolist(), caches[at], row.sampler.after(progress[at]))
            for at, row in enumerate(rows)
        ]

    def _bucket(self, rows: int, cache: int) -> BatchBucket:
        block = self._runner.options.decode_block
        return self._runner.model.bucket(BatchBucket, rows=rows, block_tokens=block, cache_tokens=cache)

    def _idle_row(self, cache: KVCache, *, limit: int) -> BatchRow:
        return BatchRow(
            token=np.zeros(1, np.int32),
            cache=cache,
            sampler=self._idle_sampler,
            stop_ids=np.full(MAX_STOP_IDS, -1, np.int32),
            limit=limit,
        )


def _capacity(rows: Sequence[BatchRow]) -> int:
    return max(row.cache.capacity_tokens for row in rows)
