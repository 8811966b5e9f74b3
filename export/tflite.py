"""Exports one `.tflite` model of all signatures, for LiteRT on phones; its weights are shared constants.

Precisions: `f32`; `int8`, with weights at 8 bits and dynamic activations; `int4`, with most weights at 4
bits in blocks of 32 (see `blocks.py`); `w8a8`, whose prefill programs have static steps of activations
instead, and the shadow of a calibrated bundle (see `quantized.py`).

A level's matrices are prefixes of the whole model's, and share their bytes. Where a level contracts over
units (o, down), it multiplies by the whole matrix, with zero activations for missing units: the runtime
stores these matrices by output, so that a level's part is no prefix.
"""

import dataclasses
import functools
import importlib.metadata
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.export.contents import require_family, require_format
from jaxllm.export.converter import Sharing, convert, traced, write_model
from jaxllm.export.folder import finish, new_folder
from jaxllm.export.folder_format.manifest import Manifest, Precision
from jaxllm.export.folder_format.parts import LEFT, RIGHT, Argument, ProgramLevel, StageFacts
from jaxllm.export.folder_format.signature import CODED_KINDS, Signature
from jaxllm.export.placed import PlacedMatrices, as_stored, described_weights
from jaxllm.export.programs.litert import LiteRtExecutor, PackedFolder
from jaxllm.export.quantized import (
    Product,
    Ranges,
    StaticProduct,
    annotated,
    left_out,
    quantized_subject,
    runtime_product,
    sequence_product,
    static_level,
    with_shadow,
)
from jaxllm.export.signatures import ExportPlan, step_shapes, step_weights, subject_step, tiny_signatures
from jaxllm.export.stages import stage_facts, write_stages
from jaxllm.export.steps.exported import ParamsOf
from jaxllm.export.subject import Subject
from jaxllm.export.verification import run_of_model, verify, write_golden
from jaxllm.models.features import require_feature
from jaxllm.models.parameters import Params, param_specs
from jaxllm.quant import OwnProduct, Prefix, Weight
from jaxllm.serving.host.progress import Progress

