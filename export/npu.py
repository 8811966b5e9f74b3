"""Makes the three models that LiteRT-LM's executor for NPUs requires in one file, in floats.

`EMBEDDER` looks tokens up; `AUX` makes masks and angles, and writes slices into caches; `PREFILL_DECODE`
runs on the NPU (see `jaxllm.export.steps.exported_npu`). A vendor's plugin then quantizes the last one and
compiles it for one SoC, which requires the vendor's SDK. In floats all three run on a CPU, too.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import numpy as np

from jaxllm.config import WHOLE
from jaxllm.errors import ConfigError
from jaxllm.export.flatbuffer import Sharing, share_buffers
from jaxllm.export.mlir import Traced, convert, exported_step, result_names
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.steps import exported_npu as steps
from jaxllm.export.subject import Subject
from jaxllm.serving.host.progress import Progress

EMBEDDER, AUX, PREFILL_DECODE = "EMBEDDER", "AUX", "PREFILL_DECODE"


class _Part(NamedTuple):
    """Signature: its model and name, its step, the shapes of its inputs, and whether it has weights."""

    model: str
    name: str
    step: Callable[[Any, Any], Any]
    shapes: steps.Shapes
    weighted: bool


def npu_models(
    subject: Subject, plan: ExportPlan, progress: Progress | None = None
) -> tuple[dict[str, bytes], Sharing]:
    """The models of the whole model of a subject, by type, and the bytes of the NPU's weights; `plan` is
    resolved.

    Raises:
      ConfigError: the model cannot be divided so, or the plan has several lengths of chunks.
    """
    steps.require_divisible(subject.cfg)
    if len(plan.chunk_tokens) != 1:
        raise ConfigError(
            f"the models of an NPU have one length of chunks, not {plan.chunk_tokens}; give one "
            "--chunk-tokens, as 128"
        )
    parts = list(_parts(subject, plan))
    found: dict[str, list[Traced]] = {EMBEDDER: [], AUX: [], PREFILL_DECODE: []}
    for done, part in enumerate(parts):
        found[part.model].append(_traced(part, subject))
        if progress is not None:
            progress("export", done + 1, len(parts))
    halves = [each for each in subject.arrays.values() if each.dtype == np.float16]
    shared = {model: share_buffers(convert(each), halves) for model, each in found.items()}
    return {model: each for model, (each, _) in shared.items()}, shared[PREFILL_DECODE][1]


def _parts(subject: Subject, plan: ExportPlan) -> Sequence[_Part]:
    cfg, room, found = subject.cfg, plan.context_tokens, []
    for suffix, tokens in ((f"_{plan.chunk_tokens[0]}", plan.chunk_tokens[0]), ("", 1)):
        kind = "prefill" if suffix else "decode"
        row = jax.ShapeDtypeStruct((1, tokens), np.int32)
        position = {"input_pos": jax.ShapeDtypeStruct((tokens,), np.int32)}
        asked = {"time_step": jax.ShapeDtypeStruct((1,), np.int32), "input_tokens": row}
        kept = {**steps.cache_inputs(cfg, room), **steps.slice_inputs(cfg, tokens), **position}
        run = functools.partial(steps.run_layers, cfg=cfg, with_logits=not suffix)
        masks = functools.partial(steps.run_masks, cfg=cfg, cache_tokens=room)
        angles, update, embed = (
            functools.partial(each, cfg=cfg)
            for each in (steps.run_angles, steps.run_cache_update, steps.run_embedder)
        )
        found += [
            _Part(EMBEDDER, f"{kind}_embedder{suffix}", embed, {"token_ids": row}, True),
            _Part(AUX, f"{kind}_mask{suffix}", masks, asked, False),
            _Part(AUX, f"{kind}_rope{suffix}", angles, position, False),
            _Part(AUX, f"{kind}_cache_update{suffix}", update, kept, False),
            _Part(PREFILL_DECODE, f"{kind}{suffix}", run, steps.layer_inputs(cfg, tokens, room), True),
        ]
    return found


def _traced(part: _Part, subject: Subject) -> Traced:
    weights = subject.weights(WHOLE) if part.weighted else {}
    if part.model == EMBEDDER:
        weights = {name: each for name, each in weights.items() if name.startswith("embed.")}
    given = {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in weights.items()}
    exported = exported_step(part.step, given, part.shapes)
    return Traced(
        part.name,
        exported.mlir_module_serialized,
        [weights[name] for name in sorted(weights)],
        sorted(part.shapes),
        result_names(exported),
    )
