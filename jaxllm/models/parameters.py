"""The parameters of every decoder: their names, shapes and initial values."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.config import ModelConfig
from jaxllm.layer_configs import MixedLayers, StateConfig, layer_config, shares_kv
from jaxllm.quant import Weight

# A flat dict with stable string keys:
#
#     embed.tokens [V, D]            embed.positions [P, D]
#     layers.{i}.attn_norm.scale/bias [D]          (and attn_post_norm, ffn_norm, ffn_post_norm)
#     layers.{i}.attn.q [K, G·H, D]  .k [K, H, D]  .v [K, H, D]  .o [K, G·H, D]   (+ q_bias ...)
#     layers.{i}.attn.q_norm.scale [H]             .k_norm.scale [H]          (joint: [N·H] and [K·H])
#     layers.{i}.ffn.gate [F, D]     .up [F, D]    .down [F, D]                   (+ gate_bias ...)
#     layers.{i}.attn.gate [K, G·H, D]                                (where attention has an output gate)
#     layers.{i}.state_norm.scale [D]  .state.*                       (in place of attn.*, see
#     `state_layer.py`)
#     layers.{i}.router [E, D]       .experts.gate [E, F, D]  .up [E, F, D]  .down [E, F, D]   (or these)
#     layers.{i}.router_bias [E]     .expert_gate_bias [E, F]   .expert_up_bias   .expert_down_bias [E, D]
#     layers.{i}.attn.sink_logits [K, G]
#     layers.{i}.layer_input.gate [P, D]           .layer_input.o [P, D]          .layer_input_norm.scale [D]
#     layers.{i}.output.scale [1]                  (of mixed layers, as all of P)
#     layers.{i}.router_norm.scale, .experts_norm.scale, .experts_post_norm.scale, .dense_post_norm.scale [D]
#     layers.{i}.router_output.scale [E]           (of mixed layers with experts)
#     embed.layer_inputs [V, L·P]    embed.input_projection [L·P, D]             embed.input_norm.scale [P]
#     layers.{i}.shared.gate/up/down [S, D]        .shared.score [1, D]       (beside experts)
#     final_norm.scale/bias [D]      head [V, D]   head_bias [V]
#
# and of an encoder-decoder
#
#     encoder.*, all of the above but embed.tokens, which both share
#     embed.norm.scale/bias [D]      relative_positions [buckets, N]        head_bias [V]
#     layers.{i}.cross_norm.scale/bias [D]  .cross.q  .cross.k  .cross.v  .cross.o  (+ q_bias ..., as attn.*)
#
# The unit axis leads (kv-groups K, neurons F): a sub-model is a prefix of each buffer. In layers with
# experts, an expert is one entry of the leading axis. The experts' biases are not part of `experts.*`: they
# are small, and stay in memory if experts are loaded individually.


Params = Mapping[str, Weight]
# Prefix of the encoder's parameters.
ENCODER = "encoder."
Role = Literal["embed", "to_units", "from_units", "vector"]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Shape of one parameter, and its role, which decides how it may be quantized."""

    shape: tuple[int, ...]
    role: Role


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
        specs.update(_norm_specs(cfg, "embed.norm"))
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
        specs.update(_norm_specs(cfg, "final_norm"))
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
        _put_apart(specs, stacks, cfg.experts)
        stacks = {}
        specs[name] = spec
    return specs


def _put_apart(specs: dict[str, ParamSpec], stacks: dict[str, ParamSpec], experts: int) -> None:
    for expert in range(experts if stacks else 0):
        for name, spec in stacks.items():
            specs[expert_parameter(name, expert)] = ParamSpec(spec.shape[1:], spec.role)


def _norm_specs(cfg: ModelConfig, name: str) -> dict[str, ParamSpec]:
    parts = ("scale", "bias") if cfg.norm == "layer" else ("scale",)
    return {f"{name}.{part}": ParamSpec((cfg.hidden_size,), "vector") for part in parts}