FILE = "model.tflite"
PRECISIONS = ("f32", "int8", "int4", "w8a8")
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
      precision: one of `PRECISIONS`.
      ranges: ranges of activations for w8a8 (see `quantized.calibrate`).
      progress: callback for ("export" or "verify", signatures traced or run, number of signatures).
      beside: function that writes further files into the folder, which the manifest lists; None for none.

    Returns:
      The manifest, and the bytes of the weights.

    Raises:
      ConfigError: the format does not support the model, an option is out of range, the folder exists, or
        the extra is missing.
      ProgramError: a program computes other results than its step (see `verification.verify`).
    """
    require_format("tflite")
    plan = plan.resolved(subject.cfg)
    signatures = [each for level in subject.levels for each in plan.signatures(level, lambda _: FILE)]
    signatures += tiny_signatures(subject.tiny_lm, lambda _: FILE)
    if plan.stages and precision != "w8a8":
        raise ConfigError("stages for two processors are of w8a8 models; give --precision w8a8")
    facts = stage_facts(subject, plan) if plan.stages else None
    with new_folder(out) as folder:
        sharing = write_tflite(
            folder,
            subject,
            plan,
            signatures,
            precision=precision,
            ranges=ranges,
            stages=facts,
            progress=progress,
        )
        if beside is not None:
            beside(folder)
        manifest = finish(
            folder,
            subject,
            plan,
            signatures,
            format="tflite",
            precision=precision,
            platforms=("cpu",),
            made_with={name: importlib.metadata.version(name) for name in _PACKAGES},
            stages=facts,
        )
        # Packed weights in a file: the system writes what it has no room for.
        with tempfile.TemporaryDirectory(dir=out.absolute().parent) as packed:
            store = PackedFolder(Path(packed) / "packed", limit_bytes=1 << 62)
            manifest = write_golden(folder, LiteRtExecutor(manifest, folder, packed=store), subject)
    return manifest, sharing


def write_tflite(
    folder: Path,
    subject: Subject,
    plan: ExportPlan,
    signatures: list[Signature],
    *,
    precision: Precision,
    ranges: Mapping[int, Mapping[str, Ranges]] | None = None,
    stages: StageFacts | None = None,
    progress: Progress | None = None,
) -> Sharing:
    """Writes the model of all signatures and those of any `stages` into a folder (see `export_tflite`);
    returns the bytes of the former's weights. Each is compared with its step; `plan` is resolved."""
    require_feature(subject.cfg, "tflite")
    if precision not in PRECISIONS:
        raise ConfigError(f"a tflite model is {', '.join(PRECISIONS)}, not {precision}; choose one")
    require_family("tflite", precision, subject.cfg, levels=len(subject.levels) > 1)
    if (precision == "w8a8") != bool(ranges):
        raise ConfigError("w8a8, and it alone, takes a text to calibrate on; give --calibration-text FILE")
    left_out(subject, precision, without_shadow=plan.without_shadow)
    exported = stored = subject
    scales: dict[str, np.ndarray] = {}
    if precision == "w8a8":
        stored = subject.without_calibration() if plan.without_shadow else with_shadow(subject)
        subject, scales = quantized_subject(stored)
    whole = {level: with_whole_outputs(subject, level) for level in subject.levels}
    subject = dataclasses.replace(subject, levels=whole)
    # By level, the subject with the arrays of static products, and these.
    static = {level: static_level(subject, level, scales, each) for level, each in (ranges or {}).items()}
    made = []
    for done, signature in enumerate(signatures):
        of, products = subject, {}
        if signature.level in static and signature.kind in plan.static_kinds:
            of, products = static[signature.level]
        params_of = _params_of(scales, products, floats=precision == "f32")
        step = subject_step(signature, of, _FLOAT, loops=False, params_of=params_of)
        _, caches, inputs = step_shapes(signature, of, plan, _FLOAT)
        weights = step_weights(signature, of)
        if signature.kind not in (*CODED_KINDS, "tiny_lm"):
            weights = described_weights(of, signature.level, scales)
        made.append(traced(signature.name, step, weights, caches, inputs))
        if progress is not None:
            progress("export", done + 1, len(signatures))
    sharing = write_model(folder / FILE, convert(made), PlacedMatrices(stored, precision))
    rounds = precision in ("int8", "int4")
    # Compared with steps that round as the runtime does: what a model's outliers lose would hide errors.
    exported = as_stored(exported, precision) if rounds else exported
    params_of = _params_of({}, {}, floats=not rounds, product=runtime_product)
    with run_of_model(folder / FILE) as run:
        verify(run, signatures, exported, plan, precision, progress, params_of=params_of)
    if stages is not None:
        write_stages(folder, *static[FULL_LEVEL], stages, scales, stored, cache_tokens=plan.context_tokens)
    return sharing


def with_whole_outputs(subject: Subject, level: int) -> ProgramLevel:
    """Returns a level whose matrices that contract units are the whole model's."""
    entry = subject.levels[level]
    specs = param_specs(subject.cfg)
    weights = {
        name: Argument(stored=each.stored, shape=specs[name].shape)
        if name in specs and specs[name].role == "from_units"
        else each
        for name, each in entry.weights.items()
    }
    return ProgramLevel(cfg=entry.cfg, weights=weights)


def _params_of(
    scales: Mapping[str, np.ndarray],
    products: Mapping[str, StaticProduct],
    *,
    floats: bool,
    product: Product = sequence_product,
) -> ParamsOf:
    static = {name: functools.partial(each.of, name) for name, each in products.items()}

    def params(weights: Mapping[str, Weight], cfg: ModelConfig) -> Params:
        whole: dict[str, Any] = dict(weights)
        for name, spec in param_specs(cfg).items():
            if spec.role == "vector":
                continue
            sides = [f"{name}{side}" for side in (LEFT, RIGHT) if f"{name}{side}" in weights]
            for each in () if floats else sides:
                whole[each] = OwnProduct(whole[each].reshape(len(whole[each]), -1), product)
            if not floats and name not in scales:
                whole[name] = OwnProduct(whole[name], product)
            if spec.role == "from_units" and weights[name].shape != spec.shape:
                whole[name] = Prefix(whole[name], spec.shape[0])
        return annotated(whole, cfg, scales=scales, static=static)

    return params
