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

VOCAB = 96
WINDOW = 64
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Head size 16 has wavelengths from 6 to 20,000: some are kept, some blended, some interpolated.
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
YARN_ROPE_IN_FULL = {
    **YARN_ROPE,
    # Long enough that both ends of the ramp fall between dimensions 0 and 8.
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 2.0,
    "truncate": False,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}

_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": WINDOW,
}
_QWEN3_MOE = {
    **_LLAMA,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_GEMMA = {**_LLAMA, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5}
_GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": WINDOW}
_OPT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": WINDOW,
}


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"head_dim": 16, "rope_parameters": {"rope_theta": 10000.0, **parameters}}


# Name of the variant: transformers' class without its suffix, and the config's keys.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_LLAMA, "tie_word_embeddings": True}),
    "llama-untied-biases": ("Llama", {**_LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": ("Llama", {**_LLAMA, **_rope(**LLAMA3_ROPE)}),
    "llama-linear-rope": ("Llama", {**_LLAMA, **_rope(rope_type="linear", factor=3.0)}),
    "llama-yarn": ("Llama", {**_LLAMA, **_rope(**YARN_ROPE)}),
    "llama-yarn-mscale": ("Llama", {**_LLAMA, **_rope(**YARN_ROPE_IN_FULL)}),
    "mistral": ("Mistral", {**_LLAMA, "head_dim": 16, "sliding_window": 5}),
    "mistral-full": ("Mistral", {**_LLAMA, "sliding_window": None, "num_key_value_heads": 4}),
    "qwen2": ("Qwen2", {**_LLAMA, "tie_word_embeddings": True}),
    "qwen2-sliding": (
        "Qwen2",
        {**_LLAMA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**_LLAMA, "head_dim": 16, "attention_bias": True}),
    "mixtral": ("Mixtral", {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-one-of-three": (
        "Mixtral",
        {**_LLAMA, "num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 5},
    ),
    "olmoe": ("Olmoe", {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 1.5}),
    "qwen3_moe": ("Qwen3Moe", {**_QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe-one": ("Qwen3Moe", {**_QWEN3_MOE, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
    "qwen3_moe-one-normalized": (
        "Qwen3Moe",
        {**_QWEN3_MOE, "num_experts_per_tok": 1, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "qwen3_moe-some-dense": (
        "Qwen3Moe",
        {
            **_QWEN3_MOE,
            "num_hidden_layers": 5,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 6,
        },
    ),
    "gemma": ("Gemma", {**_LLAMA, "head_dim": 16, "hidden_act": "gelu", "attention_bias": True}),
    "stablelm": ("StableLm", {**_LLAMA, "hidden_size": 64, "use_qkv_bias": True}),
    "gemma2": (
        "Gemma2",
        {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {**_GEMMA, "num_hidden_layers": 4, "sliding_window_pattern": 3, "final_logit_softcapping": 4.0},
    ),
    "gemma3-linear-rope": (
        "Gemma3Text",
        {
            **_GEMMA,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "phi3": ("Phi3", {**_LLAMA, "sliding_window": 6, "pad_token_id": 0}),
    "phi3-partial": (
        "Phi3",
        {**_LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}, "pad_token_id": 0},
    ),
    "gpt2": ("GPT2", _GPT2),
    "gpt2-unscaled-untied": (
        "GPT2",
        {**_GPT2, "scale_attn_weights": False, "n_inner": 40, "tie_word_embeddings": False},
    ),
    "opt": ("OPT", _OPT),
    "opt-untied-no-bias": (
        "OPT",
        {**_OPT, "enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"},
    ),
}
ARCHITECTURE_VARIANTS = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "olmoe", "gemma", "gemma2", "gemma3",
    "phi3", "gpt2", "opt", "stablelm",
)  # fmt: skip

_T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    # Not d_model / num_heads.
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    # So few that a source of a test goes past the distance of the last one.
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "decoder_start_token_id": 0,
}
_BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": WINDOW,
    "decoder_start_token_id": 2,
}
_MARIAN = {**_BART, "pad_token_id": VOCAB - 1, "decoder_start_token_id": VOCAB - 1, "scale_embedding": True}
# Encoder-decoders, as `VARIANTS`.
ENCODER_DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", _T5),
    "t5-gated-untied": ("T5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "mt5": ("MT5", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "bart": ("Bart", {**_BART, "forced_bos_token_id": 0}),
    "bart-scaled": ("Bart", {**_BART, "scale_embedding": True, "activation_function": "relu"}),
    "mbart": ("MBart", {**_BART, "scale_embedding": True}),
    "marian": ("Marian", {**_MARIAN, "activation_function": "swish"}),
    "switch_transformers": (
        "SwitchTransformers",
        {
            **_T5,
            "num_layers": 4,
            "num_decoder_layers": 4,
            "num_sparse_encoder_layers": 2,
            "num_sparse_decoder_layers": 2,
            "num_experts": 4,
            # Fewer than the tokens of a source that visit the most popular expert.
            "expert_capacity": 3,
        },
    ),
}

# Multimodal models whose text model is read: ids from here on stand for images.
FIRST_IMAGE_ID = 90
_TEXT = {**_LLAMA, "head_dim": 16}
_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "patch_size": 14,
}
_ROPE_OF_AXES = {
    "rope_type": "default",
    "rope_theta": 5e6,
    "mrope_section": [4, 2, 2],
    "mrope_interleaved": True,
}
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {
            "text_config": {**_GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 3},
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_index": 90,
            "boi_token_index": 91,
            "eoi_token_index": 92,
        },
    ),
    "mistral3": (
        "Mistral3",
        {
            "text_config": {**_TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**_SIGLIP, "model_type": "pixtral"},
            "image_token_index": 90,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "text_config": {**_TEXT, "rope_parameters": _ROPE_OF_AXES},
            "vision_config": _QWEN_VISION,
            "image_token_id": 90,
            "video_token_id": 91,
            "vision_start_token_id": 92,
            "vision_end_token_id": 93,
            "tie_word_embeddings": True,
        },
    ),
    "smolvlm": (
        "SmolVLM",
        {
            "text_config": {**_TEXT, "model_type": "llama"},
            "vision_config": _SIGLIP,
            "image_token_id": 90,
            "pad_token_id": 0,
        },
    ),
}


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


def save(variant: str, folder: Path, *, seed: int = 0, dtype: str = "float32", **how: Any) -> Path:
    """Makes a random model of a variant and saves it; `how` goes to `save_pretrained`."""
    import torch
    import transformers

    family, keys = VARIANTS[variant]
    with quiet():
        config = getattr(transformers, f"{family}Config")(**keys)
        config.eos_token_id = config.bos_token_id = None
        model = transformers.AutoModelForCausalLM.from_config(config)
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
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
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
        model = transformers.AutoModelForImageTextToText.from_config(config)
        _randomize(model, seed)
        model.save_pretrained(folder)
    return folder


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