def _layer_specs(cfg: ModelConfig, layer: int) -> dict[str, ParamSpec]:
    kept = cfg.units(layer)
    if cfg.is_state(layer):
        return _state_layer_specs(cfg, layer, kept.neurons)
    if cfg.mixed is not None:
        return _mixed_layer_specs(cfg, cfg.mixed, layer)
    units, head = kept.kv_heads, cfg.head_dim
    queries = cfg.group * head
    specs = _products_specs(cfg, "attn", units)
    if cfg.qk_norm:
        queries_of, keys_of = (units * queries, units * head) if cfg.joint_qk_norm else (head, head)
        specs["attn.q_norm.scale"] = ParamSpec((queries_of,), "vector")
        specs["attn.k_norm.scale"] = ParamSpec((keys_of,), "vector")
    specs.update(_output_specs(cfg, "attn", units))
    if cfg.sink_logits:
        specs["attn.sink_logits"] = ParamSpec((units, cfg.group), "vector")
    if cfg.post_norms:
        specs.update(_norm_specs(cfg, "attn_post_norm"))
    if cfg.encoder is not None:
        specs.update(_products_specs(cfg, "cross", units) | _output_specs(cfg, "cross", units))
    if cfg.pre_norms and not cfg.parallel_blocks:
        specs.update(_norm_specs(cfg, "ffn_norm"))
    specs.update((_expert_specs if cfg.is_sparse(layer) else _ffn_specs)(cfg, kept.neurons))
    if cfg.post_norms:
        specs.update(_norm_specs(cfg, "ffn_post_norm"))
    return specs


def _mixed_layer_specs(cfg: ModelConfig, mixed: MixedLayers, layer: int) -> dict[str, ParamSpec]:
    own: ModelConfig = layer_config(cfg, layer)
    norm = ParamSpec((cfg.hidden_size,), "vector")
    specs = _products_specs(own, "attn", own.kv_heads)
    if mixed.keys_as_values and not cfg.attention_windows[layer]:
        del specs["attn.v"]
    specs["attn.q_norm.scale"] = specs["attn.k_norm.scale"] = ParamSpec((own.head_dim,), "vector")
    if shares_kv(cfg, layer):
        for name in ("attn.k", "attn.v", "attn.k_norm.scale"):
            specs.pop(name, None)
    specs |= _output_specs(own, "attn", own.kv_heads) | _norm_specs(cfg, "attn_post_norm")
    specs |= _norm_specs(cfg, "ffn_norm") | _ffn_specs(own, own.ffn_size) | _norm_specs(cfg, "ffn_post_norm")
    if cfg.experts:
        specs |= {f"{name}_norm.scale": norm for name in ("router", "experts", "experts_post", "dense_post")}
        specs |= {
            "router_output.scale": ParamSpec((cfg.experts,), "vector"),
            **_expert_specs(own, own.expert_ffn_size),
        }
    if mixed.layer_input_size:
        shape = (mixed.layer_input_size, cfg.hidden_size)
        specs["layer_input.gate"] = ParamSpec(shape, "to_units")
        specs["layer_input.o"] = ParamSpec(shape, "from_units")
        specs |= _norm_specs(cfg, "layer_input_norm")
    return specs | {"output.scale": ParamSpec((1,), "vector")}


def _state_layer_specs(cfg: ModelConfig, layer: int, neurons: int) -> dict[str, ParamSpec]:
    """Parameters of a layer with a state in place of attention."""
    assert cfg.states is not None
    specs = _norm_specs(cfg, "state_norm")
    specs |= {f"state.{name}": ParamSpec(*each) for name, each in _state_specs(cfg.states, cfg.hidden_size)}
    ffn = _expert_specs if cfg.is_sparse(layer) else _ffn_specs
    return specs | _norm_specs(cfg, "ffn_norm") | ffn(cfg, neurons)


