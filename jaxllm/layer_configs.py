"""Configs of parts of a model (rotary embedding, layers of several sizes, state layers), and checks of their
fields."""

import dataclasses
import functools
from typing import Any, Literal, get_args, get_origin

from jaxllm.errors import ConfigError

# Bound on sizes in a config file: far above any real model, and low enough that products of two of them stay
# far below an address space.
MAX_DIMENSION = 1 << 24
_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless `condition`."""
    if not condition:
        raise ConfigError(message)


def require_int(name: str, value: Any, low: float | None, high: float | None = None) -> None:
    """Raises ConfigError unless `value` is a whole number, at least `low` and at most `high`."""
    valid = isinstance(value, int) and not isinstance(value, bool)
    valid = valid and (low is None or value >= low) and (high is None or value <= high)
    bounds = "" if low is None else f" of at least {low}" if high is None else f" in [{low}, {high}]"
    require(valid, f"{name} must be a whole number{bounds}, got {value!r:.80}")


def require_float(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> None:
    """Raises ConfigError unless `value` is a number within the given bounds."""
    bounds = {
        "at least": (least, lambda bound: value >= bound),
        "above": (above, lambda bound: value > bound),
        "at most": (most, lambda bound: value <= bound),
        "below": (below, lambda bound: value < bound),
    }
    asked = {word: test for word, test in bounds.items() if test[0] is not None}
    number = isinstance(value, int | float) and not isinstance(value, bool) and value == value
    if not number or not all(test(bound) for bound, test in asked.values()):
        wanted = "".join(f" {word} {bound} and" for word, (bound, _) in asked.items()).removesuffix(" and")
        raise ConfigError(f"{name} must be a number{wanted}, got {value!r:.80}")


def require_types(config: Any) -> None:
    """Checks the fields of a config: bools are true or false, whole numbers at least 0, or 1 without a
    default, and at most `MAX_DIMENSION`, literals one of the choices, and floats finite numbers within
    float32's range; converts integers to floats."""
    for field in dataclasses.fields(config):
        value, choices = getattr(config, field.name), get_args(field.type)
        if get_origin(field.type) is Literal:
            listed = ", ".join(choices)
            require(value in choices, f"{field.name} must be one of {listed}, got {value!r:.80}")
        if field.type is int:
            require_int(field.name, value, int(field.default is dataclasses.MISSING), MAX_DIMENSION)
        if field.type is bool:
            require(isinstance(value, bool), f"{field.name} must be true or false, got {value!r:.80}")
        if field.type is float:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            # Not `math.isfinite`: it raises for integers that no float64 can represent. The comparison is
            # false for NaN.
            valid = number and abs(value) <= _LARGEST_FLOAT32
            require(valid, f"{field.name} must be a finite number, got {value!r:.80}")
            object.__setattr__(config, field.name, float(value))


def require_marks(cfg: Any, name: str) -> None:
    """Checks that a field is true or false for each layer."""
    marks = getattr(cfg, name)
    require(
        len(marks) == cfg.layers and {type(each) for each in marks} == {bool},
        f"{name} needs {cfg.layers} times true or false, one per layer, got {marks!r:.80}",
    )


def require_experts(cfg: Any) -> None:
    """Checks the expert fields of a mixture's config, and fills in defaults.

    Raises:
      ConfigError: they are inconsistent with each other or the layers.
    """
    require_int("experts_per_token", cfg.experts_per_token, 1, cfg.experts)
    if not cfg.expert_ffn_size:
        object.__setattr__(cfg, "expert_ffn_size", cfg.ffn_size)
    require_int("expert_ffn_size", cfg.expert_ffn_size, 1, MAX_DIMENSION)
    require(
        cfg.gated_ffn == (not cfg.expert_capacity) and not cfg.ffn_bias,
        "experts have no biases, and are gated but for those with a capacity: set gated_ffn to "
        f"{not cfg.expert_capacity} and ffn_bias to false",
    )
    if not cfg.sparse_layers:
        object.__setattr__(cfg, "sparse_layers", (True,) * cfg.layers)
    require_marks(cfg, "sparse_layers")
    require(any(cfg.sparse_layers), "sparse_layers marks no layer; set experts to 0 for a dense model")


