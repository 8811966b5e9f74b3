"""Clients' own packages get reasoning, calls and typed answers of a scripted model: each script of this
folder runs a loop of tools, a typed answer beside tools, a stream, and reasoning."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.scripted_service import served

HERE = Path(__file__).parent
# Folder of the environments that `make test-clients` makes; empty for the suite's own packages alone.
ENVIRONMENTS = os.environ.get("JAXLLM_CLIENTS", "")
OWN = ("openai", "anthropic", "ollama")
SCRIPTS = {path.stem.removeprefix("with_"): path for path in sorted(HERE.glob("with_*.*"))}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served() as address:
        yield address


def command(name: str) -> list[str]:
    """What runs a script: an environment's interpreter, or Node."""
    path = SCRIPTS[name]
    if path.suffix == ".mjs":
        # Node looks for packages beside a script.
        return ["node", str(shutil.copy(path, f"{ENVIRONMENTS}/node"))]
    if not ENVIRONMENTS:
        return [sys.executable, str(path)]
    environment = "llama_index" if name == "llama_index" else "python"
    return [f"{ENVIRONMENTS}/{environment}/bin/python", str(path)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_client(name: str, url: str, tmp_path: Path) -> None:
    if not ENVIRONMENTS and name not in OWN:
        pytest.skip("make test-clients runs this one, in an environment of its own")
    variables = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1", "HOME": str(tmp_path),
        "PWD": str(tmp_path),
    }  # fmt: skip
    done = subprocess.run(
        [*command(name), url], cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
