"""Prompts to plan, and a tiny LM that reads the tiny model's tokens: untrained, and so wide that its choices
differ."""

import functools
from typing import Any

import jax
import numpy as np

from jaxllm.bundle.tiny_lm import TinyLm
from jaxllm.elastic.slo import marks
from jaxllm.models.encoder.config import EncoderConfig
from jaxllm.models.tiny_lm import TlmConfig, init_tlm
from jaxllm.text.droppable import PromptTokens
from jaxllm.text.marked_text import MarkedText
from tests.tiny import VOCAB_SIZE

ENCODER = EncoderConfig(
    vocab_size=VOCAB_SIZE, embedding_size=8, hidden_size=16, layers=2, heads=2, ffn_size=16,
    window_tokens=64, trigram_input=True,
)  # fmt: skip


def tiny_lm(levels: tuple[int, ...], prompt_ratios: tuple[float, ...], **changes: Any) -> TinyLm:
    """Chooses between these; `changes` are other fields of it."""
    cfg = TlmConfig(encoder=ENCODER, shared_layers=1, levels=len(levels), prompt_levels=len(prompt_ratios))
    fields = {
        "cfg": cfg,
        "params": random_tlm(cfg),
        "levels": levels,
        "prompt_ratios": prompt_ratios,
        "mark_ids": tuple(range(len(marks()))),
        "row_tokens": ENCODER.window_tokens,
    }
    return TinyLm(**{**fields, **changes})


@functools.cache
def random_tlm(cfg: TlmConfig) -> dict[str, np.ndarray]:
    """Its parameters, at four times what training begins with."""
    return {name: 4 * value for name, value in jax.device_get(init_tlm(cfg, jax.random.key(0))).items()}


def word_prompt(tokens=100, forced=10):
    """A prompt whose every token is a word, of which the first ones must stay."""
    places = 2 * np.arange(tokens)
    return PromptTokens(
        marked=MarkedText.of_template("w " * tokens),
        ids=np.arange(tokens), offsets=np.stack([places, places + 1], -1),
        find_spans=lambda: np.array([[2 * forced, 2 * tokens]]),
    )  # fmt: skip
