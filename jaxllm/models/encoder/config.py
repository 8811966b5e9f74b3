"""The configuration of an encoder: frozen, hashable, validated when it is made.

`EncoderConfig` uses the terms of MobileBERT (arXiv 2004.02984, section 3); a BERT-like encoder is the case
without bottlenecks. Checkpoints are read by `checkpoints/encoder_folders.py`.
"""

import dataclasses
from typing import Any, Literal

from jaxllm.config import MAX_LAYERS, Activation
from jaxllm.errors import ConfigError
from jaxllm.layer_configs import require, require_int, require_types

# Far above MobileBERT's 4.
MAX_FFN_BLOCKS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Shape and mathematics of one encoder.

    Letters of shapes: V `vocab_size`, Z `embedding_size`, D `hidden_size`, W `width` (within a layer), N
    `heads`, H `head_dim`, F `ffn_size`, P `window_tokens`, Y `type_vocab_size`.

    Attributes:
      bottleneck_size: the width within a layer, between a matrix that narrows its input and one that widens
        its output; 0: no bottleneck, W = D.
      share_bottleneck: whether queries and keys are computed from a second narrowed input, values from the
        wide input.
      bottleneck_attention: whether queries, keys and values are all computed from the narrowed input. A
        layer with a bottleneck has either this or `share_bottleneck`.
      ffn_blocks: number of feed-forward blocks of a layer.
      trigram_input: whether a token's input is computed from its own and its two neighbours' embeddings.
      norm: type of norms; `no_norm` only scales and shifts.
      norm_eps: epsilon of layer norms.
      type_vocab_size: number of token types (first and second sentence).
      window_tokens: number of positions.
    """

    vocab_size: int
    embedding_size: int
    hidden_size: int
    layers: int
    heads: int
    ffn_size: int
    window_tokens: int
    model_type: Literal["mobilebert"] = "mobilebert"
    bottleneck_size: int = 0
    share_bottleneck: bool = False
    bottleneck_attention: bool = False
    ffn_blocks: int = 1
    trigram_input: bool = False
    norm: Literal["no_norm", "layer"] = "no_norm"
    norm_eps: float = 1e-12
    activation: Activation = "relu"
    type_vocab_size: int = 2

    def __post_init__(self) -> None:
        require_types(self)
        require_int("type_vocab_size", self.type_vocab_size, 1)
        require_int("layers", self.layers, 1, MAX_LAYERS)
        require_int("ffn_blocks", self.ffn_blocks, 1, MAX_FFN_BLOCKS)
        require(self.activation != "clamped_swiglu", "the activation clamped_swiglu is of experts alone")
        require(0 < self.norm_eps <= 1, f"norm_eps must be a number in (0, 1], got {self.norm_eps!r:.80}")
        require(
            self.width % self.heads == 0,
            f"the width within a layer ({self.width}) must be a multiple of heads ({self.heads})",
        )
        require(
            self.share_bottleneck + self.bottleneck_attention == (self.bottleneck_size > 0),
            "with bottleneck_size above 0 either share_bottleneck or bottleneck_attention must be true, else "
            f"neither; got {self.bottleneck_size}, {self.share_bottleneck}, {self.bottleneck_attention}",
        )

    @property
    def width(self) -> int:
        """Width within a layer (W)."""
        return self.bottleneck_size or self.hidden_size

    @property
    def head_dim(self) -> int:
        """Width of one attention head (H)."""
        return self.width // self.heads

    @property
    def projects_embeddings(self) -> bool:
        """Whether a matrix projects embeddings to the hidden size."""
        return self.trigram_input or self.embedding_size != self.hidden_size

    def to_json(self) -> dict[str, Any]:
        """The config as a plain dict for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "EncoderConfig":
        """Reads a dict made by `to_json`.

        Raises:
          ConfigError: a key is unknown or missing, or a value is out of range.
        """
        try:
            return cls(**data)
        except TypeError as error:
            raise ConfigError(f"malformed encoder config: {error}") from error
