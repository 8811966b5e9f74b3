"""The bucket of batched decoding."""

import dataclasses
from typing import Any

import jax

from jaxllm.models.parameters import Params
from jaxllm.sampling import Progress, SamplerState
from jaxllm.serving.buckets.bucket import Bucket, ModelShapes, ids
from jaxllm.serving.ground.text_stream import MAX_STOP_IDS
from jaxllm.steps.batch import Caches, RowLimits, can_mix_levels, decode_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchBucket(Bucket):
    """Decodes tokens of several sequences in one dispatch (see `steps.batch.decode_rows`).

    Attributes:
      rows: maximum number of sequences; fewer are padded.
      block_tokens: maximum number of tokens per sequence and dispatch.
      cache_tokens: length of their caches.
    """

    rows: int
    block_tokens: int
    cache_tokens: int

    def lower(self, model: ModelShapes, /) -> jax.stages.Lowered:
        """(params, tokens, caches, samplers' fixed parts, their progress, limits) -> tokens, counts, caches,
        progress."""

        def step(
            params: Params,
            tokens: jax.Array,
            caches: Caches,
            fixed: tuple[SamplerState, ...],
            progress: tuple[Progress, ...],
            limits: RowLimits,
            **static: Any,
        ) -> tuple[jax.Array, jax.Array, Caches, tuple[Progress, ...]]:
            samplers = tuple(own.after(each) for own, each in zip(fixed, progress, strict=True))
            block = self.block_tokens
            found = decode_rows(params, tokens, caches, samplers, limits, block=block, **static)
            drawn, counts, caches, samplers = found
            return drawn, counts, caches, tuple(each.progress for each in samplers)

        caches, state = (model.cache(self.cache_tokens),) * self.rows, model.sampler
        stop_ids: Any = ids(self.rows, MAX_STOP_IDS)
        most: Any = ids(self.rows)
        units: Any = ids(self.rows, model.cfg.layers, 2) if can_mix_levels(model.params) else None
        return model.jitted(step, 2, 4).lower(
            model.params,
            ids(self.rows),
            caches,
            (state.fixed,) * self.rows,
            (state.progress,) * self.rows,
            RowLimits(stop_ids, most, units),
        )
