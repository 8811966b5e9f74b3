"""Exports the packaged model as programs, and answers with them alone: a device needs no model code.

pip install 'jaxllm[stablehlo]' && python examples/export_device.py
"""

import subprocess
import tempfile
from pathlib import Path

import jaxllm
from jaxllm import Engine, GenerationConfig, open_program

MODEL = Path(jaxllm.__file__).parent / "assets" / "draft.jaxllm"
CONFIG = GenerationConfig(max_tokens=24)

with tempfile.TemporaryDirectory() as folder:
    programs = Path(folder) / "programs"
    command = ["jaxllm", "export", MODEL, "--output", programs, "--context", "256"]
    subprocess.run(
        [*command, "--chunk-tokens", "16", "--chunk-tokens", "64", "--platform", "cpu"], check=True
    )
    print(sorted(path.name for path in programs.iterdir()))

    device = open_program(programs)
    exported = device.generate("Once upon a time", CONFIG)
    live = Engine.open(MODEL).generate("Once upon a time", CONFIG)
    print(exported.text)
    # Programs have the weights in float32: at 8 bits the live engine's words may differ somewhere.
    same = sum(a == b for a, b in zip(exported.tokens, live.tokens, strict=False))
    print(f"{same} of {len(live.tokens)} tokens are the live engine's")
