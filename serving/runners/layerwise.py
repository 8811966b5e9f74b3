"""Runs a model layer by layer while its weights are loaded.

Layers are prefetched one after another in each pass (`StreamedRunner`), or are resident except for experts
(`jaxllm.serving.experts.expert_layers`).
"""

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.kv.cache import KVCache, Past, TokenPositions, TreePositions
from jaxllm.kv.chunks import LayerChunks
from jaxllm.kv.states import SourceKV
from jaxllm.models.encoder_decoder import encoder_params
from jaxllm.models.layer_stack import STACK, LayersAt, LayerStack
from jaxllm.models.parameters import head_name
from jaxllm.sampling import SamplerState, Sampling, sampler_state
from jaxllm.serving.buckets.bucket import (
    MOST_LAYERS,
    Bucket,
    embedding_params,
    norm_params,
    outer_params,
    shared_by_layers,
)
from jaxllm.serving.buckets.bucket_table import BucketTable
from jaxllm.serving.buckets.layer import EmbedRowsBucket, HeadBucket, LayerBucket, LayersBucket, NormBucket
from jaxllm.serving.buckets.source import (
    BeginEncoderBucket,
    EncoderLayerBucket,
    EndEncoderBucket,
    SourceLayerBucket,
    source_lengths,
)
from jaxllm.serving.buckets.tree import KeepBucket, SettleBucket
from jaxllm.serving.host.allocator import give_back_memory
from jaxllm.serving.host.progress import Progress
from jaxllm.serving.runners.level_runner import LevelRunner
from jaxllm.serving.runners.runner import (
    BatchRow,
    DecodedRow,
    PrefillChunk,
    Verdict,
    padded,
    placed_chunks,
    plan_chunks,
)
from jaxllm.serving.weights.model_level import ModelLevel
from jaxllm.serving.weights.prefetch import Meanwhile
from jaxllm.serving.weights.streamed import StreamedWeights
from jaxllm.speculation.tree import TokenTree

# Tokens `[T]` int32, padded, and their positions.
Chunk = tuple[np.ndarray, TokenPositions]


