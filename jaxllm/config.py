"""The configuration of a decoder: frozen, hashable, validated when it is made.

`ModelConfig` has every fact that changes the mathematics of a decoder and nothing else; it is a static
argument of every compiled step. It does not use any checkpoint's key names: each file in
`jaxllm/models/architectures` translates one Hugging Face `model_type` into it.
"""

import dataclasses
from typing import Any, Literal

from jaxllm.errors import ConfigError

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]

# Bounds on values of a config file: far above any real model, and low enough that products of two of them
# stay far below an address space.
MAX_DIMENSION = 1 << 24
MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 10
# The level of the whole model, in percent.
WHOLE = 100
_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_int(name: str, value: Any, low: int, high: int) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    _require(valid, f"{name} must be a whole number in [{low}, {high}], got {value!r}")


def _require_numbers(config: Any, *names: str) -> None:
    """Checks that fields are finite numbers within float32's range, and converts integers to floats."""
    for name in names:
        value = getattr(config, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Not `math.isfinite`: it raises for integers that no float64 can represent. The comparison is false
        # for NaN.
        valid = number and abs(value) <= _LARGEST_FLOAT32
        _require(valid, f"{name} must be a finite number, got {value!r:.80}")
        object.__setattr__(config, name, float(value))


def _require_flags(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(isinstance(value, bool), f"{name} must be true or false, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (RoPE, arXiv 2104.09864) with its length scaling.

    `dim` is the number of leading head dimensions that are rotated: even, at most the head size. `kind` is
    the `rope_type` of Hugging Face configs: linear (position interpolation), llama3 (Llama 3.1, piecewise by
    wavelength) or yarn (arXiv 2309.00071). The other fields are the parameters of these scalings, under the
    names that Hugging Face configs give them. With `query_growth` b above 0 the query at position p is
    multiplied by 1 + b·ln(1 + floor(p / `original_window_tokens`)) (Llama 4, Ministral 3).
    `factors`, one per pair of dimensions, divide the frequencies, as GGUF files store a scaling.
    """

    dim: int
    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_window_tokens: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    query_growth: float = 0.0
    factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _require_int("rope dim", self.dim, 2, MAX_DIMENSION)
        _require(self.dim % 2 == 0, f"rope dim must be even, got {self.dim}")
        _require_numbers(
            self, "theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
            "attention_factor", "query_growth",
        )  # fmt: skip
        self._check_factors()
        _require(self.query_growth >= 0, f"query_growth must not be negative, got {self.query_growth}")
        _require(self.theta > 0, f"rope theta must be positive, got {self.theta}")
        _require(self.factor >= 1, f"rope scaling factor must be at least 1, got {self.factor}")
        _require(
            self.kind in ("default", "linear", "llama3", "yarn"),
            f"rope scaling {self.kind!r} is not supported; use default, linear, llama3 or yarn",
        )
        shortest = 1 if self.kind in ("llama3", "yarn") or self.query_growth else 0
        _require_int("rope original window", self.original_window_tokens, shortest, MAX_DIMENSION)
        _require_flags(self, "truncate")
        if self.kind == "llama3":
            _require(
                self.high_freq_factor > self.low_freq_factor,
                "llama3 rope scaling needs high_freq_factor > low_freq_factor, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}",
            )
        if self.kind == "yarn":
            _require(self.theta > 1, f"yarn rope scaling needs theta above 1, got {self.theta}")
            _require(
                min(self.beta_fast, self.beta_slow) > 0,
                "yarn rope scaling needs positive beta_fast and beta_slow, got "
                f"{self.beta_fast} and {self.beta_slow}",
            )

    def _check_factors(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))
        valid = all(isinstance(each, float) and 1e-6 <= each <= 1e6 for each in self.factors)
        _require(
            valid and len(self.factors) in (0, self.dim // 2),
            f"rope factors must be {self.dim // 2} numbers in [1e-6, 1e6], got {self.factors!r:.80}",
        )


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
    itself and the w - 1 tokens before it. Layers with a window use `local_rope` where it is set.

    With `experts` above 0 the model is a mixture of experts. In the layers that `sparse_layers` marks (one
    entry per layer; all by default) the feed-forward block is E gated experts of `expert_ffn_size` neurons
    (`ffn_size` by default), of which the router chooses `experts_per_token` for each token. Their outputs are
    weighted by the router's probabilities; with `normalize_expert_weights` these are divided by their sum.

    With `qk_norm` each head's query and key are RMS-normalized; with `joint_qk_norm` the norm goes over all
    heads together. With `qkv_clip` above 0 queries, keys and values are then clipped to ±`qkv_clip`.

    With `shared_expert_size` above 0 all tokens visit one more expert of that many neurons, whose output is
    multiplied by the sigmoid of a product of its own.

    `rope_layers` says which layers have a rotary embedding; all by default. Without `pre_norms` a layer's
    blocks read its input as it is (and `post_norms` normalize their outputs). With `parallel_blocks` the
    feed-forward block reads what attention reads, by the same norm. Logits are multiplied by `logit_scale`.

    `layer_units` of a sub-model has one entry per layer; it is empty for the whole model. All other fields of
    a sub-model, also `kv_heads`, `heads` and `ffn_size`, are those of the whole model.
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
    layer_units: tuple[LayerUnits, ...] = ()

    def __post_init__(self) -> None:
        _require(isinstance(self.model_type, str), f"model_type must be text, got {self.model_type!r}")
        for name in ("vocab_size", "hidden_size", "head_dim", "ffn_size", "window_tokens", "heads"):
            _require_int(name, getattr(self, name), 1, MAX_DIMENSION)
        _require_int("layers", self.layers, 1, MAX_LAYERS)
        _require_int("kv_heads", self.kv_heads, 1, self.heads)
        _require(
            self.heads % self.kv_heads == 0,
            f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})",
        )
        _require(
            self.activation in ("silu", "gelu", "gelu_tanh", "relu"),
            f"activation {self.activation!r} is not supported; use silu, gelu, gelu_tanh or relu",
        )
        _require(self.norm in ("rms", "layer"), f"norm must be rms or layer, got {self.norm!r}")
        _require_numbers(
            self,
            "norm_eps",
            "attention_scale",
            "attention_softcap",
            "logit_softcap",
            "logit_scale",
            "embed_scale",
            "qkv_clip",
        )
        _require_flags(
            self, "gated_ffn", "learned_positions", "qkv_bias", "o_bias", "ffn_bias", "qk_norm",
            "joint_qk_norm", "pre_norms", "post_norms", "parallel_blocks", "tied_head", "head_bias",
            "normalize_expert_weights",
        )  # fmt: skip
        _require(self.norm_eps > 0, f"norm_eps must be positive, got {self.norm_eps}")
        if not self.attention_windows:
            object.__setattr__(self, "attention_windows", (0,) * self.layers)
        _require(
            len(self.attention_windows) == self.layers,
            f"attention_windows needs {self.layers} entries, one per layer, got {self.attention_windows}",
        )
        for window in self.attention_windows:
            _require_int("each of attention_windows", window, 0, MAX_DIMENSION)
        if not self.attention_scale:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)
        _require(self.qk_norm or not self.joint_qk_norm, "joint_qk_norm is true without qk_norm; set both")
        self._check_blocks()
        for name in ("attention_scale", "attention_softcap", "logit_softcap", "qkv_clip"):
            value = getattr(self, name)
            _require(value >= 0, f"{name} must not be negative, got {value}")
        for rope in (self.rope, self.local_rope):
            if rope is not None:
                _require(
                    rope.dim <= self.head_dim,
                    f"rope dim must be at most head_dim {self.head_dim}, got {rope.dim}",
                )
        _require_int("experts", self.experts, 0, MAX_EXPERTS)
        if self.experts:
            self._check_experts()
        else:
            none_of = {
                "experts_per_token": 0,
                "expert_ffn_size": 0,
                "sparse_layers": (),
                "shared_expert_size": 0,
            }
            for name, none in none_of.items():
                value = getattr(self, name)
                _require(value == none, f"{name} is {value!r} but the model has no experts; set experts")
            _require(self.normalize_expert_weights, "normalize_expert_weights is false without experts")
        if self.layer_units:
            self._check_units()

    def _check_blocks(self) -> None:
        _require(self.logit_scale > 0, f"logit_scale must be positive, got {self.logit_scale}")
        if self.rope_layers:
            flags = {type(each) for each in self.rope_layers} == {bool}
            _require(
                len(self.rope_layers) == self.layers and flags,
                f"rope_layers needs {self.layers} times true or false, one per layer, got {self.rope_layers}",
            )
            if all(self.rope_layers):
                # Equal models have equal configs.
                object.__setattr__(self, "rope_layers", ())
        _require(self.pre_norms or self.post_norms, "pre_norms is false without post_norms; set one of them")
        _require(
            not self.parallel_blocks or (self.pre_norms and not self.post_norms and not self.experts),
            "parallel_blocks needs pre_norms, and neither post_norms nor experts",
        )

    def _check_experts(self) -> None:
        _require_int("experts_per_token", self.experts_per_token, 1, self.experts)
        if not self.expert_ffn_size:
            object.__setattr__(self, "expert_ffn_size", self.ffn_size)
        _require_int("expert_ffn_size", self.expert_ffn_size, 1, MAX_DIMENSION)
        _require_int("shared_expert_size", self.shared_expert_size, 0, MAX_DIMENSION)
        _require(
            self.gated_ffn and not self.ffn_bias,
            "experts are gated and have no biases: set gated_ffn to true and ffn_bias to false",
        )
        if not self.sparse_layers:
            object.__setattr__(self, "sparse_layers", (True,) * self.layers)
        _require(
            len(self.sparse_layers) == self.layers and {type(each) for each in self.sparse_layers} == {bool},
            f"sparse_layers needs {self.layers} times true or false, one per layer, got {self.sparse_layers}",
        )
        _require(any(self.sparse_layers), "sparse_layers marks no layer; set experts to 0 for a dense model")

    def _check_units(self) -> None:
        units = self.layer_units
        _require(
            len(units) == self.layers and all(isinstance(each, LayerUnits) for each in units),
            f"layer_units needs {self.layers} entries, one per layer, got {units!r:.200}",
        )
        for layer, each in enumerate(units):
            _require_int(f"kv_heads of layer {layer}", each.kv_heads, 1, self.kv_heads)
            _require_int(f"neurons of layer {layer}", each.neurons, 1, self._all_neurons(layer))
            _require(
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
        return LayerUnits(kv_heads=self.kv_heads, neurons=self._all_neurons(layer))

    def units(self, layer: int) -> LayerUnits:
        """The numbers of kv groups and neurons (of each expert, in a mixture) of layer `layer`."""
        return self.layer_units[layer] if self.layer_units else self._whole_layer(layer)

    @property
    def whole(self) -> "ModelConfig":
        """The config of the whole model; itself if this is no sub-model."""
        return dataclasses.replace(self, layer_units=()) if self.layer_units else self

    @property
    def group(self) -> int:
        """Query heads per kv head (G)."""
        return self.heads // self.kv_heads

    def layer_rope(self, layer: int) -> RopeConfig | None:
        """The rotary embedding that layer `layer` uses."""
        if self.rope_layers and not self.rope_layers[layer]:
            return None
        if self.attention_windows[layer] and self.local_rope is not None:
            return self.local_rope
        return self.rope

    def is_sparse(self, layer: int) -> bool:
        """Whether the feed-forward block of layer `layer` is a mixture of experts."""
        return bool(self.sparse_layers) and self.sparse_layers[layer]

    def to_json(self) -> dict[str, Any]:
        """A plain dict that `from_json` reads back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ModelConfig":
        """The config that `to_json` gave as a dict.

        Raises:
          ConfigError: a key is unknown or missing, or a value is out of its domain.
        """
        fields = dict(data)
        try:
            for name in ("rope", "local_rope"):
                if fields.get(name) is not None:
                    fields[name] = RopeConfig(**fields[name])
            for name in ("attention_windows", "rope_layers", "sparse_layers"):
                if name in fields:
                    fields[name] = tuple(fields[name])
            if "layer_units" in fields:
                fields["layer_units"] = tuple(LayerUnits(**each) for each in fields["layer_units"])
            return cls(**fields)
        except TypeError as error:
            raise ConfigError(f"malformed model config: {error}") from error
