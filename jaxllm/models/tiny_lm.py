"""The tiny LM: an encoder with two heads, which score a prompt's tokens and propose a level and a prompt
ratio.

ELMS (arXiv 2409.09071), section 3.3, dual-head TLM: the score head gives every token a keep score; the
decision head predicts, from the request's SLO, whose marks are tokens before the prompt, the level and the
share of the prompt to use. The heads share the encoder's bottom layers and have separate top layers, so
that training one leaves the other unchanged. Parameters have the names of `encoder/mobilebert.py` in a flat
dict:

    embed.*, layers.{i}.*                      shared by both, i < shared layers
    score.layers.{i}.*     score.keep [1, D]   score.keep_bias [1]
    decide.layers.{i}.*    decide.model [levels, D]    decide.prompt [prompt levels, D]   (+ their _bias)

Levels and kept tokens are chosen by the planner.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.errors import ConfigError
from jaxllm.layer_configs import require, require_int
from jaxllm.models.encoder.config import EncoderConfig
from jaxllm.models.encoder.mobilebert import (
    Params,
    Shape,
    embed_tokens,
    embedding_shapes,
    encode_layers,
    encoder_shapes,
    init_values,
    layer_shapes,
)
from jaxllm.nn.linear import to_units
from jaxllm.quant import Weight

Head = Literal["score", "decide"]
HEADS: tuple[Head, ...] = ("score", "decide")
MAX_LEVELS = 1 << 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlmConfig:
    """Shape of one tiny LM.

    Attributes:
      encoder: the encoder of each head, shared and own layers together.
      shared_layers: number of bottom layers that both heads share; the others exist once per head.
      levels: number of sub-models to choose from.
      prompt_levels: number of shares of the prompt to choose from.
    """

    encoder: EncoderConfig
    shared_layers: int
    levels: int
    prompt_levels: int

    def __post_init__(self) -> None:
        require(
            isinstance(self.encoder, EncoderConfig),
            f"encoder must be an EncoderConfig, got {self.encoder!r:.80}",
        )
        require_int("shared_layers", self.shared_layers, 0, self.encoder.layers)
        require_int("levels", self.levels, 1, MAX_LEVELS)
        require_int("prompt_levels", self.prompt_levels, 1, MAX_LEVELS)

    @property
    def own_layers(self) -> range:
        """Indices of the layers that exist once per head."""
        return range(self.shared_layers, self.encoder.layers)

    def to_json(self) -> dict[str, Any]:
        """The config as a plain dict for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "TlmConfig":
        """Reads a dict made by `to_json`.

        Raises:
          ConfigError: a key is unknown or missing, or a value is out of range.
        """
        try:
            return cls(**{**data, "encoder": EncoderConfig.from_json(data["encoder"])})
        except (TypeError, KeyError) as error:
            raise ConfigError(f"malformed tiny LM config: {error!r}") from error


def tlm_shapes(cfg: TlmConfig) -> dict[str, Shape]:
    """The shape of every parameter of the tiny LM by name."""
    shapes = embedding_shapes(cfg.encoder)
    for layer in range(cfg.shared_layers):
        shapes.update(layer_shapes(cfg.encoder, f"layers.{layer}."))
    for head in HEADS:
        for layer in cfg.own_layers:
            shapes.update(layer_shapes(cfg.encoder, f"{head}.layers.{layer}."))
        shapes.update(_output_shapes(cfg, head))
    return shapes


def init_tlm(cfg: TlmConfig, key: jax.Array) -> dict[str, jax.Array]:
    """Random parameters to train from (see `init_values`)."""
    return init_values(tlm_shapes(cfg), key)


def tlm_from_encoder(encoder_params: Params, cfg: TlmConfig, key: jax.Array) -> dict[str, Weight]:
    """A tiny LM from a trained encoder; both heads start from its top layers.

    Args:
      encoder_params: those of `encoder_shapes(cfg.encoder)`; the heads' layers are copies.

    Raises:
      ConfigError: the parameters belong to another encoder.
    """
    shapes = encoder_shapes(cfg.encoder)
    given = {name: tuple(each.shape) for name, each in encoder_params.items()}
    if wrong := sorted(name for name, _ in given.items() ^ shapes.items()):
        name = wrong[0]
        raise ConfigError(
            f"the encoder's parameters and its config disagree on {name}, whose shapes are {given.get(name)} "
            f"and {shapes.get(name)}; give its own"
        )
    outputs = {name: shape for head in HEADS for name, shape in _output_shapes(cfg, head).items()}
    fresh = init_values(outputs, key)
    sources = {name: name.removeprefix("score.").removeprefix("decide.") for name in tlm_shapes(cfg)}
    # Copies, because a training step donates its buffers, and a buffer can be donated only once.
    return {
        name: fresh[name] if name in fresh else jax.tree.map(jnp.array, encoder_params[source])
        for name, source in sources.items()
    }