class SourceLayers:
    """The layers that encode sources."""

    def __init__(
        self,
        model: ModelLevel,
        buckets: BucketTable,
        weights: Any,
        *,
        by_rows: bool = True,
        sparse: Any = None,
    ) -> None:
        """Makes the layers.

        Args:
          model: the whole model; for streamed layers shapes suffice.
          buckets: compiled buckets.
          weights: provider of the rows of the embedding, then of the encoder's layers, then of the decoder's
            (see `begin_source`, `rows`, `encoder_layer` and `layer` of `StreamedWeights`).
          by_rows: whether the embedding is passed by rows, or as a whole.
          sparse: runs the encoder's layers with experts, if these are loaded individually: a
            `jaxllm.serving.experts.expert_layers.SparseEncoderLayers`.
        """
        # Of a level: buckets are the whole model's, and its parameters have counts.
        encoder = model.bucket_cfg.encoder
        assert encoder is not None
        self._model, self._buckets, self._weights, self._sparse = model, buckets, weights, sparse
        own = encoder_params(model.weights)
        self._encoder = ModelLevel(encoder, own, model.options, level=model.level)
        self._outer = outer_params(self._encoder.params)
        self._norm = norm_params(self._encoder.params)
        self._by_rows = by_rows

    def buckets(self, tokens: int) -> list[Bucket]:
        """The buckets for sources of up to `tokens` tokens, one of `source_lengths`."""
        layers: list[Bucket] = []
        for layer in self._encoder.layer_kinds:
            sparse = self._sparse_of(layer)
            one = EncoderLayerBucket(tokens=tokens, layer=layer)
            layers += [one] if sparse is None else sparse.buckets(tokens, layer)
        projections = [SourceLayerBucket(tokens=tokens, layer=each) for each in self._model.layer_kinds]
        return [
            BeginEncoderBucket(tokens=tokens, by_rows=self._by_rows),
            *layers,
            EndEncoderBucket(tokens=tokens),
            *projections,
        ]

    def read(self, tokens: Sequence[int], source: SourceKV) -> SourceKV:
        """See `LayerwiseRunner.read_source`."""
        lengths = source_lengths(self._model.cfg, self._model.options)
        length = next(each for each in lengths if each >= len(tokens))
        rows, count = padded(tokens, length)
        self._weights.begin_source()
        outer, valid = self._outer, np.int32(count)
        if self._by_rows:
            some, rows = self._weights.rows(rows[0].tolist())
            outer = {**outer, "embed.tokens": some}
        begin = self._buckets.get(BeginEncoderBucket(tokens=length, by_rows=self._by_rows))
        x, bias = begin(outer, rows, valid)
        for layer, like in enumerate(self._encoder.alike):
            with self._weights.encoder_layer(self._encoder, layer) as weights:
                if (sparse := self._sparse_of(layer)) is not None:
                    x = sparse.run(layer, like, weights, (x, bias, valid))
                else:
                    compiled = self._buckets.get(EncoderLayerBucket(tokens=length, layer=like))
                    x = compiled(weights, x, bias, valid)
                # The next piece overwrites the memory of this one.
                jax.block_until_ready(x)
        hidden = self._buckets.get(EndEncoderBucket(tokens=length))(self._norm, x)
        for layer, like in enumerate(self._model.alike):
            compiled = self._buckets.get(SourceLayerBucket(tokens=length, layer=like))
            with self._weights.layer(self._model, layer) as weights:
                source = jax.block_until_ready(compiled(weights, hidden, valid, source.in_layer(layer)))
        return dataclasses.replace(source.in_layer(None), length=valid)  # pyright: ignore

    def _sparse_of(self, layer: int) -> Any:
        """What runs a layer with experts that are loaded individually; None for other layers."""
        return self._sparse if self._encoder.cfg.is_sparse(layer) else None


