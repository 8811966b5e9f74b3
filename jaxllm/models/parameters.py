"""The parameters of every decoder: their names, shapes and initial values.

A flat dict with stable string keys:

    embed.tokens [V, D]            embed.positions [P, D]
    layers.{i}.attn_norm.scale/bias [D]          (and attn_post_norm, ffn_norm, ffn_post_norm)
    layers.{i}.attn.q [K, G·H, D]  .k [K, H, D]  .v [K, H, D]  .o [K, G·H, D]   (+ q_bias ...)
    layers.{i}.attn.q_norm.scale [H]             .k_norm.scale [H]          (joint: [N·H] and [K·H])
    layers.{i}.ffn.gate [F, D]     .up [F, D]    .down [F, D]                   (+ gate_bias ...)
    layers.{i}.attn.gate [K, G·H, D]                                (where attention has an output gate)
    layers.{i}.state_norm.scale [D]  .state.*                       (in place of attn.*, see
    `state_layer.py`)
    layers.{i}.router [E, D]       .experts.gate [E, F, D]  .up [E, F, D]  .down [E, F, D]   (or these)
    layers.{i}.router_bias [E]     .expert_gate_bias [E, F]   .expert_up_bias   .expert_down_bias [E, D]
    layers.{i}.attn.sink_logits [K, G]
    layers.{i}.layer_input.gate [P, D]           .layer_input.o [P, D]          .layer_input_norm.scale [D]
    layers.{i}.output.scale [1]                  (of mixed layers, as all of P)
    layers.{i}.router_norm.scale, .experts_norm.scale, .experts_post_norm.scale, .dense_post_norm.scale [D]
    layers.{i}.router_output.scale [E]           (of mixed layers with experts)
    embed.layer_inputs [V, L·P]    embed.input_projection [L·P, D]             embed.input_norm.scale [P]
    layers.{i}.shared.gate/up/down [S, D]        .shared.score [1, D]       (beside experts)
    final_norm.scale/bias [D]      head [V, D]   head_bias [V]

and of an encoder-decoder

    encoder.*, all of the above but embed.tokens, which both share
    embed.norm.scale/bias [D]      relative_positions [buckets, N]        head_bias [V]
    layers.{i}.cross_norm.scale/bias [D]  .cross.q  .cross.k  .cross.v  .cross.o  (+ q_bias ..., as attn.*)

The unit axis leads (kv-groups K, neurons F): a sub-model is a prefix of each buffer. In layers with
experts, an expert is one entry of the leading axis. The experts' biases are not part of `experts.*`: they
are small, and stay in memory if experts are loaded individually.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.config import ModelConfig
from jaxllm.formats import WeightFormat
from jaxllm.layer_configs import MixedLayers, layer_config, shares_kv
from jaxllm.quant import Weight

Params = Mapping[str, Weight]
# Prefix of the encoder's parameters.
ENCODER = "encoder."
Role = Literal["embed", "to_units", "from_units", "vector"]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Shape of one parameter, and its role, which decides how it may be quantized."""

    shape: tuple[int, ...]
    role: Role


def parameter_bits(name: str, spec: ParamSpec, weights: WeightFormat) -> int:
    """Bits of a parameter in a format of weights. Vectors (norms, biases, positions) have 32."""
    if spec.role == "vector" or weights == "f32":
        return 32
    if weights in ("bf16", "int8", "int8-nested"):
        return 16 if weights == "bf16" else 8
    # Of all matrices these cost most at 4 bits for their size: keys and values of few heads.
    wide = spec.role == "embed" or name.endswith(_WIDE)
    return 8 if weights == "int4" and wide else 4


def head_name(cfg: ModelConfig) -> str:
    """Name of the parameter `[V, D]` of the logits: the embedding if the head is tied to it."""
    return "embed.tokens" if cfg.tied_head else "head"


