"""Tiny models to export, and what the live engine says."""

import dataclasses

import jax
import numpy as np

from jaxllm.bundle.elastic import Recovery, elastic_parts
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.models.lora import LoraConfig, init_adapter
from serving.options import EngineOptions
from serving.request import GenerationConfig
from tests.tiny import TINY, tiny_params, write_tiny_bundle

# Widths at which the runtimes' weight caches tell matrices apart, and tests stay quick.
CFG = dataclasses.replace(TINY, heads=8, kv_heads=4)
LADDER = Ladder(levels=(40, 70, 100))
CONTEXT = 64
CHUNKS = (16,)
OPTIONS = EngineOptions(
    context_tokens=CONTEXT, cache_tokens=(CONTEXT,), chunk_tokens=CHUNKS, levels=(40,), buckets_bytes=0
)
CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)
PROMPTS = [
    [1],
    [1, 50, 7, 99, 23],
    [(7 * i) % CFG.vocab_size for i in range(17)],
    # Its answer outgrows caches of 32.
    [(5 * i) % CFG.vocab_size for i in range(25)],
    [(11 * i) % CFG.vocab_size for i in range(52)],
]


def write_elastic(path, scaling=0.5):
    """An elastic bundle of float weights whose level 40 has an adapter of its own."""
    adapter = init_adapter(
        sub_config(CFG, LADDER, 40), LoraConfig(rank=2, targets=("attn.q", "ffn.down")), jax.random.key(1)
    )
    draw = np.random.default_rng(1)
    adapter = {name: draw.normal(size=part.shape).astype(np.float32) * 0.3 for name, part in adapter.items()}
    parts = elastic_parts(LADDER, {40: Recovery(adapter, scaling)})
    return write_tiny_bundle(path, cfg=CFG, params=tiny_params(CFG), parts=parts)


def answers(engine):
    """The greedy tokens of all prompts."""
    return [engine.generate(prompt, CONFIG).tokens for prompt in PROMPTS]