class LayerwiseRunner(LevelRunner):
    """Runs one level of a model layer by layer."""

    def __init__(
        self, model: ModelLevel, buckets: BucketTable, head: Any, sources: SourceLayers | None
    ) -> None:
        """See the class and `LevelRunner`.

        Args:
          model, buckets: see `LevelRunner`.
          head: provider of the head in pieces (see `head` and `head_rows` of `StreamedWeights`).
          sources: encodes sources; None for models without an encoder.
        """
        super().__init__(model, buckets)
        if model.options.prompt_embeddings:
            raise ConfigError(
                "images and other prompt embeddings (prompt_embeddings) require resident weights; raise "
                "--memory, or go without (for a service: images = false)"
            )
        self.head, self._source_layers = head, sources
        # All levels and adapters share them.
        self._embedding, self._norm = embedding_params(model.params), norm_params(model.params)
        bias = model.params.get("head_bias")
        self._head_biases = [
            {} if bias is None else {"head_bias": np.asarray(bias)[each.first : each.first + each.count]}
            for each in head.head
        ]

    # -- its layers -------------------------------------------------------------------------------

    @abc.abstractmethod
    def _layer_buckets(self, tokens: int, cache: int, *, tree: bool = False) -> list[Bucket]:
        """The buckets of all layers for a chunk, or a token tree, of `tokens` tokens."""

    @abc.abstractmethod
    def _run(
        self, chunks: Sequence[Chunk], cache: KVCache, meanwhile: Meanwhile | None = None
    ) -> tuple[list[jax.Array], KVCache]:
        """Runs chunks through all layers, layer by layer: all chunks through one before the next is needed.

        Args:
          chunks: later ones attend to earlier ones.
          cache: donated. Its length is not changed.
          meanwhile: other work while weights are loaded (see `WeightStream.piece`).

        Returns:
          The last layer's output `[1, T, D]` for each chunk, and the cache.
        """

    # -- which buckets it needs -------------------------------------------------------------------

    def _source_buckets(self, tokens: int, cache: int) -> list[Bucket]:
        del cache
        return [] if self._source_layers is None else self._source_layers.buckets(tokens)

    def _chunk_buckets(self, tokens: int, cache: int, prompt_tokens: int | None) -> list[Bucket]:
        del prompt_tokens
        return self._pass_buckets(tokens, cache)

    def _decode_buckets(self, cache: int) -> list[Bucket]:
        return self._pass_buckets(1, cache)

    def _tree_buckets(self, nodes: int, cache: int) -> list[Bucket]:
        keep = self.model.bucket(KeepBucket, tokens=nodes, cache_tokens=cache)
        return [*self._pass_buckets(nodes, cache, tree=True), SettleBucket(tokens=nodes), keep]

    def _pass_buckets(self, tokens: int, cache: int, *, tree: bool = False) -> list[Bucket]:
        """The buckets of a pass over the layers, and of logits after its last token, or each of a tree."""
        rows = tokens if tree else 1
        sizes = {each.count for each in self.head.head}
        return [
            *self._layer_buckets(tokens, cache, tree=tree),
            self._embed_bucket(tokens),
            NormBucket(tokens=tokens, rows=rows),
            *(HeadBucket(rows=rows, vocab_tokens=count) for count in sizes),
        ]

    # -- getting ready ----------------------------------------------------------------------------

    def fill(
        self, buckets: Iterable[Bucket], progress: Progress | None = None, *, later: Iterable[Bucket] = ()
    ) -> None:
        """See `LevelRunner`. Returns the memory of compilation, which the budget does not include."""
        super().fill([*buckets, *later], progress)
        give_back_memory()

    def rehearse(self) -> None:
        """See `LevelRunner`: a chunk of each length and one token, in each length of cache."""
        for length in self.sources:
            self.read_source(self.start(1), [0] * length)
        for capacity in self.options.cache_tokens:
            cache = self.start(capacity)
            for tokens in self.options.chunk_tokens:
                if tokens <= capacity:
                    _, cache = self._feed(cache, [0] * tokens, 0, [tokens])
            logits, _ = self._feed(cache, [0], 0)
            self.sample(logits, sampler_state(Sampling(), [], self.cfg.vocab_size, 0))

    # -- answering --------------------------------------------------------------------------------

    def read_source(self, cache: KVCache, tokens: Sequence[int]) -> KVCache:
        """See `Runner`: reads the encoder's layers, then the decoder's parts for a source, each once."""
        if self._source_layers is None or not isinstance(cache.source, SourceKV):
            return super().read_source(cache, tokens)
        return dataclasses.replace(cache, source=self._source_layers.read(tokens, cache.source))

    def prefill_chunks(self, tokens: int) -> list[PrefillChunk]:
        """See `Runner`: the whole prompt, so that each layer is read once."""
        return [PrefillChunk(tokens=tokens, last=True)]

    def prefill(
        self, cache: KVCache, tokens: Sequence[int], at: int, chunk: PrefillChunk
    ) -> tuple[np.ndarray, KVCache]:
        """See `Runner`."""
        del chunk
        # Also a single token in a chunk: products of several rows may round differently.
        return self._feed(cache, tokens, at, plan_chunks(len(tokens), self.options.chunk_tokens))

    def _feed(
        self, cache: KVCache, tokens: Sequence[int], at: int, lengths: Sequence[int] = (1,)
    ) -> tuple[np.ndarray, KVCache]:
        """Runs `tokens` from position `at` on, in chunks of these lengths: logits `[1, V]` after the last,
        and the cache."""
        chunks = placed_chunks(tokens, lengths, at)
        outputs, cache = self._run(chunks, cache)
        last = np.array([int(chunks[-1][1].valid) - 1], np.int32)
        logits = self._logits(outputs[-1], last)
        return logits, dataclasses.replace(cache, length=np.int32(at + len(tokens)))  # pyright: ignore

    def decode(self, row: BatchRow) -> DecodedRow:
        """See `Runner`: token by token."""
        found, cache, sampler, at = [], row.cache, row.sampler, int(row.cache.length)
        stops, last = set(row.stop_ids.tolist()), int(np.asarray(row.token)[0])
        while len(found) < row.limit and last not in (stops if found else ()):
            logits, cache = self._feed(cache, [last], at + len(found))
            chosen, sampler = self.sample(logits, sampler)
            last = int(np.asarray(chosen)[0])
            found.append(last)
        return DecodedRow(found, cache, sampler)

    def verify(
        self,
        tree: TokenTree,
        cache: KVCache,
        sampler: SamplerState,
        limit: int,
        meanwhile: Meanwhile | None = None,
    ) -> tuple[Verdict, KVCache, SamplerState]:
        """See `Runner`."""
        logits, cache = self.tree_logits(tree, cache, meanwhile)
        settle = self.buckets.get(SettleBucket(tokens=tree.room))
        fixed, progress = sampler.fixed, sampler.progress
        tokens, count, path, progress = settle(tree, logits, fixed, progress, np.int32(limit))
        return Verdict.of(tokens, count, path), self.keep_path(cache, path, count), sampler.after(progress)

    def tree_logits(
        self, tree: TokenTree, cache: KVCache, meanwhile: Meanwhile | None = None
    ) -> tuple[np.ndarray, KVCache]:
        """Logits `[M, V]` float32 after each node of a tree, and the cache with the tree's rows after the
        sequence's; the length is not changed."""
        nodes, length = np.arange(tree.room, dtype=np.int32), np.int32(int(cache.length))
        rows = TreePositions(length, length + nodes, np.asarray(tree.ancestors))  # pyright: ignore
        at = TokenPositions(length + np.asarray(tree.depths), np.int32(int(tree.count)), rows)  # pyright: ignore
        cache = cache.counted_by_node(tree.room)
        (x,), cache = self._run([(np.asarray(tree.tokens), at)], cache, meanwhile)
        return self._logits(x, nodes, meanwhile), cache

    def keep_path(self, cache: KVCache, path: np.ndarray, count: int) -> KVCache:
        """The cache with the path `[M]` of a tree, of `count` nodes, at the end of its sequence."""
        keep = self._compiled(KeepBucket, tokens=len(path), cache_tokens=cache.capacity_tokens)
        return keep(dataclasses.replace(cache, mass=None), cache.mass, np.asarray(path), np.int32(count))

    def _logits(self, x: jax.Array, rows: np.ndarray, meanwhile: Meanwhile | None = None) -> np.ndarray:
        """Logits `[N, V]` float32 after the N tokens `rows` of the last layer's output."""
        head, name, whole = self.head, head_name(self.cfg), len(self.head.head) == 1
        # Allocated once: those of a tree and a large vocabulary are many bytes.
        found = np.empty((0 if whole else len(rows), self.cfg.vocab_size), np.float32)
        hidden = self.buckets.get(NormBucket(tokens=x.shape[1], rows=len(rows)))(self._norm, x, rows)
        for number, piece in enumerate(head.head):
            compiled = self.buckets.get(HeadBucket(rows=len(rows), vocab_tokens=piece.count))
            with head.head_rows(number, meanwhile) as weight:
                part = np.asarray(compiled({name: weight, **self._head_biases[number]}, hidden))
            if whole:
                return part
            found[:, piece.first : piece.first + piece.count] = part
        return found


