"""Runs a model whose weights are all resident."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxllm.kv.cache import KVCache, Past, TokenPositions
from jaxllm.kv.chunks import LayerChunks
from jaxllm.models.layer import InputRows
from jaxllm.sampling import SamplerState, Sampling, sampler_state
from jaxllm.serving.buckets.bucket import Bucket
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.cache import StartBucket
from jaxllm.serving.buckets.context import LastLogitsBucket, PrefillRestoredBucket, RestoreBucket
from jaxllm.serving.buckets.decode import DecodeBucket, SampleBucket
from jaxllm.serving.buckets.layer import EmbedBucket
from jaxllm.serving.buckets.parts import embedding_params, head_params, layer_params
from jaxllm.serving.buckets.prefill import PrefillBucket
from jaxllm.serving.ground.prompt_rows import PromptRows
from jaxllm.serving.ground.text_stream import MAX_STOP_IDS
from jaxllm.serving.runners.batch import Batch
from jaxllm.serving.runners.chunks import padded, plan_chunks
from jaxllm.serving.runners.level_runner import IntegerPrefill, LevelRunner
from jaxllm.serving.runners.runner import BatchRunner, PrefillChunk, PrefillMode, chunks_of
from jaxllm.serving.runners.verdict import Verdict
from jaxllm.serving.weights.model_level import ModelLevel
from jaxllm.steps.model import BlockEnd

# What not every model needs is imported where it is used, because a start waits for imports.
if TYPE_CHECKING:
    from jaxllm.serving.buckets.source import SourceBucket
    from jaxllm.serving.buckets.tree import VerifyBucket
    from jaxllm.speculation.tree import TokenTree


class ResidentRunner(LevelRunner):
    """Runs one level of a model with resident weights (see `Runner`), also as another model's drafter."""

    resident = True

    def __init__(
        self,
        model: ModelLevel,
        buckets: BucketTable,
        int8: IntegerPrefill | None = None,
        *,
        encodes: bool = True,
    ) -> None:
        """See the class and `LevelRunner`; `int8` prefills in integers. Without `encodes` it reads no
        sources, but has those of others in its caches."""
        super().__init__(model, buckets)
        self._sources: tuple[int, ...] = ()
        if encodes and model.cfg.encoder is not None:
            from jaxllm.serving.buckets.source import source_lengths

            self._sources = source_lengths(model.cfg, model.options)
        # Answers of an encoder-decoder are decoded one by one: their sources differ in length.
        self.int8, self._batch = int8, Batch.of(self) if model.cfg.encoder is None else None
        # The version of the weights in `_layers` and `_embedding`.
        self._sorted_version: tuple[int, int] | None = None

    # -- which buckets it needs -------------------------------------------------------------------

    def all_buckets(self) -> list[Bucket]:
        """See `LevelRunner`."""
        answering = self.answer_buckets(self.options.cache_tokens)
        together = [] if self._batch is None else self._batch.all_buckets()
        return [*answering, *together, *self.grow_buckets(), *self.context_buckets()]

    def context_buckets(self) -> list[Bucket]:
        """See `LevelRunner`."""
        buckets = super().context_buckets()
        for tokens in self.options.chunk_tokens if self.prefills_restored else ():
            buckets += [self.embed_bucket(tokens), LastLogitsBucket(tokens=tokens)]
            buckets += [
                self._restored_bucket(tokens, cache, layer)
                for cache in self.options.cache_tokens
                for layer in self.model.layer_kinds
            ]
        return list(dict.fromkeys(buckets))

    @property
    def prefills_restored(self) -> bool:
        """See `LevelRunner`."""
        return bool(self.options.kv_codec) and self.cfg.encoder is None and self.cfg.states is None

    def answer_buckets(self, caches: Sequence[int]) -> list[Bucket]:
        """The buckets of any request in caches of these lengths."""
        buckets: dict[Bucket, None] = {SampleBucket(): None}
        for cache in caches:
            buckets |= dict.fromkeys(self._source_bucket(each, cache) for each in self._sources)
            buckets[StartBucket(cache_tokens=cache, level=self.model.bucket_level)] = None
            buckets[self._decode_bucket(cache)] = None
            for chunk in self.options.chunk_tokens:
                if self.options.prompt_rows:
                    buckets[dataclasses.replace(self._prefill_bucket(chunk, cache), rows=True)] = None
                if self.int8 is None or self.int8.floats_too:
                    buckets[self._prefill_bucket(chunk, cache)] = None
                if self.int8 is not None:
                    buckets |= dict.fromkeys(self.int8.chunk_buckets(chunk, cache))
        return list(buckets)

    def request_buckets(self, prompt_tokens: int, max_tokens: int) -> list[Bucket]:
        """See `LevelRunner`."""
        cache = self.request_cache(prompt_tokens, max_tokens)
        lengths, prompt = self._sources, []
        if lengths:
            # The prompt is the source; of the decoder it is the start tokens.
            source = next(each for each in lengths if each >= min(prompt_tokens, lengths[-1]))
            prompt, prompt_tokens = [self._source_bucket(source, cache)], 1
        return [
            *prompt,
            *self._prompt_buckets(prompt_tokens, cache),
            SampleBucket(),
            StartBucket(cache_tokens=cache, level=self.model.bucket_level),
            *self.later_buckets(prompt_tokens, max_tokens),
        ]

    def later_buckets(self, prompt_tokens: int, max_tokens: int) -> list[Bucket]:
        """See `LevelRunner`: the decode bucket."""
        cache = self.request_cache(prompt_tokens, max_tokens)
        return [] if max_tokens == 1 else [self._decode_bucket(cache)]

    def _prompt_buckets(self, tokens: int, cache: int) -> list[Bucket]:
        chunks = dict.fromkeys(plan_chunks(tokens, self.options.chunk_tokens))
        rows = [dataclasses.replace(self._prefill_bucket(chunk, cache), rows=True) for chunk in chunks]
        rows = rows if self.options.prompt_rows else []
        if self.int8 is None or self.int8.mode(tokens) == "float":
            return [*rows, *(self._prefill_bucket(chunk, cache) for chunk in chunks)]
        return list(
            dict.fromkeys(
                [*rows, *(each for chunk in chunks for each in self.int8.chunk_buckets(chunk, cache))]
            )
        )

    def tree_buckets(self, nodes: int, caches: Sequence[int] | None = None) -> list[Bucket]:
        """See `LevelRunner`."""
        return [self._verify_bucket(nodes, cache) for cache in caches or self.options.cache_tokens]

    def embed_bucket(self, tokens: int) -> Bucket:
        """See `LevelRunner`."""
        return EmbedBucket(tokens=tokens, level=self.model.bucket_level)

    def restore_bucket(self, tokens: int, cache: int, layer: int) -> Bucket:
        """See `LevelRunner`."""
        model = self.model
        return RestoreBucket(
            tokens=tokens, cache_tokens=cache, layer=model.alike[layer], level=model.bucket_level
        )

    def _restored_bucket(self, tokens: int, cache: int, layer: int) -> Bucket:
        model = self.model
        return PrefillRestoredBucket(
            tokens=tokens, cache_tokens=cache, layer=model.alike[layer], level=model.bucket_level
        )

    def _source_bucket(self, tokens: int, cache: int) -> "SourceBucket":
        from jaxllm.serving.buckets.source import SourceBucket

        return SourceBucket(tokens=tokens, cache_tokens=cache, level=self.model.bucket_level)

    def _prefill_bucket(self, chunk: int, cache: int) -> PrefillBucket:
        return PrefillBucket(tokens=chunk, cache_tokens=cache, level=self.model.bucket_level)

    def _decode_bucket(self, cache: int) -> DecodeBucket:
        block, level = self.options.decode_block, self.model.bucket_level
        return DecodeBucket(block_tokens=block, cache_tokens=cache, level=level)

    def _verify_bucket(self, nodes: int, cache: int) -> "VerifyBucket":
        from jaxllm.serving.buckets.tree import VerifyBucket

        return VerifyBucket(nodes=nodes, cache_tokens=cache, level=self.model.bucket_level)

    # -- answering --------------------------------------------------------------------------------

    @property
    def batch(self) -> BatchRunner | None:
        """See `LevelRunner`, and `Batch.of`."""
        return self._batch

    def read_source(self, cache: KVCache, tokens: Sequence[int]) -> KVCache:
        """See `Runner`."""
        length = next(each for each in self._sources if each >= len(tokens))
        compiled = self.buckets.get(self._source_bucket(length, cache.capacity_tokens))
        row, valid = padded(tokens, length)
        return compiled(self.model.params, self.model.encoder, row, np.int32(valid), cache)

    def prefill_chunks(self, tokens: int) -> list[PrefillChunk]:
        """See `Runner`."""
        return self.chunks_in("float" if self.int8 is None else self.int8.mode(tokens), tokens)

    def chunks_in(self, mode: PrefillMode, tokens: int) -> list[PrefillChunk]:
        """`prefill_chunks` in a given mode."""
        if self.int8 is not None and mode == "int8":
            return self.int8.prefill_chunks(tokens)
        return chunks_of(plan_chunks(tokens, self.options.chunk_tokens))

    def prefill(
        self, cache: KVCache, tokens: Sequence[int], at: int, chunk: PrefillChunk
    ) -> tuple[jax.Array | None, KVCache]:
        """See `Runner`."""
        if self.int8 is not None and chunk.mode == "int8":
            return self.int8.prefill(cache, tokens, at, chunk)
        return self._prefill(cache, tokens, at, chunk)

    def prefill_rows(
        self, cache: KVCache, tokens: Sequence[int], at: int, chunk: PrefillChunk, rows: PromptRows
    ) -> tuple[jax.Array | None, KVCache]:
        """See `Runner`."""
        vocab = self.cfg.vocab_size
        ids = [each if each < vocab else 0 for each in tokens]
        return self._prefill(cache, ids, at, chunk, rows.of_chunk(at, chunk.tokens))

    def _prefill(
        self, cache: KVCache, tokens: Sequence[int], at: int, chunk: PrefillChunk, *inputs: InputRows
    ) -> tuple[jax.Array, KVCache]:
        cache = dataclasses.replace(cache, length=np.int32(at))
        bucket = self._prefill_bucket(chunk.tokens, cache.capacity_tokens)
        compiled = self.buckets.get(dataclasses.replace(bucket, rows=bool(inputs)))
        row, valid = padded(tokens, chunk.tokens)
        return compiled(self.model.params, row, np.int32(valid), np.bool_(chunk.last), cache, *inputs)

    def decode(
        self,
        token: jax.Array,
        cache: KVCache,
        sampler: SamplerState,
        stop_ids: np.ndarray,
        limit: int,
        cached: Sequence[int] = (),
    ) -> tuple[jax.Array, jax.Array, KVCache, SamplerState]:
        """See `Runner`: in one dispatch (see `steps.decode_tokens`)."""
        del cached
        compiled = self.buckets.get(self._decode_bucket(cache.capacity_tokens))
        end = BlockEnd(stop_ids, np.int32(limit))
        params, fixed = self.model.params, sampler.fixed
        tokens, count, cache, progress = compiled(params, token, cache, fixed, sampler.progress, end)
        return tokens, count, cache, sampler.after(progress)

    def verify(
        self,
        tree: "TokenTree",
        cache: KVCache,
        sampler: SamplerState,
        limit: int,
        meanwhile: Callable[[float], bool] | None = None,
    ) -> tuple[Verdict, KVCache, SamplerState]:
        """See `Runner`; `meanwhile` is never called: no weights are loaded."""
        del meanwhile
        compiled = self.buckets.get(self._verify_bucket(tree.room, cache.capacity_tokens))
        tokens, count, path, cache, progress = compiled(
            self.model.params, tree, cache, sampler.fixed, sampler.progress, np.int32(limit)
        )
        return Verdict.of(tokens, count, path), cache, sampler.after(progress)

    def rehearse(self) -> None:
        """See `LevelRunner`; on two processors the stages of integer prefill are timed, too."""
        for cache_tokens in self.options.cache_tokens:
            for length in self._sources:
                if self._source_bucket(length, cache_tokens) in self.buckets:
                    cache = self.read_source(self.empty_cache(cache_tokens), [0] * length)
                    jax.block_until_ready(cache.source)
            for chunk in self.options.chunk_tokens:
                if self._prefill_bucket(chunk, cache_tokens) in self.buckets:
                    cache = self.empty_cache(cache_tokens)
                    logits, _ = self.prefill(cache, [0], 0, PrefillChunk(tokens=chunk, last=True))
                    jax.block_until_ready(logits)
            if self._decode_bucket(cache_tokens) in self.buckets:
                sampler = sampler_state(Sampling(), [], self.cfg.vocab_size, 0)
                token, sampler = self.sample(np.zeros((1, self.cfg.vocab_size), np.float32), sampler)
                cache = self.empty_cache(cache_tokens)
                tokens, *_ = self.decode(token, cache, sampler, np.full(MAX_STOP_IDS, -1, np.int32), 1)
                tokens.block_until_ready()
        if self._batch is not None:
            self._batch.rehearse()
        if self.int8 is not None:
            self.int8.rehearse()

    # -- contexts ---------------------------------------------------------------------------------

    def begin_layers(self, tokens: np.ndarray, at: TokenPositions) -> jax.Array:
        """See `ContextRunner`."""
        return self._embed(tokens, at)

    def restore_layer(
        self, layer: int, x: jax.Array, at: TokenPositions, past: Past, chunks: LayerChunks
    ) -> tuple[jax.Array, Past]:
        """See `ContextRunner`."""
        bucket = self.restore_bucket(len(at.positions), past.capacity_tokens, layer)
        return self.buckets.get(bucket)(self.layer_params(layer), x, at, past, chunks)

    def prefill_restored(
        self, layer: int, x: jax.Array, at: TokenPositions, cache: KVCache, chunks: LayerChunks
    ) -> tuple[jax.Array, KVCache]:
        """See `LevelRunner`."""
        bucket = self._restored_bucket(len(at.positions), cache.capacity_tokens, layer)
        x, past, mass = self.buckets.get(bucket)(
            self.layer_params(layer), x, at, cache.past(layer), cache.mass, chunks
        )
        return x, dataclasses.replace(cache.with_past(layer, past), mass=mass)

    def restored_logits(self, x: jax.Array, row: int) -> jax.Array:
        """See `LevelRunner`."""
        compiled = self.buckets.get(LastLogitsBucket(tokens=x.shape[1]))
        return compiled(head_params(self.params, self.cfg), x, np.array([row], np.int32))

    def layer_params(self, layer: int) -> dict[str, Any]:
        """The parameters of a layer, as inputs of a layer's buckets."""
        self._sort_parameters()
        return self._layers[layer]

    def _embed(self, tokens: np.ndarray, at: TokenPositions) -> jax.Array:
        self._sort_parameters()
        embed = self.buckets.get(self.embed_bucket(len(tokens)))
        return embed(self._embedding, tokens[None], np.asarray(at.positions))

    def _sort_parameters(self) -> None:
        """Sorts the parameters by layer, once per version of the weights."""
        if self._sorted_version != self.weights_version:
            params, alike = self.params, self.model.alike
            self._layers = [layer_params(params, layer, like) for layer, like in enumerate(alike)]
            self._embedding = embedding_params(params)
            self._sorted_version = self.weights_version
