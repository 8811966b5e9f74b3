"""Runs a model whose weights are all resident."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxllm.kv.cache import KVCache, Past, TokenPositions
from jaxllm.models.layer import InputEmbeddings
from jaxllm.models.layer_stack import STACK, LayerStack
from jaxllm.sampling import SamplerState, Sampling, sampler_state
from jaxllm.serving.buckets.bucket import Bucket, embedding_params, head_params, layer_params
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.model import DecodeBucket, PrefillBucket
from jaxllm.serving.ground.text_stream import MAX_STOP_IDS
from jaxllm.serving.runners.level_runner import LevelRunner
from jaxllm.serving.runners.runner import (
    BatchRow,
    DecodedRow,
    PrefillChunk,
    PrefillMode,
    Verdict,
    chunks_of,
    padded,
    plan_chunks,
)
from jaxllm.serving.weights.model_level import ModelLevel
from jaxllm.steps.model import BlockEnd

if TYPE_CHECKING:
    from jaxllm.kv.chunks import LayerChunks
    from jaxllm.serving.ground.prompt_embeddings import PromptEmbeddings
    from jaxllm.speculation.tree import TokenTree


class ResidentRunner(LevelRunner):
    """Runs one level of a model with resident weights (see `Runner`), also as another model's drafter."""

    resident = True

    def __init__(
        self,
        model: ModelLevel,
        buckets: BucketTable,
        int8: Any = None,
        *,
        encodes: bool = True,
    ) -> None:
        """See the class and `LevelRunner`; `int8` prefills in integers. Without `encodes` it reads no
        sources, but has those of others in its caches."""
        super().__init__(model, buckets)
        if not encodes:
            self.sources = ()
        # Answers of an encoder-decoder are decoded one by one: their sources differ in length.
        self.int8 = int8
        if self.options.batch_rows and model.cfg.encoder is None:
            # Here, because one prompt needs no batches.
            from jaxllm.serving.runners.batch import Batch

            self.batch = Batch.of(self)
        # The version of the weights in `_layers` and `_embedding`.
        self._sorted_version: tuple[int, int] | None = None

    # -- which buckets it needs -------------------------------------------------------------------

    def _source_buckets(self, tokens: int, cache: int) -> list[Bucket]:
        # Here and below, because few models need their import.
        from jaxllm.serving.buckets.source import SourceBucket

        return [self.model.bucket(SourceBucket, tokens=tokens, cache_tokens=cache)]

    def _chunk_buckets(self, tokens: int, cache: int, prompt_tokens: int | None) -> list[Bucket]:
        int8, found = self.int8, []
        mode = None if int8 is None or prompt_tokens is None else int8.mode(prompt_tokens)
        if self.options.prompt_embeddings:
            found.append(self.model.bucket(PrefillBucket, tokens=tokens, cache_tokens=cache, rows=True))
        if int8 is None or mode == "float" or (mode is None and int8.floats_too):
            found.append(self.model.bucket(PrefillBucket, tokens=tokens, cache_tokens=cache))
        return found if int8 is None or mode == "float" else [*found, *int8.chunk_buckets(tokens, cache)]

    def _decode_buckets(self, cache: int) -> list[Bucket]:
        block = self.options.decode_block
        return [self.model.bucket(DecodeBucket, block_tokens=block, cache_tokens=cache)]

    def _tree_buckets(self, nodes: int, cache: int) -> list[Bucket]:
        from jaxllm.serving.buckets.tree import VerifyBucket

        return [self.model.bucket(VerifyBucket, tokens=nodes, cache_tokens=cache)]

    def _embed_bucket(self, tokens: int) -> Bucket:
        from jaxllm.serving.buckets.layer import EmbedBucket

        return self.model.bucket(EmbedBucket, tokens=tokens)

    # -- answering --------------------------------------------------------------------------------

    def read_source(self, cache: KVCache, tokens: Sequence[int]) -> KVCache:
        """See `Runner`."""
        if not self.sources:
            return super().read_source(cache, tokens)
        length = next(each for each in self.sources if each >= len(tokens))
        (bucket,) = self._source_buckets(length, cache.capacity_tokens)
        compiled, (row, valid) = self.buckets.get(bucket), padded(tokens, length)
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

    def prefill_embeddings(
        self, cache: KVCache, tokens: Sequence[int], at: int, chunk: PrefillChunk, rows: "PromptEmbeddings"
    ) -> tuple[jax.Array | None, KVCache]:
        """See `Runner`."""
        vocab = self.cfg.vocab_size
        ids = [each if each < vocab else 0 for each in tokens]
        return self._prefill(cache, ids, at, chunk, rows.of_chunk(at, chunk.tokens))

    def _prefill(
        self, cache: KVCache, tokens: Sequence[int], at: int, chunk: PrefillChunk, *inputs: InputEmbeddings
    ) -> tuple[jax.Array, KVCache]:
        cache, capacity = dataclasses.replace(cache, length=np.int32(at)), cache.capacity_tokens
        compiled = self._compiled(
            PrefillBucket, tokens=chunk.tokens, cache_tokens=capacity, rows=bool(inputs)
        )
        row, valid = padded(tokens, chunk.tokens)
        return compiled(self.model.params, row, np.int32(valid), np.bool_(chunk.last), cache, *inputs)

    def later_buckets(self) -> list[Bucket]:
        """See `LevelRunner`; and those that ask for masks."""
        guided = [self._guided_bucket(each) for each in self.options.cache_tokens] if self._guides else []
        return [*super().later_buckets(), *guided]

    @property
    def _guides(self) -> bool:
        # Where weights are read by address there are native kernels.
        return isinstance(self.params.get(STACK), LayerStack)

    def can_guide(self, cache: KVCache) -> bool:
        """See `Runner`: on a CPU, by native kernels."""
        return self._guides and self.buckets.begin_loading(self._guided_bucket(cache.capacity_tokens))

    def _guided_bucket(self, cache: int) -> Bucket:
        from jaxllm.serving.buckets.guided import GuidedBucket

        block = self.options.decode_block
        return self.model.bucket(GuidedBucket, block_tokens=block, cache_tokens=cache)

    def decode(self, row: BatchRow) -> DecodedRow:
        """See `Runner`: in one dispatch (see `steps.decode_tokens`)."""
        (bucket,) = self._decode_buckets(row.cache.capacity_tokens)
        end, sampler = BlockEnd(row.stop_ids, np.int32(row.limit)), row.sampler
        if row.guide is not None:
            bucket = self._guided_bucket(row.cache.capacity_tokens)
            end = row.guide.end(row.stop_ids, row.limit)
        tokens, count, cache, progress = self.buckets.get(bucket)(
            self.model.params, row.token, row.cache, sampler.fixed, sampler.progress, end
        )
        done, *rest = np.asarray(count).ravel().tolist()
        found = DecodedRow(np.asarray(tokens)[0, :done].tolist(), cache, sampler.after(progress))
        return dataclasses.replace(found, followed=rest[0], asked=bool(rest[1])) if rest else found

    def verify(
        self,
        tree: "TokenTree",
        cache: KVCache,
        sampler: SamplerState,
        limit: int,
        meanwhile: Callable[[float], bool] | None = None,
    ) -> tuple[Verdict, KVCache, SamplerState]:
        """See `Runner`."""
        del meanwhile
        (bucket,) = self._tree_buckets(tree.room, cache.capacity_tokens)
        tokens, count, path, cache, progress = self.buckets.get(bucket)(
            self.model.params, tree, cache, sampler.fixed, sampler.progress, np.int32(limit)
        )
        return Verdict.of(tokens, count, path), cache, sampler.after(progress)

    def rehearse(self) -> None:
        """See `LevelRunner`; on two processors the stages of integer prefill are timed, too."""
        for capacity in self.options.cache_tokens:
            for length in self.sources:
                if self._source_buckets(length, capacity)[0] in self.buckets:
                    cache = self.read_source(self.empty_cache(capacity), [0] * length)
                    jax.block_until_ready(cache.source)
            for chunk in self.options.chunk_tokens:
                if self.model.bucket(PrefillBucket, tokens=chunk, cache_tokens=capacity) in self.buckets:
                    one = PrefillChunk(tokens=chunk, last=True)
                    jax.block_until_ready(self.prefill(self.empty_cache(capacity), [0], 0, one)[0])
            if self._decode_buckets(capacity)[0] in self.buckets:
                sampler = sampler_state(Sampling(), [], self.cfg.vocab_size, 0)
                token, sampler = self.sample(np.zeros((1, self.cfg.vocab_size), np.float32), sampler)
                stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
                cache = self.empty_cache(capacity)
                self.decode(BatchRow(token=token, cache=cache, sampler=sampler, stop_ids=stop_ids, limit=1))
        if self.batch is not None:
            self.batch.rehearse()
        if self.int8 is not None:
            self.int8.rehearse()

    # -- contexts ---------------------------------------------------------------------------------

    @property
    def prefills_restored(self) -> bool:
        """See `LevelRunner`."""
        return bool(self.options.kv_codec) and self.cfg.encoder is None and self.cfg.states is None

    def begin_layers(self, tokens: np.ndarray, at: TokenPositions) -> jax.Array:
        """See `LevelRunner`."""
        self._sort_parameters()
        embed = self.buckets.get(self._embed_bucket(len(tokens)))
        return embed(self._embedding, tokens[None], np.asarray(at.positions))

    def restore_layer(
        self, layer: int, x: jax.Array, at: TokenPositions, past: Past, chunks: "LayerChunks"
    ) -> tuple[jax.Array, Past]:
        """See `LevelRunner`."""
        bucket = self._restore_bucket(len(at.positions), past.capacity_tokens, layer)
        return self.buckets.get(bucket)(self.layer_params(layer), x, at, past, chunks)

    def prefill_restored(
        self, layer: int, x: jax.Array, at: TokenPositions, cache: KVCache, chunks: "LayerChunks"
    ) -> tuple[jax.Array, KVCache]:
        """See `LevelRunner`."""
        from jaxllm.serving.buckets.layer import PrefillRestoredBucket

        where = {"tokens": len(at.positions), "cache_tokens": cache.capacity_tokens, "layer": layer}
        compiled, params = self._compiled(PrefillRestoredBucket, **where), self.layer_params(layer)
        x, past, mass = compiled(params, x, at, cache.past(layer), cache.mass, chunks)
        return x, dataclasses.replace(cache.with_past(layer, past), mass=mass)

    def restored_logits(self, x: jax.Array, row: int) -> jax.Array:
        """See `LevelRunner`."""
        from jaxllm.serving.buckets.layer import LastLogitsBucket

        compiled = self.buckets.get(LastLogitsBucket(tokens=x.shape[1]))
        return compiled(head_params(self.params, self.cfg), x, np.array([row], np.int32))

    def layer_params(self, layer: int) -> dict[str, Any]:
        """The parameters of a layer, as inputs of a layer's buckets."""
        self._sort_parameters()
        return self._layers[layer]

    def _sort_parameters(self) -> None:
        """Sorts the parameters by layer, once per version of the weights."""
        if self._sorted_version != self.weights_version:
            params, alike = self.params, self.model.alike
            self._layers = [layer_params(params, layer, like) for layer, like in enumerate(alike)]
            self._embedding = embedding_params(params)
            self._sorted_version = self.weights_version