class StreamedRunner(LayerwiseRunner):
    """Runs layers that are prefetched from storage one after another in each pass."""

    def __init__(self, model: ModelLevel, buckets: BucketTable, weights: StreamedWeights) -> None:
        """See the class; `model` only has shapes of its layers and embedding (see
        `StreamedWeights.frozen`)."""
        sources = None if model.encoder is None else SourceLayers(model, buckets, weights)
        super().__init__(model, buckets, weights, sources)
        self._weights = weights
        # Equal consecutive layers run together, in one loop over their addresses. Layers that are separate
        # arguments, for XLA's products, run one by one: each number of them would be another bucket, whose
        # size grows with it.
        self._together = isinstance(model.params.get(STACK), LayerStack)
        # Per layer, the number of layers that run together from it on.
        self._most = [1] * len(model.alike)
        for layer in reversed(range(len(model.alike) - 1 if self._together else 0)):
            if model.alike[layer] == model.alike[layer + 1]:
                self._most[layer] = min(MOST_LAYERS, self._most[layer + 1] + 1)

    @property
    def idle_read_s(self) -> float:
        """See `Runner`."""
        return self._weights.idle_read_s

    def _layer_buckets(self, tokens: int, cache: int, *, tree: bool = False) -> list[Bucket]:
        return [self._bucket(tokens, cache, layer, tree=tree) for layer in self.model.layer_kinds]

    def _embed_bucket(self, tokens: int) -> Bucket:
        return EmbedRowsBucket(tokens=tokens)

    def begin_layers(self, tokens: np.ndarray, at: TokenPositions) -> jax.Array:
        """See `LevelRunner`."""
        self._weights.begin(self.model.cfg)
        return self._embed(tokens, at)

    def _run(
        self, chunks: Sequence[Chunk], cache: KVCache, meanwhile: Meanwhile | None = None
    ) -> tuple[list[jax.Array], KVCache]:
        self._weights.begin(self.model.cfg)
        outputs = [self._embed(tokens, at) for tokens, at in chunks]
        # Transferred once for all layers.
        placed = [(len(tokens), jax.device_put(at)) for tokens, at in chunks]
        mass, layer = cache.mass, 0
        # Sum attention mass layer by layer, independent of what is in memory.
        alone = mass is not None and len(chunks) > 1
        while layer < self.model.cfg.layers:
            past, most = cache.past(layer), 1 if alone else self._most[layer]
            with self._weights.layers(self.model, layer, most, meanwhile) as layers:
                weights, *count = self._arguments(layers)
                for number, (tokens, at) in enumerate(placed):
                    tree = at.tree is not None
                    bucket = self._bucket(tokens, cache.capacity_tokens, layer, tree=tree)
                    compiled = self.buckets.get(bucket)
                    outputs[number], past, mass = compiled(weights, outputs[number], at, past, mass, *count)
                # The next pieces overwrite the memory of these.
                jax.block_until_ready(outputs)
            cache, layer = cache.with_past(layer, past), layer + len(layers)
        return outputs, dataclasses.replace(cache, mass=mass)

    def restore_layer(
        self, layer: int, x: jax.Array, at: TokenPositions, past: Past, chunks: LayerChunks
    ) -> tuple[jax.Array, Past]:
        """See `LevelRunner`."""
        compiled = self.buckets.get(self._restore_bucket(len(at.positions), past.capacity_tokens, layer))
        with self._weights.layer(self.model, layer) as weights:
            # The next piece overwrites the memory of this one.
            return jax.block_until_ready(compiled(weights, x, at, past, chunks))

    def _embed(self, tokens: np.ndarray, at: TokenPositions) -> jax.Array:
        some, rows = self._weights.rows(tokens.tolist())
        compiled = self.buckets.get(self._embed_bucket(len(tokens)))
        return compiled({**self._embedding, "embed.tokens": some}, rows, np.asarray(at.positions))

    def _arguments(self, layers: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
        """The parameters of some layers as inputs of their bucket, and their number if it is an input."""
        if not self._together:
            (one,) = layers
            return (one,)
        by_address = LayersAt.of([each[STACK] for each in layers], MOST_LAYERS)
        return {STACK: by_address, **shared_by_layers(self.model.params)}, np.int32(len(layers))

    def _bucket(self, tokens: int, cache: int, layer: int, *, tree: bool) -> Bucket:
        family = LayersBucket if self._together else LayerBucket
        return self.model.bucket(family, tokens=tokens, cache_tokens=cache, layer=layer, tree=tree)
