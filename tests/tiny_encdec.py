"""A tiny encoder-decoder with the tiny model's tokenizer, as a bundle; its decoder begins with <|begin|>."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from jaxllm.bundle import WeightFormat
from jaxllm.config import ModelConfig
from jaxllm.text.tokenizer import TokenizerFiles
from tests import tiny

ENCODER = ModelConfig(
    model_type="t5", vocab_size=tiny.VOCAB_SIZE, hidden_size=64, layers=2, heads=4, kv_heads=4, head_dim=16,
    ffn_size=80, window_tokens=48, activation="relu", gated_ffn=False, attention_scale=1.0,
    relative_buckets=8, relative_distance=20, tied_head=True,
)  # fmt: skip
TINY_T5 = dataclasses.replace(ENCODER, encoder=ENCODER, window_tokens=64)


def tokenizer(prefix: str = "", tasks: Mapping[str, str] | None = None) -> TokenizerFiles:
    """The tiny model's, of an encoder-decoder."""
    own = {"start_ids": (tiny.BEGIN_ID,), "source_prefix": prefix, "tasks": tasks or {}}
    return dataclasses.replace(tiny.tiny_tokenizer(), **own)


def write_bundle(
    path: Path,
    weights: WeightFormat = "f32",
    *,
    cfg: ModelConfig = TINY_T5,
    prefix: str = "",
    tasks: Mapping[str, str] | None = None,
) -> Path:
    """Writes a bundle of a tiny encoder-decoder; returns its path."""
    return tiny.write_tiny_bundle(path, weights, cfg=cfg, tokenizer=tokenizer(prefix, tasks), name="tiny-t5")
