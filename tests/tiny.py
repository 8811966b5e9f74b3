"""A tiny Llama-shaped model with a byte-level tokenizer, as parameters, as a bundle and as a folder.

Every number in it is fixed: the same call writes the same bytes in every run. Widths are chosen so that
int4 groups of 32 come whole (hidden 64) and cut short (ffn 80).
"""

import functools
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxllm.bundle import Part, WeightFormat, write_bundle
from jaxllm.checkpoints.huggingface import write_folder
from jaxllm.checkpoints.tokenizer_folder import write_tokenizer
from jaxllm.config import ModelConfig
from jaxllm.models import parameters
from jaxllm.text.tokenizer import TokenizerFiles
from tests.tiny_config import BEGIN_ID as BEGIN_ID
from tests.tiny_config import END_ID as END_ID
from tests.tiny_config import MERGES, SPECIAL_TOKENS
from tests.tiny_config import TINY as TINY
from tests.tiny_config import VOCAB_SIZE as VOCAB_SIZE
from tests.tiny_config import WINDOW_TOKENS as WINDOW_TOKENS

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@functools.cache
def tiny_tokenizer(*, chat: bool = True) -> TokenizerFiles:
    """A byte-level BPE tokenizer that begins every text with <|begin|>; any text survives it."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in MERGES)]
    library = tokenizers.Tokenizer(models.BPE({piece: id_ for id_, piece in enumerate(pieces)}, list(MERGES)))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(list(SPECIAL_TOKENS))
    library.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", BEGIN_ID)]
    )
    return TokenizerFiles(
        tokenizer_json=library.to_str(),
        chat_template=CHAT_TEMPLATE if chat else None,
        special={"bos_token": "<|begin|>", "eos_token": "<|end|>"},
        eos_ids=(END_ID,),
        bos_id=BEGIN_ID,
    )


@functools.cache
def tiny_params(cfg: ModelConfig = TINY, seed: int = 0) -> Mapping[str, np.ndarray]:
    """Random float32 parameters, in the order of `param_specs`; read-only, as they are shared."""
    params = jax.device_get(parameters.init_params(cfg, jax.random.key(seed)))
    return {name: params[name] for name in parameters.param_specs(cfg)}


def random_params(cfg: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 parameters, vectors too (which `init_params` leaves at ones and zeros)."""
    draw = np.random.default_rng(seed)
    return {
        name: draw.normal(size=spec.shape).astype(np.float32)
        for name, spec in parameters.param_specs(cfg).items()
    }


def write_tiny_bundle(
    path: Path,
    weights: WeightFormat = "f32",
    *,
    cfg: ModelConfig = TINY,
    params: Mapping[str, np.ndarray] | None = None,
    tokenizer: TokenizerFiles | None = None,
    name: str = "tiny",
    parts: Mapping[str, Part] | None = None,
    expert_bits: np.ndarray | None = None,
) -> Path:
    """Writes a bundle of the tiny model, or of what is given; returns its path."""
    params = tiny_params(cfg) if params is None else params
    tokenizer = tiny_tokenizer() if tokenizer is None else tokenizer
    write_bundle(
        path, cfg=cfg, params=params.items(), weights=weights, tokenizer=tokenizer, name=name, parts=parts,
        expert_bits=expert_bits,
    )  # fmt: skip
    return path


def write_tiny_folder(
    path: Path,
    *,
    cfg: ModelConfig = TINY,
    params: Mapping[str, np.ndarray] | None = None,
    tokenizer: TokenizerFiles | None = None,
) -> Path:
    """Writes the tiny model, or the given parts, as a Hugging Face folder; returns its path."""
    params = tiny_params(cfg) if params is None else params
    write_folder(path, cfg, params, extra_config={"bos_token_id": BEGIN_ID, "eos_token_id": END_ID})
    write_tokenizer(path, tiny_tokenizer() if tokenizer is None else tokenizer)
    return path
