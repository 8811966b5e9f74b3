"""The bucket table as flat, named signatures, and their traces.

One signature per level and number of new tokens, all over one cache length (see `jaxllm.programs.steps` for
names and shapes). Chunk lengths are the engine's, so that a loop over programs cuts prompts as it does.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from export.subject import Subject
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.programs.manifest import WHOLE, Kind, Signature, cache_shapes
from jaxllm.programs.steps import run_step, run_tree

DEFAULT_CONTEXT_TOKENS = 2048
DEFAULT_CHUNKS = (16, 64, 256)
_MAX_TREE = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """Which programs are made.

    Attributes:
      context_tokens: room of the caches; 0 chooses the model's window, up to 2048.
      chunk_tokens: prefill chunk lengths, ascending.
      verify_tokens: sizes of token trees that programs verify; also how text is scored in few calls.
      levels: of an elastic bundle, in percent, besides the whole model.
    """

    context_tokens: int = 0
    chunk_tokens: tuple[int, ...] = DEFAULT_CHUNKS
    verify_tokens: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("chunk_tokens", 2), ("verify_tokens", 2), ("levels", 1)):
            values = getattr(self, name)
            if list(values) != sorted(set(values)) or min(values, default=least) < least:
                raise ConfigError(f"{name} must be ascending and at least {least}, got {values}")
        if not self.chunk_tokens:
            raise ConfigError("chunk_tokens is empty; name at least one prefill chunk length")
        if max(self.verify_tokens, default=0) > _MAX_TREE:
            raise ConfigError(f"verify_tokens must be at most {_MAX_TREE}, got {self.verify_tokens}")
        if max(self.levels, default=WHOLE) > WHOLE:
            raise ConfigError(f"levels are percentages, got {self.levels}")

    def resolved(self, cfg: ModelConfig) -> "ExportPlan":
        """With a context that fits the model, and no chunk longer than it.

        Raises:
          ConfigError: the context is longer than the model's window.
        """
        context = self.context_tokens or min(cfg.window_tokens, DEFAULT_CONTEXT_TOKENS)
        if not 1 <= context <= cfg.window_tokens:
            raise ConfigError(
                f"a context of {context} tokens does not fit the model's window of {cfg.window_tokens}"
            )
        chunks = tuple(each for each in self.chunk_tokens if each <= context)
        if not chunks:
            raise ConfigError(f"no chunk of {self.chunk_tokens} tokens fits the context of {context}")
        if max(self.verify_tokens, default=0) > context:
            raise ConfigError(f"trees of {self.verify_tokens[-1]} nodes do not fit the context of {context}")
        return dataclasses.replace(self, context_tokens=context, chunk_tokens=chunks)

    def signatures(self, level: int, file: Callable[[str], str]) -> list[Signature]:
        """The signatures of a level; `file` says where one of a name is kept."""
        sizes: list[tuple[Kind, Sequence[int]]] = [
            ("prefill", self.chunk_tokens),
            ("decode", (1,)),
            ("verify", self.verify_tokens),
        ]
        found = []
        for kind, tokens in sizes:
            for count in tokens:
                bare = Signature(kind=kind, tokens=count, level=level, file="")
                found.append(dataclasses.replace(bare, file=file(bare.name)))
        return found


def step_of(signature: Signature, cfg: ModelConfig, dtype: np.dtype) -> Callable[..., dict[str, jax.Array]]:
    """The function `(weights, caches, tokens, input_pos[, mask])` that a signature is, to be traced in
    `portable_graphs`."""
    if signature.kind == "verify":
        return functools.partial(run_tree, cfg=cfg, dtype=dtype)
    return functools.partial(run_step, cfg=cfg, dtype=dtype, with_logits=signature.kind == "decode")


def step_shapes(
    signature: Signature, subject: Subject, context_tokens: int, dtype: np.dtype, cache_dtype: np.dtype
) -> tuple[Any, ...]:
    """The shapes of a signature's arguments, in order."""
    level = subject.levels[signature.level]
    weights = {
        name: jax.ShapeDtypeStruct(each.shape, subject.arrays[each.stored].dtype)
        for name, each in level.weights.items()
    }
    caches = {
        name: jax.ShapeDtypeStruct(shape, cache_dtype)
        for name, shape in cache_shapes(level.cfg, context_tokens).items()
    }
    count = signature.tokens
    tokens = jax.ShapeDtypeStruct((1, count), jnp.int32)
    shapes = (weights, caches, tokens, jax.ShapeDtypeStruct((count,), jnp.int32))
    mask = jax.ShapeDtypeStruct((count, count), jnp.bool_)
    return (*shapes, mask) if signature.kind == "verify" else shapes


def example_inputs(signature: Signature, cfg: ModelConfig, context_tokens: int) -> tuple[np.ndarray, ...]:
    """Tokens, positions and, for a tree, a mask to try a program with: a chunk whose last token is padding,
    or a tree of two branches."""
    count = signature.tokens
    draw = np.random.default_rng(count)
    tokens = draw.integers(0, cfg.vocab_size, (1, count)).astype(np.int32)
    start = min(3, context_tokens - count)
    positions = np.arange(start, start + count, dtype=np.int32)
    if signature.kind != "verify":
        if count > 1:
            positions[-1] = 0
        return tokens, positions
    mask = np.tril(np.ones((count, count), np.bool_))
    # The last node is a second child of the root.
    mask[-1, 1:-1] = False
    positions[-1] = start + 1
    return tokens, positions, mask