def grow_vocabulary(
    params: Params, cfg: TlmConfig, extra: int, key: jax.Array
) -> tuple[dict[str, Weight], TlmConfig]:
    """Adds tokens at the end of the vocabulary, for the marks of SLOs.

    Their embeddings are orthogonal to each other, so that the heads distinguish them before any training
    (ELMS, section 3.3), and have the average norm of the others.

    Args:
      params: parameters with a word embedding of floats.
      cfg: config of the tiny LM.
      extra: number of tokens to add; their ids begin at the old `vocab_size`.
      key: PRNG key of their directions.

    Returns:
      The parameters and the config with the new vocabulary.

    Raises:
      ConfigError: `extra` exceeds the embedding size, or the word embedding is quantized.
    """
    require_int("extra tokens", extra, 1, cfg.encoder.embedding_size)
    embedding = _array(params, "embed.tokens")
    grown = {**params, "embed.tokens": jnp.concatenate([embedding, _orthogonal_rows(embedding, extra, key)])}
    encoder = dataclasses.replace(cfg.encoder, vocab_size=cfg.encoder.vocab_size + extra)
    return grown, dataclasses.replace(cfg, encoder=encoder)


def separate_tokens(params: Params, ids: Sequence[int], key: jax.Array) -> dict[str, Weight]:
    """Gives reserved tokens of the vocabulary orthogonal embeddings, as `grow_vocabulary` does for added
    ones.

    Args:
      params: parameters with a word embedding of floats.
      ids: different token ids, at most as many as the embedding size.
      key: PRNG key of their directions.

    Raises:
      ConfigError: the word embedding is quantized.
    """
    embedding = _array(params, "embed.tokens")
    rows = _orthogonal_rows(embedding, len(ids), key)
    return {**params, "embed.tokens": embedding.at[jnp.asarray(ids, jnp.int32)].set(rows)}


def score(
    params: Params, tokens: jax.Array, mask: jax.Array, *, cfg: TlmConfig, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Scores of keeping each token.

    Args:
      params: see the module docstring; matrices may be quantized or adapted.
      tokens: `[B, T]` int32.
      mask: `[B, T]` bool, True = a real token.

    Returns:
      `[B, T]` float32, the logit of keeping: the difference of the logits of the paper's two classes. Values
      at padding are undefined.
    """
    return _head(params, _shared(params, tokens, mask, cfg, dtype), mask, cfg, "score")[0][..., 0]


def decide(
    params: Params, tokens: jax.Array, mask: jax.Array, *, cfg: TlmConfig, dtype: DTypeLike = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """Logits of levels and prompt ratios; arguments are those of `score`.

    They are computed from the first token of each sequence, which must be real: a mark, or the first token of
    every text.

    Returns:
      Logits of the model's levels `[B, levels]` and of the prompt's `[B, prompt_levels]`, float32.
    """
    return _head(params, _shared(params, tokens, mask, cfg, dtype), mask, cfg, "decide")


def forward_both(
    params: Params, tokens: jax.Array, mask: jax.Array, *, cfg: TlmConfig, dtype: DTypeLike = jnp.float32
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """`score` and `decide` of the same tokens, with the shared layers run once."""
    hidden = _shared(params, tokens, mask, cfg, dtype)
    keep = _head(params, hidden, mask, cfg, "score")[0][..., 0]
    return keep, _head(params, hidden, mask, cfg, "decide")


def _array(params: Params, name: str) -> jax.Array:
    found = params[name]
    if not isinstance(found, jax.Array | np.ndarray):
        raise ConfigError("the word embedding is quantized or adapted; change its tokens before that")
    return jnp.asarray(found)


def _orthogonal_rows(embedding: jax.Array, count: int, key: jax.Array) -> jax.Array:
    """`count` orthogonal embeddings `[count, Z]` in the dtype of `embedding`, with the average norm of its
    rows."""
    basis, _ = jnp.linalg.qr(jax.random.normal(key, (embedding.shape[1], count), jnp.float32))
    length = jnp.mean(jnp.linalg.norm(embedding.astype(jnp.float32), axis=-1))
    return (basis.T * length).astype(embedding.dtype)


def _shared(
    params: Params, tokens: jax.Array, mask: jax.Array, cfg: TlmConfig, dtype: DTypeLike
) -> jax.Array:
    hidden = embed_tokens(params, tokens, mask, cfg=cfg.encoder, dtype=dtype)
    return encode_layers(params, hidden, mask, cfg=cfg.encoder, layers=range(cfg.shared_layers))


def _head(params: Params, hidden: jax.Array, mask: jax.Array, cfg: TlmConfig, head: Head) -> Any:
    """The outputs of a head, float32: of all tokens, or of the first one to decide."""
    first = 1 if head == "decide" else None
    layers, prefix = cfg.own_layers, f"{head}."
    hidden = encode_layers(params, hidden, mask, cfg=cfg.encoder, layers=layers, prefix=prefix, first=first)
    hidden = hidden if first is None else hidden[:, 0]
    names = [name for name in _output_shapes(cfg, head) if not name.endswith("_bias")]
    outs = (to_units(hidden, params[each], _array(params, f"{each}_bias")) for each in names)
    return tuple(out.astype(jnp.float32) for out in outs)


def _output_shapes(cfg: TlmConfig, head: Head) -> dict[str, Shape]:
    sizes = {"keep": 1} if head == "score" else {"model": cfg.levels, "prompt": cfg.prompt_levels}
    weights = {f"{head}.{name}": (size, cfg.encoder.hidden_size) for name, size in sizes.items()}
    return weights | {f"{head}.{name}_bias": (size,) for name, size in sizes.items()}
