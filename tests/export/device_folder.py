"""Exports the tiny model as a device's folder, for the tests that run where JAX is not installed.

python -m tests.export.device_folder DIR
"""

import sys
import tempfile
from pathlib import Path

from jaxllm.export.folder import write_loop
from jaxllm.export.subject import read_subject
from jaxllm.export.tflite import export_tflite
from tests.export.conftest import PLAN
from tests.export.models import write_elastic


def main(folder: Path) -> None:
    """Writes the folder."""
    with tempfile.TemporaryDirectory() as place:
        subject = read_subject(write_elastic(Path(place) / "tiny.jaxllm"), levels=(40,))
        export_tflite(subject, folder, PLAN, beside=write_loop)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
