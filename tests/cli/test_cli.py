"""The command itself: usage, help, debugging, interrupts, and pipes that close."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxllm import Engine
from jaxllm.bundle import Bundle
from jaxllm.cli.main import main
from jaxllm.errors import CheckpointError
from tests.cli.outcome import Run, succeeded

USAGE = (
    "", "generat", "generate --colour", "generate -p x --prompt-file y", "generate -n many",
    "generate --weights int3", "prepare folder", "prepare -o out", "eval", "info a b", "generate --debug",
)  # fmt: skip


@pytest.mark.parametrize("line", USAGE)
def test_usage_errors_exit_with_2(run: Run, line: str) -> None:
    got = run(*line.split())
    assert (got.code, got.out) == (2, "")
    assert "Usage: jaxllm" in got.err
    assert "Traceback" not in got.err


def test_version(run: Run) -> None:
    assert succeeded(run("--version")).startswith("jaxllm, version ")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        main(["--debug", "generate", "-p", "x", "-m", str(tmp_path / "absent")])


def test_errors_of_our_own_making_are_not_hidden(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    """Only what is raised on purpose becomes one line; a bug keeps its traceback."""

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Bundle, "open", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["info", str(bundle)])


def test_an_interrupt_exits_with_130(run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "open", interrupt)
    got = run("generate", "-m", bundle, "-p", "x")
    assert (got.code, got.out) == (130, "")
    assert "Traceback" not in got.err


# In processes of their own.

_IMPORTED = (
    "import sys; from jaxllm.cli.main import main\ntry: main(sys.argv[1:])\nfinally: print(*sys.modules)"
)
_ROOMS = {"jaxllm.training", "jaxllm.export", "benchmarks"}
_HEAVY = {"torch", "transformers", "optax", "orbax", "matplotlib", "tensorflow", "sentencepiece"}


def imported(*arguments: str) -> set[str]:
    """The modules that a command has imported at its end, and what it printed in words."""
    command = [sys.executable, "-c", _IMPORTED, *arguments]
    return set(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split())


def test_what_is_not_used_is_not_imported(tmp_path: Path) -> None:
    found = imported("--version")
    assert "version" in found
    assert (_ROOMS | _HEAVY | {"jax", "numpy", "rich"}) & found == set()
    # A prompt for a bundle, as far as importing goes; there is no such model.
    found = imported("generate", "-p", "x", "-m", str(tmp_path / "absent"))
    assert {"jax", "jaxllm.serving.engine.engine"} <= found
    checkpoints = {"jaxllm.prepare", "jaxllm.checkpoints.huggingface", "safetensors"}
    assert (_ROOMS | _HEAVY | checkpoints | {"jinja2", "rich"}) & found == set()


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["info {}", "generate -m {} -p hello --ignore-eos -n 50"])
def test_a_reader_that_leaves_is_no_error(bundle: Path, arguments: str) -> None:
    command = f"{sys.executable} -m jaxllm.cli.main {arguments.format(bundle)} | head -c 5"
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert len(done.stdout) == 5
    assert done.stderr.strip() == b""


@pytest.mark.slow
def test_output_that_nobody_reads_ends_quietly(bundle: Path) -> None:
    """The pipe is closed before the first byte, so that the very first write fails."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jaxllm.cli.main", "info", str(bundle)],
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writer)
    assert done.returncode != 0
    assert done.stderr.strip() == b""
