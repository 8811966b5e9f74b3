"""Exports a standalone folder for devices: a TFLite model, and the loop that runs it.

    program.json, tokenizer.json, model.tflite     see `jaxllm.export.tflite`
    loop.pyz                                       the modules of this package that a device needs
    __main__.py                                    runs them: python FOLDER [COMMAND]

The device needs Python and the packages in `PACKAGES`, and no JAX.
"""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

from jaxllm.errors import ProgramError, one_line
from jaxllm.export.folder_format.files import LOOP, MAIN

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
