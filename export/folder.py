"""Writes a folder of programs, whole or not at all."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from jaxllm.errors import ConfigError
from jaxllm.export.folder_format.levels import ProgramLevel
from jaxllm.export.folder_format.manifest import Manifest, Precision, ProgramFormat, Signature, StoredFile
from jaxllm.export.folder_format.stages import StageFacts
from jaxllm.export.folder_format.tokenizer import write_tokenizer
from jaxllm.export.quantized import left_out
from jaxllm.export.signatures import ExportPlan
from jaxllm.export.subject import Subject
from jaxllm.export.tiny_lm import tiny_facts, write_tiny_tokenizer
from jaxllm.files.atomic import atomic_folder
from jaxllm.version import __version__


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a new folder that is renamed to `path` if the block ends without an error, and removed
    otherwise.

    Raises:
      ConfigError: `path` exists already.
    """
    if path.exists():
        raise ConfigError(f"{path} exists already; remove it or name another output")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path.parent}: no such folder; create it first")
    with atomic_folder(path) as folder:
        yield folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramKind:
    """Properties that all programs of a folder share.

    Attributes:
      format: format of their files.
      precision: precision of their weights.
      cache_dtype: dtype of their caches.
      platforms: platforms that run them.
      holds_weights: whether they contain their weights.
      made_with: versions of the packages that made them, besides this one and JAX.
      stages: programs of single stages next to them; None for none.
    """

    format: ProgramFormat
    precision: Precision
    cache_dtype: str
    platforms: tuple[str, ...]
    holds_weights: bool
    made_with: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stages: StageFacts | None = None


def finish(
    folder: Path,
    subject: Subject,
    plan: ExportPlan,
    signatures: list[Signature],
    kind: ProgramKind,
) -> Manifest:
    """Writes tokenizer and manifest into the programs' folder; `holds_weights`: the programs contain their
    weights."""
    without = left_out(subject, kind.precision, without_shadow=plan.without_shadow)
    write_tokenizer(folder, subject.tokenizer)
    # Formats without a tiny LM or adapters have no signatures of them.
    tiny = subject.tiny_lm if any(each.kind == "tiny_lm" for each in signatures) else None
    write_tiny_tokenizer(folder, tiny)
    if subject.adapters is not None:
        subject.adapters.write(folder)
    levels = {
        level: ProgramLevel(cfg=each.cfg, weights={} if kind.holds_weights else each.weights)
        for level, each in subject.levels.items()
    }
    manifest = Manifest(
        format=kind.format,
        name=subject.name,
        model=subject.model,
        context_tokens=plan.context_tokens,
        precision=kind.precision,
        cache_dtype=kind.cache_dtype,
        platforms=kind.platforms,
        levels=levels,
        signatures=tuple(signatures),
        files={path.name: StoredFile.of(path) for path in sorted(folder.iterdir())},
        left_out=without,
        tiny_lm=None if tiny is None else tiny_facts(tiny),
        adapters=None if subject.adapters is None else subject.adapters.inputs,
        stages=kind.stages,
        made_with={"jaxllm": __version__, "jax": jax.__version__, **kind.made_with},
    )
    manifest.write(folder)
    return manifest
