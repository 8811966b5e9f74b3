"""Tests the features of decoders in TFLite: the same answers as the steps that were exported."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config import WHOLE, ModelConfig, RopeConfig
from jaxllm.export.programs.live import LiveExecutor
from jaxllm.export.programs.model import ProgramModel, open_program
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import read_subject
from jaxllm.kernels.native import without_native_kernels
from jaxllm.serving.engine.engine import Engine
from jaxllm.serving.engine.request import GenerationConfig
from tests.tiny import TINY, tiny_params, write_tiny_bundle

pytest.importorskip("litert_converter")
pytest.importorskip("ai_edge_litert")

from jaxllm.export.tflite import export_tflite

CONTEXT, CHUNKS = 48, (16,)
CONFIG = GenerationConfig(max_tokens=12, ignore_eos=True)
PROMPTS = [[1], [(7 * i) % TINY.vocab_size for i in range(23)]]
BIASES = {"qkv_bias": True, "o_bias": True, "ffn_bias": True}
PLAIN = {"gated_ffn": False, "norm": "layer", "learned_positions": True, "rope": None, "tied_head": True}
GEMMA = {
    "attention_windows": (5, 0),
    "post_norms": True,
    "activation": "gelu_tanh",
    "embed_scale": 8.0,
    "logit_softcap": 3.0,
    "tied_head": True,
}
MODELS = {
    "qwen2": {"qkv_bias": True, "tied_head": True},
    "qwen3": {"qk_norm": True},
    "mistral": {"attention_windows": (5, 5)},
    "phi3": {"rope": RopeConfig(dim=8), "kv_heads": 4},
    "gemma2": {**GEMMA, "attention_softcap": 2.0},
    "gemma3_text": {**GEMMA, "qk_norm": True, "local_rope": RopeConfig(dim=16, theta=500.0)},
    "gpt2": {**PLAIN, **BIASES, "activation": "gelu_tanh", "kv_heads": 4},
    "opt": {**PLAIN, **BIASES, "activation": "relu", "kv_heads": 4},
}


def random_vectors(cfg: ModelConfig):
    """Parameters whose norms and biases are far from ones and zeros, so that a lost one shows."""
    draw = np.random.default_rng(3)

    def moved(name: str, value: np.ndarray) -> np.ndarray:
        vector = "norm" in name or "bias" in name
        return value + draw.normal(size=value.shape).astype(np.float32) * 0.3 if vector else value

    return {name: moved(name, value) for name, value in tiny_params(cfg).items()}


@pytest.mark.parametrize("model_type", MODELS)
def test_answers_are_those_of_the_steps(model_type, tmp_path):
    cfg = dataclasses.replace(TINY, model_type=model_type, **MODELS[model_type])
    params = random_vectors(cfg)
    bundle = write_tiny_bundle(tmp_path / "tiny.jaxllm", cfg=cfg, params=params)
    plan = ExportPlan(context_tokens=CONTEXT, chunk_tokens=CHUNKS)
    export_tflite(read_subject(bundle), tmp_path / "tflite", plan)
    engine = open_program(tmp_path / "tflite", threads=1)
    arrays = {name: jnp.asarray(value) for name, value in params.items()}
    live = LiveExecutor("tiny", {WHOLE: arrays}, {WHOLE: cfg}, context_tokens=CONTEXT, chunk_tokens=CHUNKS)
    with without_native_kernels():
        for signature in live.manifest.signatures:
            live.compile(signature)
    wanted = Engine(ProgramModel(live, engine.tokenizer))
    for prompt in PROMPTS:
        assert engine.generate(prompt, CONFIG).tokens == wanted.generate(prompt, CONFIG).tokens
