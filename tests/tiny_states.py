"""Tiny models with state layers: short convolutions (LFM2) and the delta rule (Qwen3.5)."""

import dataclasses
from pathlib import Path

from jaxllm.bundle import WeightFormat
from jaxllm.layer_configs import StateConfig
from tests import tiny

SHORT_CONV = dataclasses.replace(
    tiny.TINY, model_type="lfm2", layers=4, attention_windows=(), qk_norm=True, tied_head=True,
    states=StateConfig(kind="short_conv", taps=3), state_layers=(True, True, False, True),
)  # fmt: skip
DELTA_RULE = dataclasses.replace(
    tiny.TINY, model_type="qwen3_5_text", layers=4, attention_windows=(), qk_norm=True, attention_gate=True,
    states=StateConfig(kind="delta_rule", taps=4, key_heads=2, value_heads=4, key_dim=16, value_dim=16),
    state_layers=(True, True, True, False),
)  # fmt: skip
CONFIGS = {"short_conv": SHORT_CONV, "delta_rule": DELTA_RULE}


def write_bundle(path: Path, kind: str, weights: WeightFormat = "f32") -> Path:
    """Writes a bundle of a tiny model with such states; returns its path."""
    return tiny.write_tiny_bundle(path, weights, cfg=CONFIGS[kind], name=f"tiny-{kind}")
