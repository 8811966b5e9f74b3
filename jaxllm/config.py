"""The configuration of a decoder: frozen, hashable, validated at construction.

`ModelConfig` has every fact that changes the mathematics of a decoder and nothing else; it is a static
argument of every compiled step. It does not use any checkpoint's key names: the files in
`jaxllm/models/architectures` translate those of Hugging Face into it.
"""

import dataclasses
from typing import Any, Literal

from jaxllm.errors import ConfigError
from jaxllm.layer_configs import (
    MAX_DIMENSION,
    MixedLayers,
    RopeConfig,
    StateConfig,
    layer_config,
    require,
    require_experts,
    require_int,
    require_marks,
    require_mixed_layers,
    require_state_layers,
    require_types,
)

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"]

# Bounds on values of a config file, as `MAX_DIMENSION`.
MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 10
# The level of the whole model, in percent.
FULL_LEVEL = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerUnits:
    """The size of one layer of a sub-model: its first `kv_heads` kv groups and first `neurons` neurons (of
    each expert, in a mixture)."""

    kv_heads: int
    neurons: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and mathematics of one decoder.

    Letters of shapes: D `hidden_size`, L `layers`, N `heads`, K `kv_heads`,
    G = N/K, H `head_dim`, F `ffn_size`, V `vocab_size`, E `experts`.

    `attention_windows` has one entry per layer: 0 is full causal attention; with w > 0 a token attends to
    itself and the w - 1 tokens before it. Layers with a window use `local_rope` if it is set.

    With `experts` above 0 the model is a mixture of experts. In the layers marked by `sparse_layers` (one
    entry per layer; all by default) the feed-forward block is E gated experts of `expert_ffn_size` neurons
    (`ffn_size` by default), of which the router chooses `experts_per_token` for each token. Their outputs
    are weighted by the router's probabilities, divided by their sum with `normalize_expert_weights`.

    With `qk_norm` each head's query and key are RMS-normalized; with `joint_qk_norm` the norm goes over all
    heads together. With `qkv_clip` above 0 queries, keys and values are then clipped to ±`qkv_clip`.

    With `expert_bias` the router and each product of an expert have biases. The activation "clamped_swiglu",
    of such experts alone, is (up + 1) · gate · sigmoid(1.702 gate) with gate at most 7 and up in ±7. With
    `sink_logits` each query head has a learned logit in the denominator of its softmax (gpt-oss).

    With `shared_expert_size` above 0 all tokens visit an additional expert of that many neurons, whose
    output is multiplied by the sigmoid of a separate product.

    `rope_layers` marks layers with a rotary embedding; all by default. Without `pre_norms` the input of a
    layer's blocks is not normalized (and `post_norms` normalize their outputs). With `parallel_blocks` the
    feed-forward block has the same normalized input as attention. Logits are multiplied by `logit_scale`;
    `head_bias` is added to them.

    Layers marked by `state_layers` have recurrent states instead of attention (see `StateConfig`). With
    `attention_gate` the output of attention is multiplied by the sigmoid of a separate product. With `mixed`
    layers differ in size, share keys and values, and have per-layer inputs (see `MixedLayers`).

    With an `encoder` the model is an encoder-decoder: its layers also attend to the encoder's outputs
    (cross-attention). The encoder has its own config, of layers with bidirectional attention; both share the
    token embedding. The following fields are for the encoders and decoders of such models: `relative_buckets`
    above 0 adds a learned bias per head and bucket of distance to scores, where distances from
    `relative_distance` on share the last bucket (T5); `sinusoidal_positions` are added to embeddings;
    `embed_norm` normalizes these; with `norm_after` a norm follows each block's sum instead of preceding the
    block; without `final_norm` there is no norm after the layers; `expert_capacity` above 0 is the maximum
    number of tokens of a sequence per expert (others skip it), and such experts are not gated.

    `layer_units` of a sub-model has one entry per layer; it is empty for the whole model. All other fields
    of a sub-model, including `kv_heads`, `heads` and `ffn_size`, are those of the whole model.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    window_tokens: int
    activation: Activation = "silu"
    gated_ffn: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    rope: RopeConfig | None = None
    local_rope: RopeConfig | None = None
    learned_positions: bool = False
    rope_layers: tuple[bool, ...] = ()
    attention_windows: tuple[int, ...] = ()
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    embed_scale: float = 1.0
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    qkv_clip: float = 0.0
    pre_norms: bool = True
    post_norms: bool = False
    parallel_blocks: bool = False
    tied_head: bool = False
    head_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    normalize_expert_weights: bool = True
    sparse_layers: tuple[bool, ...] = ()
    shared_expert_size: int = 0
    expert_bias: bool = False
    sink_logits: bool = False
    states: StateConfig | None = None
    state_layers: tuple[bool, ...] = ()
    attention_gate: bool = False
    mixed: MixedLayers | None = None
    layer_units: tuple[LayerUnits, ...] = ()
    encoder: "ModelConfig | None" = None
    relative_buckets: int = 0
    relative_distance: int = 0
    sinusoidal_positions: bool = False
    embed_norm: bool = False
    norm_after: bool = False
    final_norm: bool = True
    expert_capacity: int = 0

    def __post_init__(self) -> None:
        require(isinstance(self.model_type, str), f"model_type must be text, got {self.model_type!r}")
        require_int("layers", self.layers, 1, MAX_LAYERS)
        require_types(self)
        require_int("kv_heads", self.kv_heads, 1, self.heads)
        require(
            self.heads % self.kv_heads == 0,
            f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})",
        )
        require(
            self.activation != "clamped_swiglu" or (self.expert_bias and all(self.sparse_layers)),
            "the activation clamped_swiglu is of experts with biases alone; set expert_bias in all layers",
        )
        require(self.norm_eps > 0, f"norm_eps must be positive, got {self.norm_eps}")
        if not self.attention_windows:
            object.__setattr__(self, "attention_windows", (0,) * self.layers)
        require(
            len(self.attention_windows) == self.layers,
            f"attention_windows needs {self.layers} entries, one per layer, got {self.attention_windows}",
        )
        for window in self.attention_windows:
            require_int("each of attention_windows", window, 0, MAX_DIMENSION)
        if not self.attention_scale:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)
        require(self.qk_norm or not self.joint_qk_norm, "joint_qk_norm is true without qk_norm; set both")
        require(self.logit_scale > 0, f"logit_scale must be positive, got {self.logit_scale}")
        if self.rope_layers:
            require_marks(self, "rope_layers")
            if all(self.rope_layers):
                # Equal models have equal configs.
                object.__setattr__(self, "rope_layers", ())
        require(self.pre_norms or self.post_norms, "pre_norms is false without post_norms; set one of them")
        require(
            not self.parallel_blocks or (self.pre_norms and not self.post_norms and not self.experts),
            "parallel_blocks needs pre_norms, and neither post_norms nor experts",
        )
        for name in ("attention_scale", "attention_softcap", "logit_softcap", "qkv_clip"):
            value = getattr(self, name)
            require(value >= 0, f"{name} must not be negative, got {value}")
        for rope in (self.rope, self.local_rope):
            widest = self.head_dim if self.mixed is None else max(self.head_dim, self.mixed.full_head_dim)
            if rope is not None:
                require(rope.dim <= widest, f"rope dim must be at most head_dim {widest}, got {rope.dim}")
        require_int("experts", self.experts, 0, MAX_EXPERTS)
        if self.experts:
            require_experts(self)
        else:
            for name in _OF_EXPERTS:
                value = getattr(self, name)
                require(not value, f"{name} is {value!r} but the model has no experts; set experts")
            require(self.normalize_expert_weights, "normalize_expert_weights is false without experts")
        require_state_layers(self)
        require_mixed_layers(self)
        if self.layer_units:
            self._check_units()
        if self.relative_buckets:
            require(
                self.relative_buckets % 4 == 0 and self.relative_distance > self.relative_buckets // 2,
                f"relative_buckets must be a multiple of 4 and relative_distance more than half of it, got "
                f"{self.relative_buckets} and {self.relative_distance}",
            )
        require(
            not self.sinusoidal_positions or self.hidden_size % 4 == 0,
            f"sinusoidal positions need a hidden_size that is a multiple of 4, got {self.hidden_size}",
        )
        if self.encoder is not None:
            self._check_encoder(self.encoder)

    def _check_encoder(self, encoder: "ModelConfig") -> None:
        require(isinstance(encoder, ModelConfig), f"encoder must be a config, got {encoder!r:.80}")
        for each in (self, encoder):
            plain = each.rope is None and not any(each.attention_windows)
            plain = plain and each.states is None and not each.attention_gate
            require(
                plain and not each.qk_norm and not each.post_norms and not each.qkv_clip,
                "encoder-decoders have no rotary embedding, attention windows, state layers, gates of "
                "attention, norms of queries and keys, or norms after blocks before their sum",
            )
        of_decoder = encoder.encoder is None and not encoder.head_bias and encoder.tied_head
        require(of_decoder, "an encoder has neither an encoder nor a head of its own")
        for name in ("vocab_size", "hidden_size"):
            own, other = getattr(self, name), getattr(encoder, name)
            require(own == other, f"encoder and decoder must have the same {name}, got {other} and {own}")

    def _check_units(self) -> None:
        units = self.layer_units
        require(
            len(units) == self.layers and all(isinstance(each, LayerUnits) for each in units),
            f"layer_units needs {self.layers} entries, one per layer, got {units!r:.200}",
        )
        for layer, each in enumerate(units):
            require_int(f"kv_heads of layer {layer}", each.kv_heads, 0, self.kv_heads)
            require_int(f"neurons of layer {layer}", each.neurons, 0, self._all_neurons(layer))
            require(
                not self.joint_qk_norm or each.kv_heads == self.kv_heads,
                f"layer {layer} has {each.kv_heads} of {self.kv_heads} kv heads, but one norm goes over all "
                "of them: such a model has no sub-models with fewer",
            )
        if all(each == self._whole_layer(layer) for layer, each in enumerate(units)):
            # Equal models have equal configs: a sub-model with all units is the whole model.
            object.__setattr__(self, "layer_units", ())

    def _all_neurons(self, layer: int) -> int:
        return self.expert_ffn_size if self.is_sparse(layer) else self.ffn_size

    def _whole_layer(self, layer: int) -> LayerUnits:
        own = layer_config(self, layer)
        return LayerUnits(kv_heads=own.kv_heads, neurons=own._all_neurons(layer))

    def units(self, layer: int) -> LayerUnits:
        """The numbers of kv groups and neurons (of each expert, in a mixture) of layer `layer`."""
        return self.layer_units[layer] if self.layer_units else self._whole_layer(layer)

    @property
    def whole(self) -> "ModelConfig":
        """The config of the whole model; itself if this is no sub-model."""
        encoder = None if self.encoder is None else self.encoder.whole
        if not self.layer_units and encoder is self.encoder:
            return self
        return dataclasses.replace(self, layer_units=(), encoder=encoder)

    @property
    def group(self) -> int:
        """Query heads per kv head (G)."""
        return self.heads // self.kv_heads

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """The rotary embedding of layer `layer`."""
        if self.rope_layers and not self.rope_layers[layer]:
            return None
        if self.attention_windows[layer] and self.local_rope is not None:
            return self.local_rope
        return self.rope

    def is_sparse(self, layer: int) -> bool:
        """Whether the feed-forward block of layer `layer` is a mixture of experts."""
        return bool(self.sparse_layers) and self.sparse_layers[layer]

    def is_state(self, layer: int) -> bool:
        """Whether layer `layer` has a state in place of attention."""
        return bool(self.state_layers) and self.state_layers[layer]

    def to_json(self) -> dict[str, Any]:
        """The config as a plain dict for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ModelConfig":
        """Reads a dict made by `to_json`.

        Raises:
          ConfigError: a key is unknown or missing, or a value is out of range.
        """
        cfg = cls._from_json(data)
        if cfg.encoder is None:
            defaults = {field.name: field.default for field in dataclasses.fields(cls)}
            for name in _OF_ENCODER_DECODERS:
                value = getattr(cfg, name)
                require(value == defaults[name], f"{name} is {value!r} but the model has no encoder")
        return cfg

    @classmethod
    def _from_json(cls, data: dict[str, Any]) -> "ModelConfig":
        fields = dict(data)
        try:
            if fields.get("encoder") is not None:
                fields["encoder"] = cls._from_json(fields["encoder"])
            for name, kind in _PARTS.items():
                if fields.get(name) is not None:
                    fields[name] = kind(**fields[name])
            for name in ("attention_windows", "rope_layers", "sparse_layers", "state_layers"):
                if name in fields:
                    fields[name] = tuple(fields[name])
            if "layer_units" in fields:
                fields["layer_units"] = tuple(LayerUnits(**each) for each in fields["layer_units"])
            return cls(**fields)
        except TypeError as error:
            raise ConfigError(f"malformed model config: {error}") from error


_PARTS = {"rope": RopeConfig, "local_rope": RopeConfig, "states": StateConfig, "mixed": MixedLayers}
# Fields of models with experts, and of encoder-decoders.
_OF_EXPERTS = ("experts_per_token", "expert_ffn_size", "sparse_layers", "shared_expert_size", "expert_bias")
_OF_ENCODER_DECODERS = (
    "relative_buckets", "relative_distance", "sinusoidal_positions", "embed_norm", "norm_after", "final_norm",
    "expert_capacity",
)  # fmt: skip
