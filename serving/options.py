"""What an engine may be told: sizes of its graphs and caches, and its dtype."""

import dataclasses

import jax

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError

CHUNK_TOKENS = (16, 32, 64, 128, 256, 512)
DEFAULT_CONTEXT_TOKENS = 2048
# On a CPU a chunk of 16 costs little more than a token, and 256 tokens are enough rows to keep the
# cores busy; accelerators want more rows and fewer graphs.
_CPU_CHUNKS = (16, 64, 256)
_ACCELERATOR_CHUNKS = (32, 128, 512)
_SHORTEST_CACHE_TOKENS = 512
_CACHE_GROWTH = 4
_MAX_DECODE_BLOCK = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Shapes of an engine's graphs. Zeros and empty values mean: choose for this device and model.

    Attributes:
      context_tokens: most tokens of prompt and answer together; at most the model's window.
      chunk_tokens: prefill chunk lengths, ascending powers of two from 16 to 512.
      cache_tokens: cache lengths, ascending; a sequence moves into the next one as it grows.
      decode_block: most tokens decoded per dispatch.
      activation_dtype: "float32" or "bfloat16".
    """

    context_tokens: int = 0
    chunk_tokens: tuple[int, ...] = ()
    cache_tokens: tuple[int, ...] = ()
    decode_block: int = 16
    activation_dtype: str = ""

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
        if self.activation_dtype not in ("", "float32", "bfloat16"):
            raise ConfigError(f"activation_dtype must be float32 or bfloat16, got {self.activation_dtype!r}")

    def resolve(self, cfg: ModelConfig, backend: str | None = None) -> "EngineOptions":
        """These options with every choice made for `cfg` on `backend` (default: JAX's own).

        Raises:
          ConfigError: the context does not fit the model's window, or the caches do not hold it.
        """
        on_cpu = (backend or jax.default_backend()) == "cpu"
        context = self.context_tokens or min(cfg.window_tokens, DEFAULT_CONTEXT_TOKENS)
        if context > cfg.window_tokens:
            raise ConfigError(
                f"context_tokens {context} is more than the model's window of {cfg.window_tokens} "
                "tokens; ask for less"
            )
        caches = self.cache_tokens or _cache_lengths(context)
        if caches[-1] != context:
            raise ConfigError(f"the longest of cache_tokens {caches} must equal context_tokens {context}")
        chunks = self.chunk_tokens or (_CPU_CHUNKS if on_cpu else _ACCELERATOR_CHUNKS)
        # A chunk longer than the context never pays; keep at least the shortest.
        chunks = tuple(c for c in chunks if c < 2 * context) or chunks[:1]
        return dataclasses.replace(
            self,
            context_tokens=context,
            chunk_tokens=chunks,
            cache_tokens=caches,
            activation_dtype=self.activation_dtype or ("float32" if on_cpu else "bfloat16"),
        )


def _cache_lengths(context: int) -> tuple[int, ...]:
    lengths = []
    length = _SHORTEST_CACHE_TOKENS
    while length < context:
        lengths.append(length)
        length *= _CACHE_GROWTH
    return (*lengths, context)
