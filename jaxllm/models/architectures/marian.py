"""Marian: BART with sinusoidal positions, which are computed, and without norms of embeddings."""

import dataclasses
from typing import Any

import numpy as np

from jaxllm.config import ModelConfig
from jaxllm.models.architectures.bart import bart_like, read_bart
from jaxllm.models.config_reader import ConfigReader

_OWN: dict[str, Any] = {"sinusoidal_positions": True, "norm_after": True, "final_norm": False}


def _read(reader: ConfigReader) -> ModelConfig:
    reader.only(
        "share_encoder_decoder_embeddings", (True,), "encoder and decoder have to share one token embedding"
    )
    cfg = read_bart(reader, "marian", vocab_size=58101, **_OWN)
    reader.only("decoder_vocab_size", (None, cfg.vocab_size), "encoder and decoder share one vocabulary")
    return cfg


def _positions(cfg: ModelConfig) -> np.ndarray:
    """Position embeddings, `[window, D]`: sines, then cosines."""
    frequencies = 10000.0 ** -(np.arange(0, cfg.hidden_size, 2) / cfg.hidden_size)
    angles = np.arange(cfg.window_tokens)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1).astype(np.float32)


MARIAN = dataclasses.replace(
    bart_like("marian", "MarianMTModel", **_OWN),
    read_config=_read,
    computed=dict.fromkeys(("encoder.embed_positions.weight", "decoder.embed_positions.weight"), _positions),
)
