"""Forecasts an export of TFLite programs from shapes: files, bytes, programs, caches and memory. Reads no
weights.

Memory is that of the largest part of the model that is read as a whole, in float32: a layer, the embedding
or the head, at most twice; and of the caches of a program that is compared with its step: examples, results
of both, and the runtime's. What does not depend on the model, above all the libraries, takes less than
`FIXED_BYTES`.
"""

import collections
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxllm.bundle.layout import segment_of
from jaxllm.checkpoints.huggingface import read_config
from jaxllm.config import FULL_LEVEL
from jaxllm.errors import CheckpointError
from jaxllm.export.contents import require_family
from jaxllm.export.folder_format.manifest import CHAT, LOOP, MAIN, MANIFEST, TOKENIZER, Precision
from jaxllm.export.folder_format.parts import Argument, ProgramLevel
from jaxllm.export.folder_format.signature import cache_shapes
from jaxllm.export.placed import bytes_of
from jaxllm.export.signatures import ExportPlan, tiny_signatures
from jaxllm.export.subject import Arrays, Subject, described, shapes_of
from jaxllm.export.tflite import FILE, form_of_arrays
from jaxllm.models.features import require_feature
from jaxllm.models.parameters import param_specs
from jaxllm.text.tokenizer import TokenizerFiles

FIXED_BYTES = 500_000_000


def subject_of_config(folder: Path) -> Subject:
    """The model of a Hugging Face folder, of which only `config.json` is read, without its weights.

    Raises:
      CheckpointError: the config is missing, or of a family that is not known.
    """
    cfg = read_config(folder)

    def unreadable() -> np.ndarray:
        raise CheckpointError(f"{folder} was opened for its config alone; prepare it, and export the bundle")

    shapes = {name: spec.shape for name, spec in param_specs(cfg).items()}
    return Subject(
        name=folder.resolve().name,
        model="",
        arrays=Arrays({name: (described(shape), unreadable) for name, shape in shapes.items()}),
        levels={
            FULL_LEVEL: ProgramLevel(
                cfg=cfg, weights={name: Argument(stored=name, shape=shape) for name, shape in shapes.items()}
            )
        },
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
    stored, (name, largest) = _bytes_by_part(subject, precision), _largest_part(subject)
    lines = [
        f"programs: {len(signatures)} ({', '.join(f'{count} {each}' for each, count in kinds.items())})",
        f"files: {'one' if kind == 'litertlm' else ', '.join(names)}",
        f"weights: {_mb(sum(stored.values()))} ({', '.join(f'{each} {_mb(size)}' for each, size in stored.items())})",
    ]
    for level, entry in subject.levels.items():
        rooms = sorted({plan.room(each) for each in signatures if each.level == level})
        sizes = (4 * sum(map(math.prod, cache_shapes(entry.cfg, room).values())) for room in rooms)
        of = ", ".join(f"{room} tokens {_mb(size)}" for room, size in zip(rooms, sizes, strict=True))
        lines.append(f"caches of level {level}: {of}")
    room = max(map(plan.room, signatures))
    caches = 4 * sum(map(math.prod, cache_shapes(subject.cfg, room).values()))
    lines.append(
        f"memory: at most {_mb(2 * largest + 4 * caches + FIXED_BYTES)}: twice {_mb(largest)} (in float32, {name}), "
        f"four times the longest caches, and {_mb(FIXED_BYTES)}; packed weights are in a file beside the output"
    )
    return lines


def _bytes_by_part(subject: Subject, precision: Precision) -> dict[str, int]:
    """Bytes of the stored weights with their scales: of embedding and head, layers, and adapters."""
    specs, form_of = param_specs(subject.cfg), form_of_arrays(subject, precision)
    found = dict.fromkeys(("embedding and head", "layers", "adapters"), 0)
    for name, each in shapes_of(subject.arrays).items():
        spec = specs.get(name)
        part = "adapters" if spec is None else "layers" if "layers." in name else "embedding and head"
        if spec is not None and spec.role == "vector":
            found[part] += 4 * math.prod(each.shape)
        else:
            rows = each.shape[-1] if spec is not None and spec.role == "from_units" else each.shape[:-1]
            outputs = math.prod(np.atleast_1d(rows).tolist())
            found[part] += bytes_of(math.prod(each.shape), outputs, form_of(name))
    return {name: size for name, size in found.items() if size}


def _largest_part(subject: Subject) -> tuple[str, int]:
    """The part of the whole model that has most bytes in float32, and these."""
    sizes = collections.Counter[str]()
    for name in subject.levels[FULL_LEVEL].weights:
        sizes[segment_of(name)] += 4 * math.prod(param_specs(subject.cfg)[name].shape)
    return sizes.most_common(1)[0]


def _mb(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
