"""Bundles to damage and to forge, and what must be said about them."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm.bundle import WEIGHT_FORMATS, Bundle, Part, WeightFormat, rewrite_bundle
from jaxllm.bundle.layout import HEADER, MAGIC, VERSION
from jaxllm.config import ModelConfig, RopeConfig
from jaxllm.errors import BundleError
from tests.tiny import TINY, random_params, write_tiny_bundle

# Everything that a decoder may have besides: biases, learned positions, post norms, a tied head.
ORNATE = ModelConfig(
    model_type="ornate", vocab_size=37, hidden_size=24, layers=12, heads=6, kv_heads=3, head_dim=4,
    ffn_size=20, window_tokens=9, activation="gelu_tanh", gated_ffn=False, norm="layer",
    learned_positions=True, attention_windows=(0, 3) * 6, logit_softcap=30.0, embed_scale=24**0.5,
    qkv_bias=True, o_bias=True, ffn_bias=True, qk_norm=False, post_norms=True, tied_head=True,
)  # fmt: skip
# Small enough that a test can write it a thousand times.
MICRO = ModelConfig(
    model_type="llama", vocab_size=8, hidden_size=8, layers=1, heads=2, kv_heads=1, head_dim=4, ffn_size=6,
    window_tokens=8, rope=RopeConfig(dim=4),
)  # fmt: skip
# Experts in one layer of two, which do not fill whole panels.
MIXED = dataclasses.replace(
    MICRO, layers=2, attention_windows=(), experts=3, experts_per_token=2, expert_ffn_size=20,
    sparse_layers=(False, True),
)  # fmt: skip
CONFIGS = {"tiny": TINY, "ornate": ORNATE, "micro": MICRO, "mixed": MIXED}
every_format = pytest.mark.parametrize("weights", WEIGHT_FORMATS)
every_config = pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS)


@functools.cache
def params_of(cfg: ModelConfig) -> dict[str, np.ndarray]:
    return random_params(cfg)


def write(path: Path, weights: WeightFormat = "f32", cfg: ModelConfig = TINY, **parts: Any) -> Path:
    return write_tiny_bundle(path, weights, cfg=cfg, **{"params": params_of(cfg), **parts})


def use(path: Path) -> None:
    """Everything that a reader does with a bundle."""
    with Bundle.open(path) as bundle:
        bundle.tokenizer_files()
        bundle.load()
        bundle.verify()


def refused(path: Path, *parts: str, when: Callable[[Path], Any] = use) -> str:
    """The one line in which `when` refuses the file: it names the file and says all `parts`."""
    with pytest.raises(BundleError) as caught:
        when(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 1000
    for part in (str(path), *parts):
        assert part in message
    return message


def open_only(path: Path) -> None:
    Bundle.open(path)


def manifest_at(raw: bytes) -> int:
    """Where the manifest of a bundle with these bytes begins."""
    return HEADER.unpack(raw[: HEADER.size])[3]


def manifest_of(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    offset = manifest_at(raw)
    return json.loads(raw[offset:])


def forge(path: Path, manifest: Any) -> Path:
    """Puts another manifest, or other bytes in its place, into a bundle, with a header that fits."""
    raw = path.read_bytes()
    offset = manifest_at(raw)
    end = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    header = HEADER.pack(MAGIC, VERSION, 0, offset, len(end), hashlib.sha256(end).digest())
    path.write_bytes(header + raw[HEADER.size : offset] + end)
    return path


def rewritten(source: Path, path: Path, parts: Mapping[str, Part]) -> Bundle:
    """A bundle with the weights of another one and other parts, opened."""
    with Bundle.open(source) as bundle:
        rewrite_bundle(path, bundle, parts)
    return Bundle.open(path)


def same_bits(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
