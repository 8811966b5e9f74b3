"""What an engine may be told: sizes of its graphs and caches, its dtype, and what it keeps on disk."""

import dataclasses

import jax

from jaxllm.config import WHOLE, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.kernels import native
from jaxllm.kv.chunks import CHUNK_TOKENS as KV_CHUNK_TOKENS
from jaxllm.kv.codecs import ChunkFormat
from jaxllm.models.lora import LoraConfig
from serving.host.direct_io import Storage
from serving.host.user_cache import executables_bytes
from serving.int8_prefill.options import PrefillOptions
from serving.speculation.options import TreeShape
from serving.weights.experts.options import ExpertOptions

CHUNK_TOKENS = (16, 32, 64, 128, 256, 512)
DEFAULT_CONTEXT_TOKENS = 2048
# On a CPU a chunk of 16 costs little more than a token, and 256 tokens are enough rows to keep the
# cores busy; accelerators want more rows and fewer graphs.
CPU_CHUNK_TOKENS = (16, 64, 256)
_ACCELERATOR_CHUNK_TOKENS = (32, 128, 512)
_SHORTEST_CACHE_TOKENS = 512
_CACHE_GROWTH = 4
_MAX_DECODE_BLOCK = 256
_MAX_KV_CHUNK_TOKENS = 256
_CPU_SCORE_TOKENS = 2048
_ACCELERATOR_SCORE_TOKENS = 16384


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Shapes of an engine's graphs. Zeros and empty values mean: choose for this device and model.

    Attributes:
      context_tokens: most tokens of prompt and answer together; at most the model's window.
      chunk_tokens: prefill chunk lengths, ascending powers of two from 16 to 512.
      cache_tokens: cache lengths, ascending; a sequence moves into the next one as it grows.
      decode_block: most tokens decoded per dispatch.
      score_tokens: tokens per dispatch, padding included, where many short texts are scored at once.
      activation_dtype: "float32" or "bfloat16".
      cache_dtype: of keys and values: "float32", "bfloat16" or "float16". Left to choose, it is float16
        where native kernels serve quantized weights, else the activations'.
      adapter_rank: highest rank of the low-rank adapters that may be put on the model while it runs (see
        `Engine.set_adapter`); 0 for none, and faster products.
      adapter_targets: of `jaxllm.models.lora.TARGETS`, what they may change; by default all
        matrices of layers.
      kv_codec: how contexts that outlive calls are stored: a name of `jaxllm.kv.codecs.CODECS`, or "raw".
        Empty where there are none: no graphs are made for them, and nobody counts what is attended to.
      kv_chunk_tokens: of a stored chunk.
      memory_bytes: most memory for weights, caches and activations together; 0 for no limit. Where it is less
        than the model needs, layers are read from storage each time they are used (see
        `serving.weights`). What the runtime itself takes (Python, JAX, compiled graphs) comes on top.
      storage: how they are read.
      read_ahead: whether the next layer is read while one is computed; only to measure what that brings.
      experts: of a mixture whose experts are stored apart, how they are kept and foreseen where there is too
        little memory for all.
      prefill: how prompts are read by an int8 bundle with a calibration (see `serving.int8_prefill`).
      trees: sizes of token trees, where the model drafts or verifies (see `serving.speculation`).
      levels: of an elastic bundle those to serve besides the whole model, in percent, ascending.
      executables_bytes: most bytes of compiled graphs kept on disk for the next start; 0 keeps and reads
        none. None: $JAXLLM_EXECUTABLES_BYTES, else 1 GiB (none where files have no owners).
    """

    context_tokens: int = 0
    chunk_tokens: tuple[int, ...] = ()
    cache_tokens: tuple[int, ...] = ()
    decode_block: int = 16
    score_tokens: int = 0
    activation_dtype: str = ""
    cache_dtype: str = ""
    adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ()
    kv_codec: str = ""
    kv_chunk_tokens: int = KV_CHUNK_TOKENS
    memory_bytes: int = 0
    storage: Storage = dataclasses.field(default_factory=Storage)
    read_ahead: bool = True
    experts: ExpertOptions = dataclasses.field(default_factory=ExpertOptions)
    prefill: PrefillOptions = dataclasses.field(default_factory=PrefillOptions)
    trees: TreeShape | None = None
    levels: tuple[int, ...] = ()
    executables_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.context_tokens < 0:
            raise ConfigError(f"context_tokens must be positive, got {self.context_tokens}")
        if not set(self.chunk_tokens) <= set(CHUNK_TOKENS):
            raise ConfigError(f"chunk_tokens must be among {CHUNK_TOKENS}, got {self.chunk_tokens}")
        if list(self.chunk_tokens) != sorted(set(self.chunk_tokens)):
            raise ConfigError(f"chunk_tokens must be ascending, got {self.chunk_tokens}")
        if list(self.cache_tokens) != sorted(set(self.cache_tokens)) or min(self.cache_tokens, default=1) < 1:
            raise ConfigError(f"cache_tokens must be ascending and positive, got {self.cache_tokens}")
        if not 1 <= self.decode_block <= _MAX_DECODE_BLOCK:
            raise ConfigError(f"decode_block must be in [1, {_MAX_DECODE_BLOCK}], got {self.decode_block}")
        percents = all(type(level) is int and 1 <= level <= WHOLE for level in self.levels)
        if not percents or list(self.levels) != sorted(set(self.levels)):
            raise ConfigError(f"levels must be ascending percentages, got {self.levels}")
        # The whole model is always served.
        object.__setattr__(self, "levels", tuple(level for level in self.levels if level != WHOLE))
        if self.score_tokens < 0:
            raise ConfigError(f"score_tokens must not be negative, got {self.score_tokens}; 0 chooses")
        if self.activation_dtype not in ("", "float32", "bfloat16"):
            raise ConfigError(f"activation_dtype must be float32 or bfloat16, got {self.activation_dtype!r}")
        if self.cache_dtype not in ("", "float32", "bfloat16", "float16"):
            raise ConfigError(f"cache_dtype must be float32, bfloat16 or float16, got {self.cache_dtype!r}")
        if not 1 <= self.kv_chunk_tokens <= _MAX_KV_CHUNK_TOKENS:
            raise ConfigError(
                f"kv_chunk_tokens must be in [1, {_MAX_KV_CHUNK_TOKENS}], got {self.kv_chunk_tokens}"
            )
        if self.kv_codec:
            # Checks the name.
            self.chunk_format  # noqa: B018
        if self.memory_bytes < 0:
            raise ConfigError(f"memory_bytes must not be negative, got {self.memory_bytes}; 0 for no limit")
        if self.adapter_targets and not self.adapter_rank:
            raise ConfigError("adapter_targets need an adapter_rank")
        # Checks both.
        LoraConfig(rank=self.adapter_rank, targets=self.adapter_targets or LoraConfig.targets)
        if self.executables_bytes is not None and self.executables_bytes < 0:
            raise ConfigError(
                f"executables_bytes must not be negative, got {self.executables_bytes}; 0 keeps none"
            )

    @property
    def chunk_format(self) -> ChunkFormat:
        """How chunks of contexts are stored.

        Raises:
          ConfigError: no codec was named, or one that there is not.
        """
        return ChunkFormat.named(self.kv_codec, self.kv_chunk_tokens)

    @property
    def recomputed_chunks(self) -> tuple[int, ...]:
        """How many chunks of a context can be computed together, ascending: as many as prefill's graphs take
        tokens."""
        size = self.kv_chunk_tokens
        return tuple(tokens // size for tokens in self.chunk_tokens if tokens % size == 0)

    def resolve(
        self, cfg: ModelConfig, backend: str | None = None, *, quantized: bool = False
    ) -> "EngineOptions":
        """These options with every choice made for `cfg` on `backend` (default: JAX's own).

        `quantized` says that the weights are int8 or int4.

        Raises:
          ConfigError: the context does not fit the model's window, the caches do not hold it, or
            $JAXLLM_EXECUTABLES_BYTES is no size.
        """
        on_cpu = (backend or jax.default_backend()) == "cpu"
        context = self.context_tokens or min(cfg.window_tokens, DEFAULT_CONTEXT_TOKENS)
        if context > cfg.window_tokens:
            raise ConfigError(
                f"context_tokens {context} is more than the model's window of {cfg.window_tokens} "
                "tokens; ask for less"
            )
        caches = self.cache_tokens or cache_lengths(context)
        if caches[-1] != context:
            raise ConfigError(f"the longest of cache_tokens {caches} must equal context_tokens {context}")
        chunks = self.chunk_tokens or (CPU_CHUNK_TOKENS if on_cpu else _ACCELERATOR_CHUNK_TOKENS)
        targets = self.adapter_targets or LoraConfig.targets if self.adapter_rank else ()
        # A chunk longer than the context never pays; keep at least the shortest.
        chunks = tuple(c for c in chunks if c < 2 * context) or chunks[:1]
        if self.kv_codec and context < self.kv_chunk_tokens:
            raise ConfigError(f"kv_chunk_tokens {self.kv_chunk_tokens} is more than the context of {context}")
        if self.kv_codec and all(tokens % self.kv_chunk_tokens for tokens in chunks):
            raise ConfigError(
                f"kv_chunk_tokens {self.kv_chunk_tokens} divides none of chunk_tokens {chunks}: no lost "
                "chunk of a context could be computed again; choose a divisor"
            )
        activation_dtype = self.activation_dtype or ("float32" if on_cpu else "bfloat16")
        half_cache = on_cpu and quantized and native.kernels().native
        return dataclasses.replace(
            self,
            context_tokens=context,
            chunk_tokens=chunks,
            cache_tokens=caches,
            score_tokens=self.score_tokens or (_CPU_SCORE_TOKENS if on_cpu else _ACCELERATOR_SCORE_TOKENS),
            activation_dtype=activation_dtype,
            cache_dtype=self.cache_dtype or ("float16" if half_cache else activation_dtype),
            adapter_targets=targets,
            executables_bytes=executables_bytes()
            if self.executables_bytes is None
            else self.executables_bytes,
        )


def cache_lengths(context: int) -> tuple[int, ...]:
    """Lengths of caches that a context is worth, ascending; the last is its own."""
    lengths = []
    length = _SHORTEST_CACHE_TOKENS
    while length < context:
        lengths.append(length)
        length *= _CACHE_GROWTH
    return (*lengths, context)
