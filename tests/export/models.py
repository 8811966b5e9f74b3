"""Tiny models to export, and what the live engine says."""

import dataclasses
import io

import jax
import numpy as np
import pytest

from jaxllm.bundle.levels import Recovery, elastic_parts
from jaxllm.bundle.tiny_lm import tiny_lm_parts
from jaxllm.checkpoints.peft import write_adapter
from jaxllm.elastic.ladder import Ladder, sub_config
from jaxllm.export.device.opening import open_device
from jaxllm.models.lora import LoraConfig, init_adapter
from jaxllm.models.tiny_lm import TlmConfig
from jaxllm.serving.ground.options import EngineOptions
from tests.export.sizes import CFG as CFG
from tests.export.sizes import CHUNKS as CHUNKS
from tests.export.sizes import CONFIG as CONFIG
from tests.export.sizes import CONTEXT as CONTEXT
from tests.export.sizes import PROMPTS as PROMPTS
from tests.export.sizes import answers as answers
from tests.models.test_lora import random_adapter
from tests.tiny import tiny_tokenizer, write_tiny_bundle
from tests.tiny_tlm import ENCODER, random_tlm, tiny_lm

LADDER = Ladder(levels=(40, 70, 100))
OPTIONS = EngineOptions(
    context_tokens=CONTEXT, cache_tokens=(CONTEXT,), chunk_tokens=CHUNKS, levels=(40,), buckets_bytes=0
)


def write_elastic(path, scaling=0.5):
    """An elastic bundle of float weights whose level 40 has an adapter of its own."""
    adapter = init_adapter(
        sub_config(CFG, LADDER, 40), LoraConfig(rank=2, targets=("attn.q", "ffn.down")), jax.random.key(1)
    )
    draw = np.random.default_rng(1)
    adapter = {name: draw.normal(size=part.shape).astype(np.float32) * 0.3 for name, part in adapter.items()}
    parts = elastic_parts(LADDER, {40: Recovery(adapter, scaling)})
    return write_tiny_bundle(path, cfg=CFG, parts=parts)


def write_planned(path):
    """An elastic bundle with a tiny LM that has a tokenizer of its own, and a matrix that is served at 8
    bits."""
    encoder = dataclasses.replace(ENCODER, hidden_size=256, ffn_size=256)
    ratios = (0.25, 0.5, 1.0)
    cfg = TlmConfig(encoder=encoder, shared_layers=1, levels=len(LADDER.levels), prompt_levels=len(ratios))
    tiny = tiny_lm(
        LADDER.levels, ratios, cfg=cfg, params=random_tlm(cfg), tokenizer=tiny_tokenizer(chat=False)
    )
    parts = {**elastic_parts(LADDER), **tiny_lm_parts(tiny)}
    return write_tiny_bundle(path, cfg=CFG, parts=parts), tiny


def write_adapters(folder):
    """Two adapters of `CFG` by name, of different ranks and targets."""
    named = {"mail": (4, LoraConfig.targets), "notes": (2, ("attn.q", "ffn.down"))}
    for seed, (name, (rank, targets)) in enumerate(named.items()):
        lora = LoraConfig(rank=rank, alpha=16, targets=targets)
        write_adapter(folder / name, CFG, lora, random_adapter(CFG, lora, seed))
    return {name: folder / name for name in named}


def models_of(path, folder):
    """The `.tflite` models in a LiteRT-LM file, in the order of their names."""
    from litert_lm_builder import litertlm_peek

    litertlm_peek.peek_litertlm_file(str(path), str(folder), io.StringIO())
    return [each.read_bytes() for each in sorted(folder.glob("*.tflite"))]


def exported(kind, subject, folder, plan):
    """Programs of a format, "stablehlo" or "tflite", or of its precision, "tflite int8", opened as a device
    does; skips where its packages are missing."""
    if kind == "stablehlo":
        pytest.importorskip("flatbuffers")
        from jaxllm.export.stablehlo import export_stablehlo

        export_stablehlo(subject, folder, plan, platforms=("cpu",))
    else:
        pytest.importorskip("litert_converter")
        from jaxllm.export.tflite import export_tflite

        export_tflite(subject, folder, plan, precision=kind.partition(" ")[2] or "f32")
    return open_device(folder, threads=1)
