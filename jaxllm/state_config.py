"""The configuration of state layers: layers that keep a state of fixed size in place of keys and values."""

import dataclasses
from typing import Any, Literal

from jaxllm.config_checks import MAX_DIMENSION, require, require_flags, require_int

StateKind = Literal["short_conv", "delta_rule"]
# Bound on the taps of a convolution, which are unrolled.
MAX_TAPS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateConfig:
    """State layers of one kind.

    A "short_conv" (LFM2) multiplies its value by an input gate, convolves each of the D channels over the
    last `taps` tokens, and multiplies by an output gate; `bias` adds biases. Its state is the last `taps` - 1
    inputs of the convolution.

    A "delta_rule" (gated DeltaNet, arXiv 2412.06464) convolves queries, keys and values so, and keeps a
    matrix `[key_dim, value_dim]` per value head beside, which decays with each token and is corrected towards
    the token's value at its key. Consecutive value heads share a key head.
    """

    kind: StateKind
    taps: int
    bias: bool = False
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    def __post_init__(self) -> None:
        require(self.kind in ("short_conv", "delta_rule"), f"there are no state layers {self.kind!r:.80}")
        require_int("taps", self.taps, 2, MAX_TAPS)
        require_flags(self, "bias")
        sizes = ("key_heads", "value_heads", "key_dim", "value_dim")
        for name in sizes:
            low, high = (1, MAX_DIMENSION) if self.kind == "delta_rule" else (0, 0)
            require_int(f"{name} of state layers", getattr(self, name), low, high)
        if self.kind == "delta_rule":
            require(
                self.value_heads % self.key_heads == 0,
                f"value heads ({self.value_heads}) must be a multiple of key heads ({self.key_heads})",
            )
            require(not self.bias, "state layers by the delta rule have no biases")

    @property
    def group(self) -> int:
        """Value heads per key head."""
        return self.value_heads // self.key_heads

    def channels(self, hidden_size: int) -> int:
        """Channels of the convolution (C) in a model of that hidden size."""
        if self.kind == "short_conv":
            return hidden_size
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_bytes(self, hidden_size: int) -> int:
        """Bytes of the state of one layer and sequence, in float32."""
        matrix = self.value_heads * self.key_dim * self.value_dim
        return 4 * ((self.taps - 1) * self.channels(hidden_size) + matrix)


def require_state_layers(cfg: Any) -> None:
    """Checks the fields of a model's config that are about state layers.

    Raises:
      ConfigError: they do not fit each other or the layers, or need what state layers do not have.
    """
    states, marked = cfg.states, cfg.state_layers
    if states is None:
        require(not marked, f"state_layers is {marked!r:.80} but states is not set; set both")
        return
    require(isinstance(states, StateConfig), f"states must be a config, got {states!r:.80}")
    require(
        len(marked) == cfg.layers and {type(each) for each in marked} == {bool},
        f"state_layers needs {cfg.layers} times true or false, one per layer, got {marked!r:.80}",
    )
    require(
        any(marked) and not all(marked),
        "a model with states has state layers and layers with attention; one kind is missing",
    )
    require(
        cfg.pre_norms and not cfg.post_norms and not cfg.parallel_blocks and cfg.norm == "rms",
        "models with state layers have an RMS norm before each block and none after, one block after another",
    )
    require(not cfg.layer_units, "models with state layers have no sub-models")
