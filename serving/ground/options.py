"""Options of an engine: shapes of its buckets and caches, dtypes, memory, and what it keeps on disk."""

import dataclasses

import jax

from jaxllm.config import WHOLE, ModelConfig
from jaxllm.contexts.codecs import ChunkFormat
from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from jaxllm.kv.chunks import CHUNK_TOKENS as KV_CHUNK_TOKENS
from jaxllm.models.lora import LoraConfig
from jaxllm.options import check_options, option
from jaxllm.serving.ground.expert_options import ExpertOptions
from jaxllm.serving.ground.int8_prefill_options import PrefillOptions
from jaxllm.serving.ground.speculation_options import TreeShape
from jaxllm.serving.host.direct_io import Storage
from jaxllm.serving.host.user_cache import buckets_bytes

CHUNK_TOKENS = (16, 32, 64, 128, 256, 512)
DEFAULT_CONTEXT_TOKENS = 2048
# On a CPU a chunk of 16 costs little more than a token, and 256 tokens are enough rows to keep the
# cores busy; accelerators need more rows and fewer buckets.
CPU_CHUNK_TOKENS = (16, 64, 256)
_ACCELERATOR_CHUNK_TOKENS = (32, 128, 512)
_SHORTEST_CACHE_TOKENS = 512
_CACHE_GROWTH = 4
# Rows of buckets that decode answers together.
BATCH_ROWS = (2, 4, 8)
_CPU_SCORE_TOKENS = 2048
_ACCELERATOR_SCORE_TOKENS = 16384


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of an engine. Zeros and empty values mean: choose for this device and model.

    Attributes:
      context_tokens: most tokens of prompt and answer together; at most the model's window.
      chunk_tokens: prefill chunk lengths that buckets are made for, ascending powers of two from 16 to 512.
      exact_chunks: set by `resolve`: whether native kernels compute a chunk's tokens alone and not its
        padding, so that few lengths do.
      cache_tokens: lengths of caches, ascending; a sequence moves into the next one as it grows.
      decode_block: most tokens decoded per dispatch.
      batch_rows: numbers of answers that are decoded together, ascending, among 2, 4 and 8: buckets are made
        for them where native kernels read weights (see `jaxllm.serving.engine.step`). Empty: answers are
        decoded one by one.
      score_tokens: tokens per dispatch, padding included, when many short texts are scored together.
      activation_dtype: "float32" or "bfloat16".
      cache_dtype: of keys and values: "float32", "bfloat16" or "float16". By default float16 where native
        kernels serve quantized weights, else the activations'.
      adapter_rank: highest rank of the low-rank adapters that may be put on the model while it runs (see
        `Engine.set_adapter`); 0 for none, and faster products.
      adapter_targets: matrices that adapters may change, of `jaxllm.models.lora.TARGETS`; by default all
        matrices of layers.
      kv_codec: how contexts that outlive calls are stored: a name of `jaxllm.contexts.codecs.CODECS`, or
        "raw". Empty for no contexts: no buckets are made for them, and attention is not counted.
      kv_chunk_tokens: tokens of a stored chunk (C); 16 as in LLMS. Services that name no codec have longer
        ones (see `LLMService.open`).
      attend_coded: whether answers in contexts attend to the stored chunks where they lie, instead of
        decoding them into a cache first. It requires native kernels, all weights in memory, prefill in
        floats, and another drafter than "nested".
      memory_bytes: most memory for weights, caches and activations together; 0 for no limit. Where it is less
        than the model needs, layers are read from storage each time they are used (see
        `jaxllm.serving.weights`). The runtime itself (Python, JAX, compiled buckets) comes on top.
      storage: how they are read.
      read_ahead: whether the next layer is read while one is computed; False only for measurements.
      experts: how experts that are stored apart are cached and predicted where memory is too small for all.
      prefill: how an int8 bundle with a calibration prefills (see `jaxllm.serving.int8_prefill`).
      trees: sizes of token trees, where the model drafts or verifies (see `jaxllm.serving.speculation`).
      levels: of an elastic bundle to serve besides the whole model, in percent, ascending.
      prompt_rows: whether rows may stand in place of a prompt's tokens (see
        `jaxllm.serving.ground.prompt_rows`): buckets are made for them. It requires all weights in memory;
        such prompts are prefilled in floats.
      buckets_bytes: most bytes of compiled buckets kept on disk for the next start; 0 keeps none and reads
        none. None: $JAXLLM_BUCKETS_BYTES, else 1 GiB (0 on systems whose files have no owners).
    """

    context_tokens: int = option(0, low=0)
    chunk_tokens: tuple[int, ...] = option((), ascending=True)
    exact_chunks: bool = False
    cache_tokens: tuple[int, ...] = option((), low=1, ascending=True)
    decode_block: int = option(16, low=1, high=256)
    batch_rows: tuple[int, ...] = option((), ascending=True)
    score_tokens: int = option(0, low=0)
    activation_dtype: str = ""
    cache_dtype: str = ""
    adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ()
    kv_codec: str = ""
    kv_chunk_tokens: int = option(KV_CHUNK_TOKENS, low=1, high=256)
    attend_coded: bool = False
    memory_bytes: int = option(0, low=0)
    storage: Storage = dataclasses.field(default_factory=Storage)
    read_ahead: bool = True
    experts: ExpertOptions = dataclasses.field(default_factory=ExpertOptions)
    prefill: PrefillOptions = dataclasses.field(default_factory=PrefillOptions)
    trees: TreeShape | None = None
    levels: tuple[int, ...] = option((), low=1, high=WHOLE, ascending=True)
    prompt_rows: bool = False
    buckets_bytes: int | None = option(None, low=0)

    def __post_init__(self) -> None:
        check_options(self)
        for name, allowed in (("chunk_tokens", CHUNK_TOKENS), ("batch_rows", BATCH_ROWS)):
            if not set(getattr(self, name)) <= set(allowed):
                raise ConfigError(f"{name} must be among {allowed}, got {getattr(self, name)}")
        # The whole model is always served.
        object.__setattr__(self, "levels", tuple(level for level in self.levels if level != WHOLE))
        if self.activation_dtype not in ("", "float32", "bfloat16"):
            raise ConfigError(f"activation_dtype must be float32 or bfloat16, got {self.activation_dtype!r}")
        if self.cache_dtype not in ("", "float32", "bfloat16", "float16"):
            raise ConfigError(f"cache_dtype must be float32, bfloat16 or float16, got {self.cache_dtype!r}")
        if self.attend_coded and not self.kv_codec:
            raise ConfigError("attend_coded takes chunks of contexts: name a kv_codec, too")
        if self.kv_codec:
            # Checks the name.
            self.chunk_format  # noqa: B018
        if self.adapter_targets and not self.adapter_rank:
            raise ConfigError("adapter_targets need an adapter_rank")
        # Checks both.
        LoraConfig(rank=self.adapter_rank, targets=self.adapter_targets or LoraConfig.targets)

    @property
    def chunk_format(self) -> ChunkFormat:
        """How chunks of contexts are stored.

        Raises:
          ConfigError: no codec was named, or an unknown one.
        """
        return ChunkFormat.named(self.kv_codec, self.kv_chunk_tokens)

    @property
    def recomputed_chunks(self) -> tuple[int, ...]:
        """Numbers of chunks of a context that can be computed together, ascending: those that fill a prefill
        chunk."""
        size = self.kv_chunk_tokens
        return tuple(tokens // size for tokens in self.chunk_tokens if tokens % size == 0)

    def source_tokens(self, cfg: ModelConfig) -> int:
        """The longest source of an encoder-decoder, where these options are resolved; 0 of other models."""
        return 0 if cfg.encoder is None else min(cfg.encoder.window_tokens, self.context_tokens)

    def resolve(
        self, cfg: ModelConfig, backend: str | None = None, *, quantized: bool = False
    ) -> "EngineOptions":
        """These options with every choice made for `cfg` on `backend` (default: JAX's own).

        Args:
          cfg: of the model.
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
        # Native attention reads the true length, and memory is taken as it fills.
        one_cache = native_cpu and cache_dtype in ("float32", "float16")
        caches = self.cache_tokens or ((context,) if one_cache else cache_lengths(context))
        if caches[-1] != context:
            raise ConfigError(f"the longest of cache_tokens {caches} must equal context_tokens {context}")
        exact = native_cpu and quantized and self.prefill.processors == 1
        chunks = self.chunk_tokens or _chunk_lengths(cfg, on_cpu=on_cpu, exact=exact)
        targets = self.adapter_targets or LoraConfig.targets if self.adapter_rank else ()
        # A chunk longer than the context never pays; keep at least the shortest.
        chunks = tuple(c for c in chunks if c < 2 * context) or chunks[:1]
        if cfg.states is not None and (self.kv_codec not in ("", "raw") or self.attend_coded):
            raise ConfigError(
                f"contexts of {cfg.model_type} are kept as they are, for its states go with exactly these "
                "keys and values: kv_codec must be raw, without attend_coded"
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
    """Default lengths of chunks."""
    if not on_cpu:
        return _ACCELERATOR_CHUNK_TOKENS
    if not exact:
        return CPU_CHUNK_TOKENS
    # What XLA computes between kernels it computes for padding, too.
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
