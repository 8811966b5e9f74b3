"""Batched decoding of several answers over resident weights."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jaxllm.kv.cache import KVCache
from jaxllm.sampling import SamplerState, Sampling, sampler_state
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

    @classmethod
    def of(cls, runner: LevelRunner) -> "Batch | None":
        """The batch of a runner; None if the options disable it, if batched answers would not be bitwise
        equal to unbatched ones (see `can_decode_rows`), and for models with state or mixed layers."""
        options, params, cfg = runner.options, runner.params, runner.cfg
        exact = can_decode_rows(params, jnp.dtype(options.cache_dtype))
        exact = exact and cfg.states is None and cfg.mixed is None
        return cls(runner) if options.batch_rows and exact else None

    def all_buckets(self) -> list[Bucket]:
        """The buckets of batches, of any number of rows and cache length."""
        options = self._runner.options
        return [self._bucket(rows, cache) for cache in options.cache_tokens for rows in options.batch_rows]

    def decode_batch(self, rows: Sequence[BatchRow]) -> list[DecodedRow]:
        """Decodes up to each row's limit in one dispatch, or in several if no bucket has enough rows; returns
        results in the order of `rows`. Their caches and samplers are donated. Caches of different lengths
        first become as long as the longest."""
        most = self._runner.options.batch_rows[-1]
        groups = [rows[first : first + most] for first in range(0, len(rows), most)]
        return [found for group in groups for found in self._dispatch(group)]

    def rehearse(self) -> None:
        """Runs each bucket once (see `LevelRunner.rehearse`)."""
        runner = self._runner
        for capacity in runner.options.cache_tokens:
            for rows in runner.options.batch_rows:
                if self._bucket(rows, capacity) in runner.buckets:
                    caches = [runner.empty_cache(capacity) for _ in range(rows)]
                    self._dispatch([self._idle_row(each, limit=1) for each in caches])

    def _dispatch(self, rows: Sequence[BatchRow]) -> list[DecodedRow]:
        runner = self._runner
        size = next(each for each in runner.options.batch_rows if each >= len(rows))
        capacity = max(row.cache.capacity_tokens for row in rows)
        compiled = runner.buckets.get(self._bucket(size, capacity))
        padding = self._padding_caches(size - len(rows), capacity)
        filled = [*rows, *(self._idle_row(each, limit=0) for each in padding)]
        tokens, counts, caches, progress = compiled(
            runner.params,
            np.array([int(np.asarray(row.token)[0]) for row in filled], np.int32),
            tuple(runner.make_room(row.cache, capacity) for row in filled),
            tuple(row.sampler.fixed for row in filled),
            tuple(row.sampler.progress for row in filled),
            self._limits(filled),
        )
        # Both transfers wait for the device.
        drawn, taken = np.asarray(tokens), np.asarray(counts)
        self._padding = list(caches[len(rows) :])
        return [
            DecodedRow(drawn[at, : taken[at]].tolist(), caches[at], row.sampler.after(progress[at]))
            for at, row in enumerate(rows)
        ]

    def _limits(self, rows: Sequence[BatchRow]) -> RowLimits:
        units = None
        if self.units is not None:
            units = np.stack([self.units if row.units is None else row.units for row in rows])
        stop_ids = np.stack([row.stop_ids for row in rows])
        return RowLimits(stop_ids, np.array([row.limit for row in rows], np.int32), units)

    def _bucket(self, rows: int, cache: int) -> BatchBucket:
        block = self._runner.options.decode_block
        return self._runner.model.bucket(BatchBucket, rows=rows, block_tokens=block, cache_tokens=cache)

    def _padding_caches(self, count: int, capacity: int) -> list[KVCache]:
        """Caches for `count` padding rows. Reuses those of the last dispatch; none are left after a
        failure."""
        there, self._padding = self._padding, []
        found = [each for each in there if each.capacity_tokens == capacity][:count]
        return found + [self._runner.empty_cache(capacity) for _ in range(count - len(found))]

    def _idle_row(self, cache: KVCache, *, limit: int) -> BatchRow:
        """A row of no answer."""
        return BatchRow(
            token=np.zeros(1, np.int32),
            cache=cache,
            sampler=self._idle_sampler,
            stop_ids=np.full(MAX_STOP_IDS, -1, np.int32),
            limit=limit,
        )

    @functools.cached_property
    def _idle_sampler(self) -> SamplerState:
        return sampler_state(Sampling(), [], self._runner.cfg.vocab_size, 0)