RopeKind = Literal["default", "linear", "llama3", "yarn", "proportional"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (RoPE, arXiv 2104.09864) with its length scaling.

    `dim` is the number of leading head dimensions that are rotated: even, at most the head size. `kind` is
    the `rope_type` of Hugging Face configs: linear (position interpolation), llama3 (Llama 3.1, piecewise by
    wavelength), yarn (arXiv 2309.00071) or proportional (Gemma 4: only the pairs of the first `rotated_dim`
    dimensions turn, the others have a frequency of zero). The other fields are the parameters of these
    scalings, under the names that Hugging Face configs give them. With `query_growth` b above 0 the query at
    position p is multiplied by 1 + b·ln(1 + floor(p / `original_window_tokens`)) (Llama 4, Ministral 3).
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
    rotated_dim: int = 0

    def __post_init__(self) -> None:
        require_int("rope dim", self.dim, 2, MAX_DIMENSION)
        require(self.dim % 2 == 0, f"rope dim must be even, got {self.dim}")
        require_types(self)
        object.__setattr__(self, "factors", tuple(self.factors))
        require(
            len(self.factors) in (0, self.dim // 2)
            and all(isinstance(each, float) and 1e-6 <= each <= 1e6 for each in self.factors),
            f"rope factors must be {self.dim // 2} numbers in [1e-6, 1e6], got {self.factors!r:.80}",
        )
        require(self.query_growth >= 0, f"query_growth must not be negative, got {self.query_growth}")
        require(self.theta > 0, f"rope theta must be positive, got {self.theta}")
        require(self.factor >= 1, f"rope scaling factor must be at least 1, got {self.factor}")
        turned = (2, self.dim) if self.kind == "proportional" else (0, 0)
        require_int("rotated_dim", self.rotated_dim, *turned)
        require(self.rotated_dim % 2 == 0, f"rotated_dim must be even, got {self.rotated_dim}")
        shortest = 1 if self.kind in ("llama3", "yarn") or self.query_growth else 0
        require_int("rope original window", self.original_window_tokens, shortest, MAX_DIMENSION)
        if self.kind == "llama3":
            require(
                self.high_freq_factor > self.low_freq_factor,
                "llama3 rope scaling needs high_freq_factor > low_freq_factor, got "
                f"{self.high_freq_factor} and {self.low_freq_factor}",
            )
        if self.kind == "yarn":
            require(self.theta > 1, f"yarn rope scaling needs theta above 1, got {self.theta}")
            require(
                min(self.beta_fast, self.beta_slow) > 0,
                "yarn rope scaling needs positive beta_fast and beta_slow, got "
                f"{self.beta_fast} and {self.beta_slow}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedLayers:
    """Differences between the layers of a model, and their additional parts (Gemma 4).

    Layers without an attention window have heads of `full_head_dim` dimensions and `full_kv_heads` kv
    heads; with `keys_as_values` their values are the key projections. The last `shared_kv_layers` layers
    have no keys and values: each attends to those of the last earlier layer of its kind, with a window or
    without, and has `shared_ffn_size` neurons. Values are RMS-normalized, without a scale. A layer's output
    is multiplied by a learned number.

    In a mixture each layer has experts in addition to its feed-forward block. Both read the layer's input,
    each with a separate norm; their outputs are normalized, each separately and then the sum. A router's
    input is normalized, and the weight of an expert multiplied by a learned number.

    With `layer_input_size` P above 0 each token has an input `[P]` for each layer: a separate embedding
    plus a product of the token's embedding. A third block of each layer gates it and adds a product of it.
    """

    full_head_dim: int
    full_kv_heads: int
    keys_as_values: bool = False
    shared_kv_layers: int = 0
    shared_ffn_size: int = 0
    layer_input_size: int = 0

    def __post_init__(self) -> None:
        require_types(self)
        least = 1 if self.shared_kv_layers else 0
        require_int("shared_ffn_size", self.shared_ffn_size, least, MAX_DIMENSION * least)


def require_mixed_layers(cfg: Any) -> None:
    """Checks that a model's config is consistent with the layers described by `cfg.mixed`, if any.

    Raises:
      ConfigError: it is not.
    """
    mixed = cfg.mixed
    if mixed is None:
        return
    require(isinstance(mixed, MixedLayers), f"mixed must be a config, got {mixed!r:.80}")
    require(
        cfg.heads % mixed.full_kv_heads == 0,
        f"heads ({cfg.heads}) must be a multiple of full_kv_heads ({mixed.full_kv_heads})",
    )
    own = range(cfg.layers - mixed.shared_kv_layers)
    kinds = [{cfg.attention_windows[layer] > 0 for layer in of} for of in (own, range(cfg.layers))]
    require(
        kinds[0] == kinds[1],
        f"{mixed.shared_kv_layers} of {cfg.layers} layers share keys and values, and no layer before them "
        "of their kind has any",
    )
    plain = not (cfg.qkv_bias or cfg.o_bias or cfg.qkv_clip or cfg.sink_logits or cfg.joint_qk_norm)
    plain = plain and not (cfg.attention_gate or cfg.parallel_blocks or cfg.learned_positions)
    plain = plain and cfg.states is None and cfg.encoder is None and not cfg.layer_units
    plain = plain and not (cfg.expert_bias or cfg.shared_expert_size or cfg.expert_capacity)
    plain = plain and (not cfg.experts or (all(cfg.sparse_layers) and cfg.normalize_expert_weights))
    require(
        plain and cfg.norm == "rms" and cfg.pre_norms and cfg.post_norms and cfg.qk_norm,
        "mixed layers have RMS norms before and after each block and on queries and keys, plain experts in "
        "all of them or none, and neither biases, sink logits, gates of attention, states, an encoder nor "
        "sub-models",
    )


def shares_kv(cfg: Any, layer: int) -> bool:
    """Whether a layer attends to the keys and values of another one."""
    return cfg.mixed is not None and layer >= cfg.layers - cfg.mixed.shared_kv_layers


def kv_layer(cfg: Any, layer: int) -> int:
    """The layer whose keys and values a layer attends to: itself, or the last of its kind that has any."""
    if not shares_kv(cfg, layer):
        return layer
    slides = cfg.attention_windows[layer] > 0
    own = cfg.layers - cfg.mixed.shared_kv_layers
    return max(each for each in range(own) if (cfg.attention_windows[each] > 0) == slides)


def layer_config(cfg: Any, layer: int) -> Any:
    """The config of a model all of whose layers have the sizes of this one; `cfg` if they do."""
    return cfg if cfg.mixed is None else _layer_config(cfg, layer)


@functools.lru_cache(maxsize=4096)
def _layer_config(cfg: Any, layer: int) -> Any:
    mixed, sizes = cfg.mixed, dict[str, Any]()
    if not cfg.attention_windows[layer]:
        sizes = {"head_dim": mixed.full_head_dim, "kv_heads": mixed.full_kv_heads, "local_rope": None}
    else:
        # That of the other layers may be of larger heads.
        sizes = {"rope": cfg.local_rope}
    if shares_kv(cfg, layer):
        sizes["ffn_size"] = mixed.shared_ffn_size
    return dataclasses.replace(cfg, mixed=None, **sizes)


StateKind = Literal["short_conv", "delta_rule"]
# Bound on the taps of a convolution, which are unrolled.
MAX_TAPS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateConfig:
    """State layers of one kind.

    A "short_conv" (LFM2) multiplies its value by an input gate, convolves each of the D channels over the
    last `taps` tokens, and multiplies by an output gate; `bias` adds biases. Its state is the last `taps` - 1
    inputs of the convolution.

    A "delta_rule" (gated DeltaNet, arXiv 2412.06464) convolves queries, keys and values likewise, and also
    has a matrix `[key_dim, value_dim]` per value head, which decays with each token and is corrected
    towards the token's value at its key. Consecutive value heads share a key head.
    """

    kind: StateKind
    taps: int
    bias: bool = False
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    def __post_init__(self) -> None:
        require_types(self)
        require_int("taps", self.taps, 2, MAX_TAPS)
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
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
        """Channels of the convolution (C) in a model of hidden size `hidden_size`."""
        if self.kind == "short_conv":
            return hidden_size
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_bytes(self, hidden_size: int) -> int:
        """Bytes of the state of one layer and sequence, in float32."""
        matrix = self.value_heads * self.key_dim * self.value_dim
        return 4 * ((self.taps - 1) * self.channels(hidden_size) + matrix)


def require_state_layers(cfg: Any) -> None:
    """Checks the fields of a model's config for state layers.

    Raises:
      ConfigError: they are inconsistent with each other or the layers, or require unsupported features.
    """
    states, marked = cfg.states, cfg.state_layers
    if states is None:
        require(not marked, f"state_layers is {marked!r:.80} but states is not set; set both")
        return
    require(isinstance(states, StateConfig), f"states must be a config, got {states!r:.80}")
    require_marks(cfg, "state_layers")
    require(
        any(marked) and not all(marked),
        "a model with states has state layers and layers with attention; one kind is missing",
    )
    require(
        cfg.pre_norms and not cfg.post_norms and not cfg.parallel_blocks and cfg.norm == "rms",
        "models with state layers have an RMS norm before each block and none after, one block after another",
    )
    require(not cfg.layer_units, "models with state layers have no sub-models")