def param_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Specs of every parameter of the model by name, in the order in which a forward pass uses them."""
    return dict(_specs(cfg))


@functools.lru_cache(maxsize=64)
def _specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """`param_specs`; cached, because opening an elastic bundle calls it thousands of times."""
    width = cfg.hidden_size
    specs = {"embed.tokens": ParamSpec((cfg.vocab_size, width), "embed")}
    if cfg.learned_positions:
        specs["embed.positions"] = ParamSpec((cfg.window_tokens, width), "vector")
    if cfg.embed_norm:
        specs |= _norm_specs(cfg, "embed.norm")
    if cfg.encoder is not None:
        own = _specs(cfg.encoder)
        specs.update({ENCODER + name: spec for name, spec in own.items() if name != "embed.tokens"})
    if cfg.mixed is not None and cfg.mixed.layer_input_size:
        size = cfg.mixed.layer_input_size
        specs["embed.layer_inputs"] = ParamSpec((cfg.vocab_size, cfg.layers * size), "embed")
        specs["embed.input_projection"] = ParamSpec((cfg.layers * size, width), "to_units")
        specs["embed.input_norm.scale"] = ParamSpec((size,), "vector")
    for layer in range(cfg.layers):
        for name, spec in _layer_specs(cfg, layer).items():
            specs[f"layers.{layer}.{name}"] = spec
    if cfg.relative_buckets:
        specs["relative_positions"] = ParamSpec((cfg.relative_buckets, cfg.heads), "vector")
    if cfg.final_norm:
        specs |= _norm_specs(cfg, "final_norm")
    if not cfg.tied_head:
        specs["head"] = ParamSpec((cfg.vocab_size, width), "embed")
    if cfg.head_bias:
        specs["head_bias"] = ParamSpec((cfg.vocab_size,), "vector")
    return specs


def expert_parameter(name: str, expert: int) -> str:
    """The name of one expert's part of a stack: "layers.0.experts.gate" -> "layers.0.experts.3.gate"."""
    lead, part = name.rsplit(".", 1)
    return f"{lead}.{expert}.{part}"


def sparse_layers(cfg: ModelConfig) -> list[str]:
    """The prefixes of the parameters of layers with experts, in the order of a pass: those of an encoder come
    first."""
    encoder = [] if cfg.encoder is None else [ENCODER + each for each in sparse_layers(cfg.encoder)]
    return [*encoder, *(f"layers.{layer}." for layer in range(cfg.layers) if cfg.is_sparse(layer))]


