"""Exports one `.tflite` model of all signatures, for LiteRT on phones; its weights are shared constants.

Precisions: `f32`; `int8`, with weights at 8 bits and dynamic activations; `w8a8`, whose prefill programs
have static steps of activations instead, and the shadow of a calibrated bundle (see `quantized.py`).

A level's matrices are prefixes of the whole model's, and share their bytes. Where a level contracts over
units (o, down), it multiplies by the whole matrix, with zero activations for missing units: the runtime
stores these matrices by output, so that a level's part is no prefix.
"""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import WHOLE, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.export.contents import require_family, require_format
from jaxllm.export.converter import Sharing, Traced, convert, share_buffers, traced
from jaxllm.export.folder import ProgramKind, finish, new_folder
from jaxllm.export.folder_format.manifest import Manifest, Precision
from jaxllm.export.folder_format.parts import STAGE_FILES, Argument, ProgramLevel
from jaxllm.export.folder_format.signature import Signature
from jaxllm.export.quantized import (
    LEVELS,
    SCALE,
    Ranges,
    StaticProduct,
    annotated,
    left_out,
    quantized_subject,
    static_level,
    with_shadow,
)
from jaxllm.export.signatures import ExportPlan, step_shapes, step_weights, subject_step, tiny_signatures
from jaxllm.export.stages import stage_facts, stage_models
from jaxllm.export.steps.exported import ParamsOf, with_adapters
from jaxllm.export.subject import Subject
from jaxllm.models.features import require_room
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import Prefix, Weight
from jaxllm.serving.host.progress import Progress

FILE = "model.tflite"
PRECISIONS = ("f32", "int8", "w8a8")
_FLOAT = np.dtype(np.float32)
_PACKAGES = ("litert-converter", "ai-edge-litert")


def export_tflite(
    subject: Subject,
    out: Path,
    plan: ExportPlan,
    *,
    precision: Precision = "f32",
    ranges: Mapping[int, Mapping[str, Ranges]] | None = None,
    progress: Progress | None = None,
    beside: Callable[[Path], None] | None = None,
) -> tuple[Manifest, Sharing]:
    """Writes a folder with one model of all signatures.

    Args:
      subject: the model, in float32.
      out: path of the new folder.
      plan: plan of the signatures.
      precision: one of `PRECISIONS`.
      ranges: ranges of activations for w8a8 (see `quantized.calibrate`).
      progress: callback for ("export", signatures traced, number of signatures).
      beside: function that writes further files into the folder, which the manifest lists; None for none.

    Returns:
      The manifest, and the bytes of the weights.

    Raises:
      ConfigError: the format does not support the model, an option is out of range, the folder exists, or
        the extra is missing.
    """
    require_format("tflite")
    plan = plan.resolved(subject.cfg)
    signatures = [each for level in subject.levels for each in plan.signatures(level, lambda _: FILE)]
    signatures += tiny_signatures(subject.tiny_lm, lambda _: FILE)
    if plan.stages and precision != "w8a8":
        raise ConfigError("stages for two processors are of w8a8 models; give --precision w8a8")
    facts = stage_facts(subject, plan) if plan.stages else None
    quantized = _quantized(subject, plan, precision, ranges)
    with new_folder(out) as folder:
        model, sharing = _model(quantized, plan, signatures, progress)
        (folder / FILE).write_bytes(model)
        if facts is not None:
            of, products = quantized.static[WHOLE]
            made = stage_models(of, facts, products, quantized.scales, cache_tokens=plan.context_tokens)
            for processor, each in made.items():
                (folder / STAGE_FILES[processor]).write_bytes(each)
        if beside is not None:
            beside(folder)
        manifest = finish(
            folder,
            subject,
            plan,
            signatures,
            ProgramKind(
                format="tflite",
                precision=precision,
                made_with={name: importlib.metadata.version(name) for name in _PACKAGES},
                stages=facts,
            ),
        )
    return manifest, sharing


def tflite_model(
    subject: Subject,
    plan: ExportPlan,
    signatures: list[Signature],
    *,
    precision: Precision,
    ranges: Mapping[int, Mapping[str, Ranges]] | None = None,
    progress: Progress | None = None,
) -> tuple[bytes, Sharing]:
    """The model as bytes, and the bytes of its weights (see `export_tflite`); `plan` is resolved."""
    return _model(_quantized(subject, plan, precision, ranges), plan, signatures, progress)


