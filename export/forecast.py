"""Forecasts an export of TFLite programs from shapes: files, bytes, programs, caches and memory; reads no
weights.

Memory is that of the largest part of the model that is read as a whole, a layer, the embedding or the head in
float32, at most twice, and that of the caches when a program is compared with its step: examples, results of
both, and the runtime's. What depends on no model, above all the libraries, takes less than `FIXED_BYTES`.
"""

import collections
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from jaxllm.bundle.layout import segment_of
from jaxllm.checkpoints.huggingface import read_config
from jaxllm.config import FULL_LEVEL, ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.export.contents import require_family
from jaxllm.export.folder_format.manifest import CHAT, LOOP, MAIN, MANIFEST, TOKENIZER, Precision
from jaxllm.export.folder_format.parts import Argument, ProgramLevel
from jaxllm.export.folder_format.signature import cache_shapes
from jaxllm.export.placed import bytes_of, forms_of
from jaxllm.export.signatures import ExportPlan, tiny_signatures
from jaxllm.export.subject import Arrays, Subject, shapes_of
from jaxllm.export.tflite import FILE
from jaxllm.models.features import require_feature
from jaxllm.models.parameters import param_specs
from jaxllm.text.tokenizer import TokenizerFiles

FIXED_BYTES = 500_000_000


def subject_of_config(folder: Path, levels: Sequence[int] = ()) -> Subject:
    """The model of a Hugging Face folder, of which only `config.json` is read: shapes without weights.

    Raises:
      ConfigError: there are to be `levels`, which a config does not have.
    """
    if levels:
        raise ConfigError(f"{folder} has no levels; leave --level out, or give an elastic bundle")
    cfg = read_config(folder)
    specs = param_specs(cfg)
    shapes = {name: jax.ShapeDtypeStruct(spec.shape, np.float32) for name, spec in specs.items()}
    weights = {name: Argument(stored=name, shape=spec.shape) for name, spec in specs.items()}
    return Subject(
        name=folder.resolve().name,
        model="",
        arrays=Arrays(shapes, {}.__getitem__),
        levels={FULL_LEVEL: ProgramLevel(cfg=cfg, weights=weights)},
        tokenizer=TokenizerFiles(tokenizer_json="{}"),
    )


def forecast(subject: Subject, plan: ExportPlan, *, kind: str, precision: Precision) -> list[str]:
    """What an export as tflite, device or litertlm will write and need, a line each.

    Raises:
      ConfigError: the plan does not fit the model, or the format does not support it.
    """
    require_feature(subject.cfg, "tflite")
    require_family(kind, precision, subject.cfg, levels=len(subject.levels) > 1)
    plan = plan.resolved(subject.cfg)
    signatures = [each for level in subject.levels for each in plan.signatures(level, str)]
    signatures += tiny_signatures(subject.tiny_lm, str)
    kinds = collections.Counter(each.kind for each in signatures)
    names = [MANIFEST, TOKENIZER, CHAT, FILE, *((LOOP, MAIN) if kind == "device" else ())]
    specs, forms = param_specs(subject.cfg), forms_of(subject, precision)
    stored, floats = collections.Counter[str](), collections.Counter[str]()
    for name, each in shapes_of(subject.arrays).items():
        role, numbers = specs[name].role if name in specs else "adapter", math.prod(each.shape)
        outputs = each.shape[-1] if role == "from_units" else numbers // each.shape[-1]
        part = "adapters" if role == "adapter" else "layers" if "layers." in name else "embedding and head"
        stored[part] += bytes_of(numbers, outputs, "f32" if role == "vector" else forms[name])
        floats[segment_of(name)] += 0 if role == "adapter" else 4 * numbers
    parts = ", ".join(f"{each} {_mb(size)}" for each, size in stored.items())
    lines = [
        f"programs: {len(signatures)} ({', '.join(f'{count} {each}' for each, count in kinds.items())})",
        f"files: {'one' if kind == 'litertlm' else ', '.join(names)}",
        f"weights: {_mb(stored.total())} ({parts})",
    ]
    dtype = np.dtype(plan.cache_name)
    for level, entry in subject.levels.items():
        rooms = sorted({plan.room(each) for each in signatures if each.level == level})
        sizes = [_cache_bytes(entry.cfg, room, dtype) for room in rooms]
        of = ", ".join(f"{room} tokens {_mb(size)}" for room, size in zip(rooms, sizes, strict=True))
        lines.append(f"caches of level {level}: {of}")
    caches = _cache_bytes(subject.cfg, max(map(plan.room, signatures)), dtype)
    ((name, largest),) = floats.most_common(1)
    most = _mb(2 * largest + 4 * caches + FIXED_BYTES)
    lines.append(
        f"memory: at most {most}: twice {_mb(largest)} ({name}, in float32), four times the longest caches, "
        f"and {_mb(FIXED_BYTES)}; packed weights are in a file beside the output"
    )
    return lines


def _cache_bytes(cfg: ModelConfig, tokens: int, dtype: np.dtype) -> int:
    return dtype.itemsize * sum(map(math.prod, cache_shapes(cfg, tokens, dtype).values()))


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