def specs_apart(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """`param_specs` with separate experts, after the other parameters of their layer."""
    specs: dict[str, ParamSpec] = {}
    stacks: dict[str, ParamSpec] = {}
    for name, spec in param_specs(cfg).items():
        if ".experts." in name:
            stacks[name] = spec
            continue
        for expert in range(cfg.experts if stacks else 0):
            for stack, each in stacks.items():
                specs[expert_parameter(stack, expert)] = ParamSpec(each.shape[1:], each.role)
        stacks = {}
        specs[name] = spec
    return specs


Specs = dict[str, ParamSpec]
# Matrices that `int4` stores at 8 bits besides embedding and head.
_WIDE = (".attn.k", ".attn.v")


def _vectors(**shapes: tuple[int, ...]) -> Specs:
    return {name: ParamSpec(shape, "vector") for name, shape in shapes.items()}


def _norm_specs(cfg: ModelConfig, *names: str) -> Specs:
    parts = ("scale", "bias") if cfg.norm == "layer" else ("scale",)
    return _vectors(**{f"{name}.{part}": (cfg.hidden_size,) for name in names for part in parts})


def _layer_specs(cfg: ModelConfig, layer: int) -> Specs:
    kept = cfg.units(layer)
    if cfg.is_state(layer):
        return _state_layer_specs(cfg, layer, kept.neurons)
    if cfg.mixed is not None:
        return _mixed_layer_specs(cfg, cfg.mixed, layer)
    units, head = kept.kv_heads, cfg.head_dim
    specs = _products_specs(cfg, "attn", units)
    if cfg.qk_norm:
        queries, keys = (units * cfg.group * head, units * head) if cfg.joint_qk_norm else (head, head)
        specs |= _vectors(**{"attn.q_norm.scale": (queries,), "attn.k_norm.scale": (keys,)})
    specs |= _output_specs(cfg, "attn", units)
    if cfg.sink_logits:
        specs |= _vectors(**{"attn.sink_logits": (units, cfg.group)})
    if cfg.post_norms:
        specs |= _norm_specs(cfg, "attn_post_norm")
    if cfg.encoder is not None:
        specs |= _products_specs(cfg, "cross", units) | _output_specs(cfg, "cross", units)
    if cfg.pre_norms and not cfg.parallel_blocks:
        specs |= _norm_specs(cfg, "ffn_norm")
    specs |= _block_specs(cfg, layer, kept.neurons)
    return specs | (_norm_specs(cfg, "ffn_post_norm") if cfg.post_norms else {})


def _mixed_layer_specs(cfg: ModelConfig, mixed: MixedLayers, layer: int) -> Specs:
    own: ModelConfig = layer_config(cfg, layer)
    specs = _products_specs(own, "attn", own.kv_heads)
    if mixed.keys_as_values and not cfg.attention_windows[layer]:
        del specs["attn.v"]
    specs |= _vectors(**dict.fromkeys(("attn.q_norm.scale", "attn.k_norm.scale"), (own.head_dim,)))
    if shares_kv(cfg, layer):
        for name in ("attn.k", "attn.v", "attn.k_norm.scale"):
            specs.pop(name, None)
    specs |= _output_specs(own, "attn", own.kv_heads) | _norm_specs(cfg, "attn_post_norm")
    specs |= _norm_specs(cfg, "ffn_norm") | _ffn_specs(own, own.ffn_size) | _norm_specs(cfg, "ffn_post_norm")
    if cfg.experts:
        specs |= _norm_specs(cfg, "router_norm", "experts_norm", "experts_post_norm", "dense_post_norm")
        specs |= _vectors(**{"router_output.scale": (cfg.experts,)})
        specs |= _expert_specs(own, own.expert_ffn_size)
    if mixed.layer_input_size:
        shape = (mixed.layer_input_size, cfg.hidden_size)
        specs["layer_input.gate"] = ParamSpec(shape, "to_units")
        specs["layer_input.o"] = ParamSpec(shape, "from_units")
        specs |= _norm_specs(cfg, "layer_input_norm")
    return specs | _vectors(**{"output.scale": (1,)})


def _state_layer_specs(cfg: ModelConfig, layer: int, neurons: int) -> Specs:
    states, width = cfg.states, cfg.hidden_size
    assert states is not None
    own = _vectors(conv=(states.channels(width), states.taps))
    if states.kind == "short_conv":
        own |= _vectors(conv_bias=(width,)) if states.bias else {}
        for name in ("input_gate", "output_gate", "value", "o"):
            own[name] = ParamSpec((width, width), "from_units" if name == "o" else "to_units")
            own |= _vectors(**{f"{name}_bias": (width,)}) if states.bias else {}
    else:
        heads, values = states.value_heads, states.group * states.value_dim
        for name, rows in (("q", states.key_dim), ("k", states.key_dim), ("v", values), ("gate", values)):
            own[name] = ParamSpec((states.key_heads, rows, width), "to_units")
        # Never quantized: they are small, and decide how long a state lasts.
        own |= _vectors(correction=(heads, width), decay=(heads, width))
        own |= _vectors(decay_bias=(heads,), decay_log=(heads,), **{"norm.scale": (states.value_dim,)})
        own["o"] = ParamSpec((states.key_heads, values, width), "from_units")
    state = _norm_specs(cfg, "state_norm") | {f"state.{name}": spec for name, spec in own.items()}
    return state | _norm_specs(cfg, "ffn_norm") | _block_specs(cfg, layer, neurons)


def _products_specs(cfg: ModelConfig, name: str, units: int) -> Specs:
    """Parameters of the norm before attention, or before cross-attention, and of its first products."""
    specs = _norm_specs(cfg, f"{name}_norm") if cfg.pre_norms else {}
    rows = {"q": cfg.group * cfg.head_dim, "k": cfg.head_dim, "v": cfg.head_dim}
    if cfg.attention_gate:
        rows["gate"] = rows["q"]
    for part, count in rows.items():
        specs[f"{name}.{part}"] = ParamSpec((units, count, cfg.hidden_size), "to_units")
        if cfg.qkv_bias:
            specs[f"{name}.{part}_bias"] = ParamSpec((units, count), "vector")
    return specs


def _output_specs(cfg: ModelConfig, name: str, units: int) -> Specs:
    shape = (units, cfg.group * cfg.head_dim, cfg.hidden_size)
    bias = _vectors(**{f"{name}.o_bias": (cfg.hidden_size,)}) if cfg.o_bias else {}
    return {f"{name}.o": ParamSpec(shape, "from_units"), **bias}


def _block_specs(cfg: ModelConfig, layer: int, neurons: int) -> Specs:
    return (_expert_specs if cfg.is_sparse(layer) else _ffn_specs)(cfg, neurons)


def _ffn_specs(cfg: ModelConfig, neurons: int) -> Specs:
    specs: Specs = {}
    for name in ("gate", "up", "down") if cfg.gated_ffn else ("up", "down"):
        role, outputs = ("from_units", cfg.hidden_size) if name == "down" else ("to_units", neurons)
        specs[f"ffn.{name}"] = ParamSpec((neurons, cfg.hidden_size), role)
        if cfg.ffn_bias:
            specs[f"ffn.{name}_bias"] = ParamSpec((outputs,), "vector")
    return specs


def _expert_specs(cfg: ModelConfig, neurons: int) -> Specs:
    shape = (cfg.experts, neurons, cfg.hidden_size)
    # Never quantized: it is small, and rounding it would change which experts run.
    specs = _vectors(router=(cfg.experts, cfg.hidden_size))
    if cfg.expert_bias:
        specs |= _vectors(router_bias=shape[:1], expert_gate_bias=shape[:2], expert_up_bias=shape[:2])
        specs |= _vectors(expert_down_bias=(cfg.experts, cfg.hidden_size))
    for name in ("gate", "up", "down") if cfg.gated_ffn else ("up", "down"):
        specs[f"experts.{name}"] = ParamSpec(shape, "from_units" if name == "down" else "to_units")
    if cfg.shared_expert_size:
        shared = (cfg.shared_expert_size, cfg.hidden_size)
        specs["shared.score"] = ParamSpec((1, cfg.hidden_size), "vector")
        specs |= {f"shared.{name}": ParamSpec(shared, "to_units") for name in ("gate", "up")}
        specs["shared.down"] = ParamSpec(shared, "from_units")
    return specs


def init_params(cfg: ModelConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> dict[str, jax.Array]:
    """Random parameters to train from: normal weights of variance 1/fan-in, norms at one."""
    specs = param_specs(cfg)
    keys = jax.random.split(key, len(specs))
    return {name: init_param(cfg, name, each, dtype) for name, each in zip(specs, keys, strict=True)}


def init_param(cfg: ModelConfig, name: str, key: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The initial value of one parameter (see `init_params`)."""
    spec = param_specs(cfg)[name]
    if name.endswith(".scale"):
        return jnp.ones(spec.shape, dtype)
    if name.endswith(("bias", ".sink_logits")):
        return jnp.zeros(spec.shape, dtype)
    if name.startswith("embed.") or name == "head":
        return jax.random.normal(key, spec.shape, dtype) * np.asarray(0.02, dtype)
    # Fan-in of `from_units`: the neurons of one expert, or all heads of the attention output.
    units = spec.shape[1:-1] if ".experts." in name else spec.shape[:-1]
    fan_in = int(np.prod(units)) if spec.role == "from_units" else spec.shape[-1]
    deviation = fan_in**-0.5
    if spec.role == "from_units":
        # GPT-2's scaling: residual branches add up over 2·L blocks.
        deviation *= (2 * cfg.layers) ** -0.5
    return jax.random.normal(key, spec.shape, dtype) * np.asarray(deviation, dtype)


def parameter_count(cfg: ModelConfig) -> int:
    """Number of scalar parameters."""
    return sum(int(np.prod(spec.shape)) for spec in param_specs(cfg).values())


def active_parameter_count(cfg: ModelConfig) -> int:
    """Number of scalar parameters used per token: only the k visited experts of each layer."""
    idle, specs = cfg.experts - cfg.experts_per_token, param_specs(cfg).items()
    # Of weights and of biases.
    experts = [spec.shape for name, spec in specs if re.search(r"\.experts\.|\.expert_.*_bias$", name)]
    return parameter_count(cfg) - sum(idle * int(np.prod(shape[1:])) for shape in experts)
