"""Small decoders with every part that a decoder may have, and random parameters of them."""

import dataclasses
import functools

import numpy as np

from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.models.parameters import param_specs
from tests.quick_jit import jit as jit

V, BATCH, PROMPT, CHUNK = 13, 2, 9, 4
# Not a multiple of the chunk, so a padded chunk reaches past the cache's end.
CAPACITY = 10
PLAIN = ModelConfig(
    model_type="llama", vocab_size=V, hidden_size=12, layers=2, heads=4, kv_heads=2, head_dim=6,
    ffn_size=10, window_tokens=CAPACITY, rope=RopeConfig(dim=6),
)  # fmt: skip
CONFIGS = {
    "plain": PLAIN,
    "everything": dataclasses.replace(
        PLAIN, attention_windows=(3, 0), rope=RopeConfig(dim=4, theta=100.0),
        local_rope=RopeConfig(dim=6, theta=50.0), activation="gelu_tanh", attention_scale=0.9,
        attention_softcap=2.0, logit_softcap=1.5, embed_scale=3.0, qkv_bias=True, o_bias=True,
        ffn_bias=True, qk_norm=True, post_norms=True, tied_head=True,
    ),
    "classic": dataclasses.replace(
        PLAIN, kv_heads=4, rope=None, learned_positions=True, norm="layer", gated_ffn=False,
        activation="relu", qkv_bias=True, o_bias=True, ffn_bias=True,
    ),
    "experts": dataclasses.replace(PLAIN, experts=4, experts_per_token=2),
    "some-experts": dataclasses.replace(
        PLAIN, experts=3, experts_per_token=1, expert_ffn_size=6, normalize_expert_weights=False,
        sparse_layers=(False, True), post_norms=True,
    ),
    "norms-behind": dataclasses.replace(
        PLAIN, pre_norms=False, post_norms=True, qk_norm=True, attention_windows=(3, 0),
        rope_layers=(True, False),
    ),
    "growing": dataclasses.replace(
        PLAIN, rope=RopeConfig(dim=6, original_window_tokens=2, query_growth=0.7, factors=(1.0, 1.0, 4.0)),
        logit_scale=0.25,
    ),
    "parallel": dataclasses.replace(
        PLAIN, parallel_blocks=True, head_bias=True, norm="layer", gated_ffn=False, activation="gelu_tanh",
        qkv_bias=True, o_bias=True, ffn_bias=True, rope=RopeConfig(dim=4),
    ),
    "sinks": dataclasses.replace(
        PLAIN, attention_windows=(3, 0), qkv_bias=True, o_bias=True, sink_logits=True, experts=4,
        experts_per_token=2, expert_bias=True, activation="clamped_swiglu",
    ),
    "shared-expert": dataclasses.replace(PLAIN, experts=4, experts_per_token=2, shared_expert_size=7),
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, V, (BATCH, PROMPT), dtype=np.int32)


@functools.cache
def params_of(cfg):
    """Random parameters, vectors far from their initial values, attention far from uniform."""
    rng = np.random.default_rng(1)
    params = {}
    for name, spec in param_specs(cfg).items():
        noise = rng.standard_normal(spec.shape).astype(np.float32)
        if spec.role == "vector" and name != "embed.positions":
            params[name] = np.float32(1.0 * name.endswith("scale")) + np.float32(0.3) * noise
        else:
            params[name] = noise * np.float32(1.0 if name.startswith("embed.") else 0.5)
    return params
