"""Writes a folder of programs, whole or not at all.

A standalone folder for devices is that of a TFLite model, with the loop that runs it:

    program.json, tokenizer.json, model.tflite     see `jaxllm.export.tflite`
    loop.pyz                                       the modules of this package that a device needs
    __main__.py                                    runs them: python FOLDER [COMMAND]

The device needs Python and the packages in `PACKAGES`, and no JAX.
"""

import contextlib
import dataclasses
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from jaxllm.errors import ConfigError, ProgramError, one_line
from jaxllm.export.folder_format.manifest import (
    LOOP,
    MAIN,
    TINY_TOKENIZER,
    TOKENIZER,
    CacheDtype,
    Manifest,
    Precision,
    ProgramFormat,
    StoredFile,
    write_tokenizer,
)
from jaxllm.export.folder_format.parts import ProgramLevel, StageFacts, adapter_file
from jaxllm.export.folder_format.signature import Signature
from jaxllm.export.quantized import left_out
from jaxllm.export.signatures import ExportPlan, tiny_facts
from jaxllm.export.subject import Subject
from jaxllm.files.atomic import atomic_folder
from jaxllm.version import __version__

PACKAGES = ("ai-edge-litert", "click", "jinja2", "numpy", "platformdirs", "tokenizers", "xxhash")
# Constant time, so that the same modules make the same file.
_TIME = (1980, 1, 1, 0, 0, 0)
_MAIN_TEXT = f'''"""Runs the programs in this folder: python FOLDER [COMMAND], where FOLDER is this one.

It needs Python 3.11 or newer and: pip install {" ".join(PACKAGES)}
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(_HERE / "{LOOP}"))

from jaxllm.cli.device.__main__ import main

main(_HERE)
'''


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
    cache_dtype: CacheDtype
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
    write_tokenizer(folder / TOKENIZER, subject.tokenizer)
    # Formats without a tiny LM or adapters have no signatures of them.
    tiny = subject.tiny_lm if any(each.kind == "tiny_lm" for each in signatures) else None
    if tiny is not None and tiny.tokenizer is not None:
        write_tokenizer(folder / TINY_TOKENIZER, tiny.tokenizer)
    for name, each in () if subject.adapters is None else subject.adapters.arrays.items():
        (folder / adapter_file(name)).write_bytes(each.astype("<f4").tobytes())
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


def write_loop(folder: Path) -> None:
    """Writes the loop into a folder of programs.

    Raises:
      ProgramError: its modules cannot be imported without JAX.
    """
    with zipfile.ZipFile(folder / LOOP, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in sorted(loop_modules().items()):
            file.writestr(zipfile.ZipInfo(name, _TIME), text, zipfile.ZIP_DEFLATED)
    (folder / MAIN).write_text(_MAIN_TEXT, encoding="utf-8")


def loop_modules() -> dict[str, bytes]:
    """Returns the modules that a device needs, from path in the archive to source: those that
    `jaxllm.cli.device` imports, at the top or locally, except modules that cannot be imported without
    JAX."""
    # In another process, because this one has imported JAX.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "jaxllm.export.loop_modules"],
        capture_output=True,
        env={"PYTHONPATH": ":".join(each or "." for each in sys.path)},
        check=False,
    )
    if done.returncode:
        raise ProgramError(
            f"the modules of the device loop cannot be imported without JAX: {one_line(done.stderr.decode())}"
        )
    return {name: Path(path).read_bytes() for name, path in json.loads(done.stdout).items()}
