"""The configuration of models whose layers with and without an attention window differ in more than that."""

import dataclasses
import functools
from typing import Any

from jaxllm.config_checks import MAX_DIMENSION, require, require_flags, require_int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedLayers:
    """How the layers of a model differ, and what they have besides (Gemma 4).

    Layers without an attention window have heads of `full_head_dim` dimensions and `full_kv_heads` kv heads;
    with `keys_as_values` the products that give their keys give their values, too. The last
    `shared_kv_layers` layers have no keys and values: each attends to those of the last layer before them of
    its kind, with a window or without, and has `shared_ffn_size` neurons. Values are RMS-normalized, without
    a scale. A layer's output is multiplied by a learned number.

    In a mixture each layer has experts beside its feed-forward block. Both read the layer's input, each by a
    norm of its own; their outputs are normalized, each by itself and then the sum. A router's input is
    normalized, and the weight of an expert multiplied by a learned number.

    With `layer_input_size` P above 0 each token has an input `[P]` for each layer: an embedding of its own
    plus a product of the token's embedding. A third block of each layer gates it and adds a product of it.
    """

    full_head_dim: int
    full_kv_heads: int
    keys_as_values: bool = False
    shared_kv_layers: int = 0
    shared_ffn_size: int = 0
    layer_input_size: int = 0

    def __post_init__(self) -> None:
        require_int("full_head_dim", self.full_head_dim, 1, MAX_DIMENSION)
        require_int("full_kv_heads", self.full_kv_heads, 1, MAX_DIMENSION)
        require_int("shared_kv_layers", self.shared_kv_layers, 0, MAX_DIMENSION)
        least = 1 if self.shared_kv_layers else 0
        require_int("shared_ffn_size", self.shared_ffn_size, least, MAX_DIMENSION * least)
        require_int("layer_input_size", self.layer_input_size, 0, MAX_DIMENSION)
        require_flags(self, "keys_as_values")


def require_mixed_layers(cfg: Any) -> None:
    """Checks that a model's config can have the layers that `cfg.mixed` describes, if it describes any.

    Raises:
      ConfigError: it cannot.
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
    """The config of a model all of whose layers have the sizes of this one; `cfg` itself where they do."""
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
