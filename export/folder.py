"""Writes a folder of programs, whole or not at all.

A standalone folder for devices is that of a TFLite model, with the loop that runs it:

    program.json, tokenizer.json, model.tflite     see `jaxllm.export.tflite`
    chat.json                                      see `jaxllm.export.chat_pieces`
    loop.pyz                                       the modules of this package that a device needs
    __main__.py                                    runs them: python FOLDER [COMMAND]

The device needs Python and the packages in `PACKAGES`, and no JAX.
"""

import contextlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxllm.errors import ConfigError, ProgramError, one_line
from jaxllm.export.chat_pieces import chat_pieces
from jaxllm.export.folder_format.manifest import (
    CHAT,
    LOOP,
    MAIN,
    TINY_TOKENIZER,
    TOKENIZER,
    Manifest,
    StoredFile,
    write_tokenizer,
)
from jaxllm.export.folder_format.parts import ProgramLevel, adapter_file
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


def require_new(path: Path) -> None:
    """Checks that a file or a folder can be made at a path.

    Raises:
      ConfigError: `path` exists already, or the folder around it does not.
    """
    if path.exists():
        raise ConfigError(f"{path} exists already; remove it or name another output")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path.parent}: no such folder; create it first")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a new folder that is renamed to `path` if the block ends without an error, and removed
    otherwise (see `require_new`)."""
    require_new(path)
    with atomic_folder(path) as folder:
        yield folder


def finish(
    folder: Path, subject: Subject, plan: ExportPlan, signatures: list[Signature], **fields: Any
) -> Manifest:
    """Writes tokenizers, adapters and the manifest into the folder of programs; `fields` are those of the
    manifest that depend on the format."""
    precision, packages = fields["precision"], fields.pop("made_with", {})
    without = left_out(subject, precision, without_shadow=plan.without_shadow)
    write_tokenizer(folder / TOKENIZER, subject.tokenizer)
    if fields["format"] == "tflite":
        (folder / CHAT).write_text(json.dumps(chat_pieces(subject.tokenizer)), encoding="utf-8")
    # Formats without a tiny LM or adapters have no signatures of them.
    tiny = subject.tiny_lm if any(each.kind == "tiny_lm" for each in signatures) else None
    if tiny is not None and tiny.tokenizer is not None:
        write_tokenizer(folder / TINY_TOKENIZER, tiny.tokenizer)
    for name, each in () if subject.adapters is None else subject.adapters.arrays.items():
        (folder / adapter_file(name)).write_bytes(each.astype("<f4").tobytes())
    levels = {
        level: ProgramLevel(cfg=each.cfg, weights={} if fields["format"] == "tflite" else each.weights)
        for level, each in subject.levels.items()
    }
    manifest = Manifest(
        **fields,
        made_with={"jaxllm": __version__, "jax": jax.__version__, **packages},
        name=subject.name,
        model=subject.model,
        context_tokens=plan.context_tokens,
        cache_dtype="bfloat16" if precision == "bf16" else plan.cache_name,
        levels=levels,
        signatures=tuple(signatures),
        files={path.name: StoredFile.of(path) for path in sorted(folder.iterdir())},
        left_out=without,
        release=plan.release,
        tiny_lm=None if tiny is None else tiny_facts(tiny),
        adapters=None if subject.adapters is None else subject.adapters.inputs,
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
