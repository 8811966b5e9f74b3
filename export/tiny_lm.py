"""Exports the tiny LM of a bundle as programs: its weights as served, its signatures and its step."""

import functools
import json
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from jaxllm.bundle.tiny_lm import TinyLm
from jaxllm.config import WHOLE
from jaxllm.elastic.compression import row_lengths
from jaxllm.export.folder_format.manifest import Signature
from jaxllm.export.folder_format.tiny_lm import TINY_TOKENIZER, TinyLmFacts
from jaxllm.export.steps.exported_tiny_lm import LEVELS, SCALE, run_tiny_lm
from jaxllm.quant import QArray
from jaxllm.serving.elastic.tiny_lm import served_arrays


def tiny_facts(tiny: TinyLm) -> TinyLmFacts:
    """Returns the manifest's facts about a tiny LM."""
    return TinyLmFacts(
        levels=tiny.levels,
        prompt_ratios=tiny.prompt_ratios,
        mark_ids=tiny.mark_ids,
        row_tokens=tiny.row_tokens,
        own_tokenizer=tiny.tokenizer is not None,
    )


def tiny_signatures(tiny: TinyLm | None, file: Callable[[str], str]) -> list[Signature]:
    """The signatures of a tiny LM, none of None; `file`: name of a signature -> its file."""
    if tiny is None:
        return []
    return [
        Signature(kind="tiny_lm", tokens=each, level=WHOLE, file=file(f"tiny_lm_{each}"))
        for each in row_lengths(tiny.row_tokens)
    ]


def tiny_weights(tiny: TinyLm) -> dict[str, np.ndarray]:
    """The weight arguments of a tiny LM's programs: float32, and large matrices at 8 bits as native kernels
    serve them."""
    weights = {}
    for name, each in served_arrays(tiny.params, native_here=True).items():
        if isinstance(each, QArray):
            weights[f"{name}{LEVELS}"] = np.asarray(each.data, np.int8)
            weights[f"{name}{SCALE}"] = np.asarray(each.scale, np.float32)
        else:
            weights[name] = np.asarray(each, np.float32)
    return weights


def tiny_step(tiny: TinyLm) -> Callable[..., dict[str, jax.Array]]:
    """The function `(weights, no caches, tokens, mask)` of a tiny LM's programs."""
    return functools.partial(run_tiny_lm, cfg=tiny.cfg)


def write_tiny_tokenizer(folder: Path, tiny: TinyLm | None) -> None:
    """Writes a tiny LM's own tokenizer into a folder of programs, if it has one."""
    if tiny is not None and tiny.tokenizer is not None:
        (folder / TINY_TOKENIZER).write_text(json.dumps(tiny.tokenizer.to_json()), encoding="utf-8")