@dataclasses.dataclass(frozen=True, eq=False)
class _Quantized:
    """A subject as its programs multiply.

    Attributes:
      subject: subject with the arrays of dynamic products.
      scales: scales of weights, by name; empty in floats.
      static: by level, the subject with the arrays of static products, and these.
    """

    subject: Subject
    scales: Mapping[str, np.ndarray]
    static: Mapping[int, tuple[Subject, dict[str, StaticProduct]]]


def _quantized(
    subject: Subject,
    plan: ExportPlan,
    precision: Precision,
    ranges: Mapping[int, Mapping[str, Ranges]] | None,
) -> _Quantized:
    require_room(subject.cfg, "tflite")
    if precision not in PRECISIONS:
        raise ConfigError(f"a tflite model is {', '.join(PRECISIONS)}, not {precision}; choose one")
    require_family("tflite", precision, subject.cfg, levels=len(subject.levels) > 1)
    if (precision == "w8a8") != bool(ranges):
        raise ConfigError("w8a8, and it alone, takes a text to calibrate on; give --calibration-text FILE")
    left_out(subject, precision, without_shadow=plan.without_shadow)
    scales: dict[str, np.ndarray] = {}
    if precision == "w8a8":
        subject = subject.without_calibration() if plan.without_shadow else with_shadow(subject)
    if precision != "f32":
        subject, scales = quantized_subject(subject)
    whole = {
        level: with_whole_outputs(subject, level, int8_embedding=bool(scales)) for level in subject.levels
    }
    subject = dataclasses.replace(subject, levels=whole)
    static = {level: static_level(subject, level, scales, each) for level, each in (ranges or {}).items()}
    return _Quantized(subject, scales, static)


def _model(
    quantized: _Quantized, plan: ExportPlan, signatures: list[Signature], progress: Progress | None
) -> tuple[bytes, Sharing]:
    subject, made = quantized.subject, []
    for done, signature in enumerate(signatures):
        of, products = subject, {}
        if signature.level in quantized.static and signature.kind in plan.static_kinds:
            of, products = quantized.static[signature.level]
        made.append(_traced(signature, of, plan, scales=quantized.scales, static=products))
        if progress is not None:
            progress("export", done + 1, len(signatures))
    # The converter turns them into float32.
    halves = [each for each in subject.arrays.values() if each.dtype == np.float16]
    return share_buffers(convert(made), halves)


def with_whole_outputs(subject: Subject, level: int, *, int8_embedding: bool) -> ProgramLevel:
    """Returns a level whose matrices that contract units are the whole model's; with the embedding's int8
    levels, if any."""
    entry = subject.levels[level]
    specs = param_specs(subject.cfg)
    weights = {
        name: Argument(stored=each.stored, shape=specs[name].shape)
        if name in specs and specs[name].role == "from_units"
        else each
        for name, each in entry.weights.items()
    }
    if int8_embedding:
        for part in (f"embed.tokens{LEVELS}", f"embed.tokens{SCALE}"):
            weights[part] = Argument(stored=part, shape=subject.arrays[part].shape)
    return ProgramLevel(cfg=entry.cfg, weights=weights)


def _params_of(*, scales: Mapping[str, np.ndarray], static: Mapping[str, StaticProduct]) -> ParamsOf:

    def params(weights: Mapping[str, Weight], cfg: ModelConfig) -> Params:
        whole: dict[str, Any] = dict(weights)
        for name, spec in param_specs(cfg).items():
            if spec.role == "from_units" and weights[name].shape != spec.shape:
                whole[name] = Prefix(weights[name], spec.shape[0])
        if not scales:
            return with_adapters(whole, cfg)
        return annotated(
            whole,
            cfg,
            scales=scales,
            static={name: functools.partial(each.of, name) for name, each in static.items()},
        )

    return params


def _traced(
    signature: Signature,
    subject: Subject,
    plan: ExportPlan,
    *,
    scales: Mapping[str, np.ndarray],
    static: Mapping[str, StaticProduct],
) -> Traced:
    # Adapters are stored under names of their level.
    level = subject.levels[signature.level]
    own = {name: scales[each.stored] for name, each in level.weights.items() if each.stored in scales}
    params_of = _params_of(scales=own, static=static)
    step = subject_step(signature, subject, _FLOAT, loops=False, params_of=params_of)
    _, caches, inputs = step_shapes(signature, subject, plan, _FLOAT)
    return traced(signature.name, step, step_weights(signature, subject), caches, inputs)
