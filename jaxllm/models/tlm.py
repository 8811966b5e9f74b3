"""The tiny LM: an encoder with two heads, which choose a request's sub-model and shorten its prompt.

ELMS (elasticized LLMs on mobile devices), the dual-head tiny language model: the score head says of every
token whether to keep it, the decision head says from the request's SLO, whose marks are tokens in front of
the prompt, how much of model and prompt to use. The heads share the encoder's bottom layers and have top
layers of their own, so that training one does not disturb the other. The parameters of `encoder/parameters`
in a flat dict:

    embed.*, layers.{i}.*                      what both share, i < shared layers
    score.layers.{i}.*     score.keep [1, D]   score.keep_bias [1]
    decide.layers.{i}.*    decide.model [levels, D]    decide.prompt [prompt levels, D]   (+ their _bias)

What levels are and how many tokens are kept is the planner's business.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.encoder.config import EncoderConfig, require, require_whole
from jaxllm.encoder.forward import embed_tokens, encode_layers
from jaxllm.encoder.parameters import (
    Params,
    Shape,
    embedding_shapes,
    encoder_shapes,
    init_values,
    layer_shapes,
)
from jaxllm.errors import ConfigError
from jaxllm.linear import to_units
from jaxllm.quant import Weight

Head = Literal["score", "decide"]
HEADS: tuple[Head, ...] = ("score", "decide")
MAX_LEVELS = 1 << 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlmConfig:
    """Shape of one tiny LM.

    Attributes:
      encoder: of each head, whole.
      shared_layers: how many of its bottom layers both heads share; the others exist once per head.
      levels: sub-models to choose from.
      prompt_levels: shares of the prompt to choose from.
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
        require_whole(self, 0, self.encoder.layers, "shared_layers")
        require_whole(self, 1, MAX_LEVELS, "levels", "prompt_levels")

    @property
    def own_layers(self) -> range:
        """The layers that each head has for itself."""
        return range(self.shared_layers, self.encoder.layers)

    def to_json(self) -> dict[str, Any]:
        """A plain dict that `from_json` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "TlmConfig":
        """Read what `to_json` wrote.

        Raises:
          ConfigError: a key is unknown or missing, or a value is out of its domain.
        """
        try:
            return cls(**{**data, "encoder": EncoderConfig.from_json(data["encoder"])})
        except (TypeError, KeyError) as error:
            raise ConfigError(f"malformed tiny LM config: {error!r}") from error


def tlm_shapes(cfg: TlmConfig) -> dict[str, Shape]:
    """Every parameter of the tiny LM."""
    shapes = embedding_shapes(cfg.encoder)
    for layer in range(cfg.shared_layers):
        shapes.update(layer_shapes(cfg.encoder, f"layers.{layer}."))
    for head in HEADS:
        for layer in cfg.own_layers:
            shapes.update(layer_shapes(cfg.encoder, f"{head}.layers.{layer}."))
        shapes.update(_output_shapes(cfg, head))
    return shapes


def init_tlm(cfg: TlmConfig, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> dict[str, jax.Array]:
    """Random parameters to train from (see `init_values`)."""
    return init_values(tlm_shapes(cfg), key, dtype)


def tlm_from_encoder(encoder_params: Params, cfg: TlmConfig, key: jax.Array) -> dict[str, Weight]:
    """A tiny LM from a trained encoder, whose top layers both heads begin with.

    Args:
      encoder_params: those of `encoder_shapes(cfg.encoder)`; the heads' layers are copies.
      cfg: the tiny LM.
      key: of the heads' random outputs.

    Raises:
      ConfigError: the parameters are of another encoder.
    """
    shapes = encoder_shapes(cfg.encoder)
    if wrong := encoder_params.keys() ^ shapes.keys():
        raise ConfigError(f"the encoder's parameters and its config disagree on {min(wrong)}; give its own")
    for name, shape in shapes.items():
        if tuple(encoder_params[name].shape) != shape:
            raise ConfigError(
                f"the encoder's parameter {name} has shape {list(encoder_params[name].shape)} but the config "
                f"implies {list(shape)}; give its own"
            )
    outputs = {name: shape for head in HEADS for name, shape in _output_shapes(cfg, head).items()}
    fresh = init_values(outputs, key)
    sources = {name: name for name in tlm_shapes(cfg)}
    for head in HEADS:
        sources |= _encoder_names(cfg, head)
    # Copies, because a training step gives its buffers away, each only once.
    return {
        name: fresh[name] if name in fresh else jax.tree.map(jnp.array, encoder_params[source])
        for name, source in sources.items()
    }


def head_encoder(params: Params, cfg: TlmConfig, head: Head) -> dict[str, Weight]:
    """The encoder that one head stands on, shared and own layers, under the names of `encoder_shapes`."""
    place = {name: name for name in encoder_shapes(cfg.encoder)}
    place |= {name: own for own, name in _encoder_names(cfg, head).items()}
    return {name: params[where] for name, where in place.items()}


def grow_vocabulary(
    params: Params, cfg: TlmConfig, extra: int, key: jax.Array
) -> tuple[dict[str, Weight], TlmConfig]:
    """Adds tokens behind the vocabulary, for the marks of SLOs.

    Their embeddings are orthogonal to each other, so that the heads can tell them apart from the beginning
    (ELMS, on the tiny LM's input), and as long as the others are on average.

    Args:
      params: with a word embedding of floats.
      cfg: the tiny LM.
      extra: how many; their ids begin at the old `vocab_size`.
      key: of their directions.

    Returns:
      The parameters and the config with the new vocabulary.

    Raises:
      ConfigError: there cannot be so many orthogonal embeddings, or the word embedding is quantized.
    """
    size = cfg.encoder.embedding_size
    whole = isinstance(extra, int) and not isinstance(extra, bool) and 1 <= extra <= size
    require(
        whole, f"extra tokens must be a whole number in [1, {size}], the size of an embedding, got {extra!r}"
    )
    table = _float_table(params)
    grown = {**params, "embed.tokens": jnp.concatenate([table, _orthogonal_rows(table, extra, key)])}
    encoder = dataclasses.replace(cfg.encoder, vocab_size=cfg.encoder.vocab_size + extra)
    return grown, dataclasses.replace(cfg, encoder=encoder)


def separate_tokens(params: Params, ids: Sequence[int], key: jax.Array) -> dict[str, Weight]:
    """Gives tokens of the vocabulary embeddings as `grow_vocabulary` does: for marks that it reserves.

    Args:
      params: with a word embedding of floats.
      ids: of different tokens, at most as many as an embedding is long.
      key: of their directions.

    Raises:
      ConfigError: the word embedding is quantized.
    """
    table = _float_table(params)
    rows = _orthogonal_rows(table, len(ids), key)
    return {**params, "embed.tokens": table.at[jnp.asarray(ids, jnp.int32)].set(rows)}


def score(
    params: Params, tokens: jax.Array, mask: jax.Array, *, cfg: TlmConfig, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """How much each token should be kept.

    Args:
      params: see the module docstring; matrices may be quantized or adapted.
      tokens: `[B, T]` int32.
      mask: `[B, T]` bool, True = a real token.
      cfg: the tiny LM.
      dtype: of the activations.

    Returns:
      `[B, T]` float32, the logit of keeping: one output, which is what the difference of two classes' logits
      can express. Those of padding mean nothing.
    """
    return _score(params, _shared(params, tokens, mask, cfg, dtype), mask, cfg)


def decide(
    params: Params, tokens: jax.Array, mask: jax.Array, *, cfg: TlmConfig, dtype: jnp.dtype = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """Which sub-model and how much of the prompt to use; arguments are those of `score`.

    It is read from the row's first token, which must be real: a mark, or what begins every text.

    Returns:
      Logits of the model's levels `[B, levels]` and of the prompt's `[B, prompt_levels]`, float32.
    """
    return _decide(params, _shared(params, tokens, mask, cfg, dtype), mask, cfg)


def forward_both(
    params: Params, tokens: jax.Array, mask: jax.Array, *, cfg: TlmConfig, dtype: jnp.dtype = jnp.float32
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """`score` and `decide` of the same tokens, with the shared layers run once."""
    hidden = _shared(params, tokens, mask, cfg, dtype)
    return _score(params, hidden, mask, cfg), _decide(params, hidden, mask, cfg)


def _float_table(params: Params) -> jax.Array:
    table = params["embed.tokens"]
    if not isinstance(table, jax.Array | np.ndarray):
        raise ConfigError("the word embedding is quantized or adapted; change its tokens before that")
    return jnp.asarray(table)


def _orthogonal_rows(table: jax.Array, count: int, key: jax.Array) -> jax.Array:
    """`[count, Z]` in the table's dtype, as long as its rows are on average."""
    basis, _ = jnp.linalg.qr(jax.random.normal(key, (table.shape[1], count), jnp.float32))
    length = jnp.mean(jnp.linalg.norm(table.astype(jnp.float32), axis=-1))
    return (basis.T * length).astype(table.dtype)


def _shared(
    params: Params, tokens: jax.Array, mask: jax.Array, cfg: TlmConfig, dtype: jnp.dtype
) -> jax.Array:
    hidden = embed_tokens(params, tokens, mask, cfg=cfg.encoder, dtype=dtype)
    return encode_layers(params, hidden, mask, cfg=cfg.encoder, layers=range(cfg.shared_layers))


def _own(
    params: Params,
    hidden: jax.Array,
    mask: jax.Array,
    cfg: TlmConfig,
    head: Head,
    first: int | None = None,
) -> jax.Array:
    layers, prefix = cfg.own_layers, f"{head}."
    return encode_layers(params, hidden, mask, cfg=cfg.encoder, layers=layers, prefix=prefix, first=first)


def _score(params: Params, hidden: jax.Array, mask: jax.Array, cfg: TlmConfig) -> jax.Array:
    return _output(params, "score.keep", _own(params, hidden, mask, cfg, "score"))[..., 0]


def _decide(
    params: Params, hidden: jax.Array, mask: jax.Array, cfg: TlmConfig
) -> tuple[jax.Array, jax.Array]:
    first = _own(params, hidden, mask, cfg, "decide", first=1)[:, 0]
    return _output(params, "decide.model", first), _output(params, "decide.prompt", first)


def _output(params: Params, name: str, hidden: jax.Array) -> jax.Array:
    bias = params[f"{name}_bias"]
    assert isinstance(bias, jax.Array | np.ndarray)
    return to_units(hidden, params[name], bias).astype(jnp.float32)


def _output_shapes(cfg: TlmConfig, head: Head) -> dict[str, Shape]:
    sizes = {"keep": 1} if head == "score" else {"model": cfg.levels, "prompt": cfg.prompt_levels}
    shapes: dict[str, Shape] = {}
    for name, size in sizes.items():
        shapes[f"{head}.{name}"] = (size, cfg.encoder.hidden_size)
        shapes[f"{head}.{name}_bias"] = (size,)
    return shapes


def _encoder_names(cfg: TlmConfig, head: Head) -> dict[str, str]:
    """The parameters of a head's own layers, and what each is called in an encoder."""
    names = [name for layer in cfg.own_layers for name in layer_shapes(cfg.encoder, f"layers.{layer}.")]
    return {f"{head}.{name}": name for name in names}