def _state_specs(states: StateConfig, width: int) -> Iterator[tuple[str, tuple[tuple[int, ...], Role]]]:
    """Names, shapes and roles of the parameters of a state."""
    yield "conv", ((states.channels(width), states.taps), "vector")
    if states.kind == "short_conv":
        if states.bias:
            yield "conv_bias", ((width,), "vector")
        for name in ("input_gate", "output_gate", "value"):
            yield name, ((width, width), "to_units")
            if states.bias:
                yield f"{name}_bias", ((width,), "vector")
        yield "o", ((width, width), "from_units")
        if states.bias:
            yield "o_bias", ((width,), "vector")
        return
    values = states.group * states.value_dim
    for name, rows in (("q", states.key_dim), ("k", states.key_dim), ("v", values), ("gate", values)):
        yield name, ((states.key_heads, rows, width), "to_units")
    # Never quantized: they are small, and decide how long a state lasts.
    for name in ("correction", "decay"):
        yield name, ((states.value_heads, width), "vector")
    yield "decay_bias", ((states.value_heads,), "vector")
    yield "decay_log", ((states.value_heads,), "vector")
    yield "norm.scale", ((states.value_dim,), "vector")
    yield "o", ((states.key_heads, values, width), "from_units")


def _products_specs(cfg: ModelConfig, name: str, units: int) -> dict[str, ParamSpec]:
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


def _output_specs(cfg: ModelConfig, name: str, units: int) -> dict[str, ParamSpec]:
    shape = (units, cfg.group * cfg.head_dim, cfg.hidden_size)
    specs = {f"{name}.o": ParamSpec(shape, "from_units")}
    if cfg.o_bias:
        specs[f"{name}.o_bias"] = ParamSpec((cfg.hidden_size,), "vector")
    return specs


def _ffn_specs(cfg: ModelConfig, neurons: int) -> dict[str, ParamSpec]:
    specs = {}
    for name in ("gate", "up") if cfg.gated_ffn else ("up",):
        specs[f"ffn.{name}"] = ParamSpec((neurons, cfg.hidden_size), "to_units")
        if cfg.ffn_bias:
            specs[f"ffn.{name}_bias"] = ParamSpec((neurons,), "vector")
    specs["ffn.down"] = ParamSpec((neurons, cfg.hidden_size), "from_units")
    if cfg.ffn_bias:
        specs["ffn.down_bias"] = ParamSpec((cfg.hidden_size,), "vector")
    return specs


def _expert_specs(cfg: ModelConfig, neurons: int) -> dict[str, ParamSpec]:
    shape = (cfg.experts, neurons, cfg.hidden_size)
    # Never quantized: it is small, and rounding it would change which experts run.
    specs = {"router": ParamSpec((cfg.experts, cfg.hidden_size), "vector")}
    if cfg.expert_bias:
        specs["router_bias"] = ParamSpec(shape[:1], "vector")
        specs |= {f"expert_{name}_bias": ParamSpec(shape[:2], "vector") for name in ("gate", "up")}
        specs["expert_down_bias"] = ParamSpec((cfg.experts, cfg.hidden_size), "vector")
    for name in ("gate", "up") if cfg.gated_ffn else ("up",):
        specs[f"experts.{name}"] = ParamSpec(shape, "to_units")
    specs["experts.down"] = ParamSpec(shape, "from_units")
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


def _of_experts(name: str) -> bool:
    return ".experts." in name or (".expert_" in name and name.endswith("_bias"))


def active_parameter_count(cfg: ModelConfig) -> int:
    """Number of scalar parameters used per token: only the k visited experts of each layer."""
    idle = cfg.experts - cfg.experts_per_token
    return sum(
        int(np.prod((spec.shape[0] - idle, *spec.shape[1:]) if _of_experts(name) else spec.shape))
        for name, spec in param_specs(cfg).items()
    )
