"""Each example runs as it stands, in a process of its own, and is short."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Example -> what its output says at least.
SAYS = {
    "generate": ("ms)",),
    "service": ("positive", "negative", "in time"),
    "contexts": ("chunks read", "tokens in the context"),
    "train_optax": ("step 0: loss 8.", "step 30: loss 0.", "moon, silver moon, good night"),
    "train_lora": ("moon, moon, silver moon, good night.",),
    "export_device": ("program.json", "tokens are the live engine's"),
}
NEEDS = {"export_device": "flatbuffers"}


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory, documentation_cache: Path) -> dict[str, str]:
    """The environment of an installed package: `jaxllm` is on the path."""
    bin_folder = tmp_path_factory.mktemp("bin")
    command = bin_folder / "jaxllm"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jaxllm.cli.entry "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    own = {
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAXLLM_CACHE": str(documentation_cache),
    }
    # What this suite sets for its own process is nothing that a reader has.
    ours = ("JAXLLM_BUCKETS_BYTES", "JAX_NUMPY_DTYPE_PROMOTION")
    return {name: value for name, value in os.environ.items() if name not in ours} | own


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example: Path, settings: dict[str, str], tmp_path: Path) -> None:
    if example.stem in NEEDS:
        pytest.importorskip(NEEDS[example.stem])
    ran = subprocess.run(
        [sys.executable, str(example)], cwd=tmp_path, env=settings, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    for part in SAYS.get(example.stem, ()):
        assert part in ran.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(example: Path) -> None:
    source = example.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 40
    assert f"python examples/{example.name}" in source
