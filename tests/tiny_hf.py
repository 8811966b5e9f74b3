"""Tiny random transformers models, one per architecture and interesting variant, saved as folders.

Weights are large enough that attention is far from uniform, and norms and biases far from their initial
values, so that a missing factor shows up in the logits.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.tiny_variants import ENCODER_DECODERS, FIRST_IMAGE_ID, VARIANTS, VOCAB, WRAPPERS

__all__ = [
    "ENCODER_DECODERS", "FIRST_IMAGE_ID", "VARIANTS", "VOCAB", "WRAPPERS", "load", "load_encoder_decoder",
    "logits", "quiet", "save", "save_encoder_decoder", "save_wrapper",
]  # fmt: skip


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers' progress bars and advice out of the test report, and torch to one thread."""
    import torch
    import transformers

    # On models this small, threads do nothing but wait for each other.
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def save(
    variant: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    keys: dict[str, Any] | None = None,
    **how: Any,
) -> Path:
    """Makes a random model of a variant, or of other keys of its family, and saves it; `how` goes to
    `save_pretrained`."""
    import torch
    import transformers

    family, own = VARIANTS[variant]
    with quiet():
        config = getattr(transformers, f"{family}Config")(**(keys or own))
        config.eos_token_id = config.bos_token_id = None
        model = _initial(transformers.AutoModelForCausalLM, config)
        _randomize(model, seed)
        model.to(getattr(torch, dtype)).save_pretrained(folder, **how)
    return folder


def save_encoder_decoder(variant: str, folder: Path, *, seed: int = 0, **changed: Any) -> Path:
    """Makes a random encoder-decoder of a variant, with `changed` keys of its config, and saves it."""
    import torch
    import transformers

    family, keys = ENCODER_DECODERS[variant]
    keys = keys | changed
    with quiet():
        config = getattr(transformers, f"{family}Config")(**keys)
        config.forced_eos_token_id = None
        model = _initial(transformers.AutoModelForSeq2SeqLM, config)
        _randomize(model, seed)
        for name, weights in model.named_parameters():
            if name.endswith("Attention.q.weight"):
                # T5's scores are not scaled: weights of the usual size would leave each token one other.
                weights.data *= keys["d_kv"] ** -0.5
        if hasattr(model, "final_logits_bias"):
            generator = torch.Generator().manual_seed(seed + 1)
            model.final_logits_bias += torch.randn(model.final_logits_bias.shape, generator=generator)
        if variant == "t5-gated-untied":
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).clone())
        model.generation_config.forced_eos_token_id = None
        model.save_pretrained(folder)
    return folder


def load_encoder_decoder(folder: Path) -> Any:
    """A saved encoder-decoder in transformers (see `load`)."""
    import torch
    import transformers

    with quiet():
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
    return model.eval()


def save_wrapper(model_type: str, folder: Path, *, seed: int = 0) -> Path:
    """Makes a random multimodal model and saves it."""
    import transformers

    family, keys = WRAPPERS[model_type]
    with quiet():
        config = getattr(transformers, f"{family}Config")(**keys)
        model = _initial(transformers.AutoModelForImageTextToText, config)
        _randomize(model, seed)
        model.save_pretrained(folder)
    return folder


def _initial(auto: Any, config: Any) -> Any:
    """A model of a config, with the same initial values whatever was drawn before."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return auto.from_config(config)


def _randomize(model: Any, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in model.parameters():
            noise = torch.randn(weights.shape, generator=generator)
            if weights.ndim == 1:
                weights += 0.3 * noise
            else:
                weights.copy_(noise * 1.5 * weights.shape[-1] ** -0.5)
        for name, weights in model.named_buffers():
            # Stored with the parameters, though it is none.
            if name.endswith("layer_scalar"):
                weights += 0.3 * torch.randn(weights.shape, generator=generator)


def load(folder: Path, *, wrapper: bool = False) -> Any:
    """A saved model in transformers, in float32 with attention written out."""
    import torch
    import transformers

    auto = transformers.AutoModelForImageTextToText if wrapper else transformers.AutoModelForCausalLM
    with quiet():
        model = auto.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval()


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """transformers' logits `[B, T, V]` of `tokens` `[B, T]`."""
    import torch

    with torch.no_grad():
        out = model(torch.from_numpy(tokens.astype(np.int64)), use_cache=False)
    return out.logits.numpy()
