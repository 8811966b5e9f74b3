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

USAGE: dict[str, tuple[Any, ...]] = {
    "no command": (),
    "unknown command": ("generat",),
    "unknown option": ("generate", "--colour"),
    "two prompts": ("generate", "-p", "x", "--prompt-file", "y"),
    "tokens not a number": ("generate", "-n", "many"),
    "unknown weights": ("generate", "--weights", "int3"),
    "no output": ("prepare", "folder"),
    "no folder": ("prepare", "-o", "out"),
    "no text": ("eval",),
    "two bundles": ("info", "a", "b"),
    "debug behind the command": ("generate", "--debug"),
}


@pytest.mark.parametrize("arguments", USAGE.values(), ids=USAGE)
def test_usage_errors_exit_with_2(run: Run, arguments: tuple[Any, ...]) -> None:
    got = run(*arguments)
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


@pytest.mark.parametrize("arguments", [("--version",), ("--help",)])
def test_what_is_not_used_is_not_imported(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED, *arguments], capture_output=True, text=True, check=True
    )
    unwanted = _ROOMS | _HEAVY | {"jax", "numpy", "rich"}
    assert unwanted & set(done.stdout.splitlines()[-1].split()) == set()
    assert done.stderr == ""


def test_a_prompt_for_a_bundle_waits_for_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    """As far as importing goes; there is no such model."""
    arguments = ("generate", "-p", "x", "-m", str(tmp_path / "absent"))
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED, *arguments], capture_output=True, text=True, check=False
    )
    imported = set(done.stdout.split())
    assert {"jax", "jaxllm.serving.engine.engine"} <= imported
    checkpoints = {"jaxllm.prepare", "jaxllm.checkpoints.huggingface", "safetensors"}
    unwanted = _ROOMS | _HEAVY | checkpoints | {"jinja2", "rich"}
    assert unwanted & imported == set()


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
