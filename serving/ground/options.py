"""Options of an engine: shapes of its buckets and caches, dtypes, memory, and on-disk caches."""

import dataclasses
from typing import TYPE_CHECKING, Literal

import jax

from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.contexts import CHUNK_TOKENS as KV_CHUNK_TOKENS
from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from jaxllm.models.lora import LoraConfig
from jaxllm.options import check_options, option
from jaxllm.serving.ground.expert_options import ExpertOptions
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.host.storage import Storage
from jaxllm.serving.host.user_cache import buckets_bytes

if TYPE_CHECKING:
    from jaxllm.contexts.codecs import ChunkFormat

CHUNK_TOKENS = (16, 32, 64, 128, 256, 512)
DEFAULT_CONTEXT_TOKENS = 2048
# On a CPU a chunk of 16 costs little more than a token, and 256 rows suffice to keep the cores busy;
# accelerators need more rows and fewer buckets.
CPU_CHUNK_TOKENS = (16, 64, 256)
_ACCELERATOR_CHUNK_TOKENS = (32, 128, 512)
_SHORTEST_CACHE_TOKENS = 512
_CACHE_GROWTH = 4
# Batch sizes of the buckets for batched decoding.
BATCH_ROWS = (2, 4, 8)
_CPU_SCORE_TOKENS = 2048
_ACCELERATOR_SCORE_TOKENS = 16384


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine. Zeros and empty values are resolved for the device and model.

    Attributes:
      context_tokens: maximum number of tokens of prompt and answer together; at most the model's window.
      chunk_tokens: prefill chunk lengths to make buckets for, ascending powers of two from 16 to 512.
      exact_chunks: set by `resolve`: whether native kernels skip the padding of a chunk, so that few
        lengths suffice.
      cache_tokens: lengths of caches, ascending; a sequence moves into the next one as it grows.
      decode_block: maximum number of tokens per decode dispatch.
      batch_rows: batch sizes of batched decoding, ascending, among 2, 4 and 8; buckets are made for them
        where native kernels read weights (see `jaxllm.serving.engine.step`). Empty: answers are not
        batched.
      score_tokens: tokens per dispatch, including padding, when many short texts are scored together.
      activation_dtype: "float32" or "bfloat16".
      cache_dtype: dtype of keys and values: "float32", "bfloat16" or "float16". By default float16 with
        native kernels and quantized weights, else the activations' dtype.
      adapter_rank: maximum rank of low-rank adapters that can be loaded at runtime (see
        `Engine.set_adapter`); 0 for no adapters, and faster products.
      adapter_targets: matrices that adapters may change, of `jaxllm.models.lora.TARGETS`; by default all
        matrices of layers.
      kv_codec: codec of stored contexts: a name of `jaxllm.contexts.codecs.CODECS`, or "raw". Empty for no
        contexts: no buckets are made for them, and attention is not counted.
      kv_chunk_tokens: tokens of a stored chunk (C); 16 as in LLMS. Services without a named codec use
        longer ones (see `LLMService.open`).
      attend_quantized_kv: whether answers in contexts attend to the stored chunks in place, instead of
        decoding them into a cache first. Requires native kernels, resident weights, float prefill, and a
        drafter other than "nested".
      memory_bytes: memory limit of weights, caches and activations together; 0 for no limit. If the model
        needs more, layers are read from storage each time they are used (see `jaxllm.serving.weights`). The
        runtime itself (Python, JAX, compiled buckets) is not included.
      storage: options of these reads.
      read_ahead: whether the next layer is read while one is computed; False only for measurements.
      experts: options of caching and predicting separately stored experts if memory is too small for all.
      prefill: prefill of an int8 bundle with a calibration (see `jaxllm.serving.int8_prefill`).
      trees: sizes of token trees, if the model drafts or verifies (see `jaxllm.serving.speculation`).
      levels: levels of an elastic bundle to serve besides the whole model, in percent, ascending.
      prompt_embeddings: whether to make buckets for prompt embeddings (see
        `jaxllm.serving.ground.prompt_embeddings`). Requires resident weights; such prompts are prefilled in
        floats.
      spare_memory: whether a start takes longer so that the process stays small: buckets are compiled in
        another process and loaded from disk, those of several rows when so many answers first run, and freed
        memory goes back to the system at once.
      buckets_bytes: size limit of the on-disk cache of compiled buckets; 0 disables it. None:
        $JAXLLM_BUCKETS_BYTES, else 1 GiB (0 on systems whose files have no owners).
    """

    context_tokens: int = option(0, low=0)
    chunk_tokens: tuple[int, ...] = option((), ascending=True)
    exact_chunks: bool = False
    cache_tokens: tuple[int, ...] = option((), low=1, ascending=True)
    decode_block: int = option(16, low=1, high=256)
    batch_rows: tuple[int, ...] = option((), ascending=True)
    score_tokens: int = option(0, low=0)
    activation_dtype: Literal["", "float32", "bfloat16"] = ""
    cache_dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ()
    kv_codec: str = ""
    kv_chunk_tokens: int = option(KV_CHUNK_TOKENS, low=1, high=256)
    attend_quantized_kv: bool = False
    memory_bytes: int = option(0, low=0)
    storage: Storage = dataclasses.field(default_factory=Storage)
    read_ahead: bool = True
    experts: ExpertOptions = dataclasses.field(default_factory=ExpertOptions)
    prefill: PrefillOptions = dataclasses.field(default_factory=PrefillOptions)
    trees: TreeShape | None = None
    levels: tuple[int, ...] = option((), low=1, high=FULL_LEVEL, ascending=True)
    prompt_embeddings: bool = False
    spare_memory: bool = False
    buckets_bytes: int | None = option(None, low=0)

    def __post_init__(self) -> None:
        check_options(self)
        for name, allowed in (("chunk_tokens", CHUNK_TOKENS), ("batch_rows", BATCH_ROWS)):
            if not set(getattr(self, name)) <= set(allowed):
                raise ConfigError(f"{name} must be among {allowed}, got {getattr(self, name)}")
        # The whole model is always served.
        object.__setattr__(self, "levels", tuple(level for level in self.levels if level != FULL_LEVEL))
        if self.attend_quantized_kv and not self.kv_codec:
            raise ConfigError("attend_quantized_kv requires chunks of contexts: name a kv_codec, too")
        if self.kv_codec:
            # Validates the name.
            self.chunk_format  # noqa: B018
        if self.adapter_targets and not self.adapter_rank:
            raise ConfigError("adapter_targets need an adapter_rank")
        # Validates both.
        LoraConfig(rank=self.adapter_rank, targets=self.adapter_targets or LoraConfig.targets)

    @property
    def chunk_format(self) -> "ChunkFormat":
        """Storage format of contexts' chunks.

        Raises:
          ConfigError: no codec is set, or an unknown one.
        """
        from jaxllm.contexts.codecs import ChunkFormat

        return ChunkFormat.named(self.kv_codec, self.kv_chunk_tokens)

    @property
    def recomputed_chunks(self) -> tuple[int, ...]:
        """Numbers of context chunks that can be recomputed together, ascending: those that fill a prefill
        chunk."""
        size = self.kv_chunk_tokens
        return tuple(tokens // size for tokens in self.chunk_tokens if tokens % size == 0)

    def source_tokens(self, cfg: ModelConfig) -> int:
        """Maximum source length of an encoder-decoder, for resolved options; 0 for other models."""
        return 0 if cfg.encoder is None else min(cfg.encoder.window_tokens, self.context_tokens)

    def resolve(
        self, cfg: ModelConfig, backend: str | None = None, *, quantized: bool = False
    ) -> "EngineOptions":
        """Resolves every default for `cfg` on `backend` (default: JAX's own).

        Args:
          cfg: the model's config.
          backend: a JAX platform.
          quantized: whether the weights are int8 or int4.

        Raises:
          ConfigError: the context does not fit the model's window or the caches, or $JAXLLM_BUCKETS_BYTES is
            not a number of bytes.
        """
        on_cpu = (backend or jax.default_backend()) == "cpu"
        context = self.context_tokens or min(cfg.window_tokens, DEFAULT_CONTEXT_TOKENS)
        if context > cfg.window_tokens:
            raise ConfigError(
                f"context_tokens {context} is more than the model's window of {cfg.window_tokens} "
                "tokens; ask for less"
            )
        native_cpu = on_cpu and native.kernels().native
        activation_dtype = self.activation_dtype or ("float32" if on_cpu else "bfloat16")
        cache_dtype = self.cache_dtype or ("float16" if native_cpu and quantized else activation_dtype)
        # Native attention reads the true length, and the cache's pages are committed as it fills.
        one_cache = native_cpu and cache_dtype in ("float32", "float16")
        caches = self.cache_tokens or ((context,) if one_cache else cache_lengths(context))
        if caches[-1] != context:
            raise ConfigError(f"the longest of cache_tokens {caches} must equal context_tokens {context}")
        exact = native_cpu and quantized and self.prefill.processors == 1
        chunks = self.chunk_tokens or _chunk_lengths(cfg, on_cpu=on_cpu, exact=exact)
        targets = self.adapter_targets or LoraConfig.targets if self.adapter_rank else ()
        # Drop chunks longer than the context, but keep the shortest.
        chunks = tuple(c for c in chunks if c < 2 * context) or chunks[:1]
        if cfg.states is not None and (self.kv_codec not in ("", "raw") or self.attend_quantized_kv):
            raise ConfigError(
                f"contexts of {cfg.model_type} are kept as they are, for its states go with exactly these "
                "keys and values: kv_codec must be raw, without attend_quantized_kv"
            )
        if self.kv_codec and context < self.kv_chunk_tokens:
            raise ConfigError(f"kv_chunk_tokens {self.kv_chunk_tokens} is more than the context of {context}")
        if self.kv_codec and all(tokens % self.kv_chunk_tokens for tokens in chunks):
            raise ConfigError(
                f"kv_chunk_tokens {self.kv_chunk_tokens} divides none of chunk_tokens {chunks}: no lost "
                "chunk of a context could be computed again; choose a divisor"
            )
        return dataclasses.replace(
            self,
            context_tokens=context,
            chunk_tokens=chunks,
            exact_chunks=exact,
            cache_tokens=caches,
            score_tokens=self.score_tokens or (_CPU_SCORE_TOKENS if on_cpu else _ACCELERATOR_SCORE_TOKENS),
            activation_dtype=activation_dtype,
            cache_dtype=cache_dtype,
            adapter_targets=targets,
            buckets_bytes=buckets_bytes() if self.buckets_bytes is None else self.buckets_bytes,
        )


def _chunk_lengths(cfg: ModelConfig, *, on_cpu: bool, exact: bool) -> tuple[int, ...]:
    if not on_cpu:
        return _ACCELERATOR_CHUNK_TOKENS
    if not exact:
        return CPU_CHUNK_TOKENS
    # XLA's operations between kernels also compute the padding.
    biases = cfg.qkv_bias or cfg.o_bias or cfg.ffn_bias or cfg.norm == "layer"
    return CPU_CHUNK_TOKENS[1:] if biases or cfg.qk_norm or cfg.experts else CPU_CHUNK_TOKENS[-1:]


def cache_lengths(context: int) -> tuple[int, ...]:
    """Lengths of caches for a context, ascending; the last is the context's."""
    lengths = []
    length = _SHORTEST_CACHE_TOKENS
    while length < context:
        lengths.append(length)
        length *= _CACHE_GROWTH
    return (*lengths, context)
