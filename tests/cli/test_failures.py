"""Tests mistakes of users: one line on stderr, exit code 1, and nothing half-written."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxllm.cli.console
from tests.cli.outcome import WINDOW, Run, edit_config, failed


def renamed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


FOLDER_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "config.json is missing": lambda f: (f / "config.json").unlink(),
    "cannot be read as JSON": lambda f: (f / "config.json").write_text("{\n\n"),
    "model_type 'mamba' is not supported": lambda f: edit_config(f, model_type="mamba"),
    "the config belongs to other weights": lambda f: edit_config(f, vocab_size=99),
    "tokenizer": lambda f: (f / "tokenizer.json").unlink(),
    "never opened": renamed,
    "truncated or corrupt": lambda f: os.truncate(f / "model.safetensors", 1000),
}


@pytest.mark.parametrize("command", ["prepare", "generate"])
@pytest.mark.parametrize(("part", "damage"), FOLDER_DAMAGE.items(), ids=FOLDER_DAMAGE)
def test_a_folder(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, part: str,
    damage: Callable[[Path], Any],
) -> None:  # fmt: skip
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "cache"))
    damage(folder)
    before = sorted(folder.iterdir())
    out = tmp_path / "m.jaxllm"
    arguments = (folder, "-o", out) if command == "prepare" else ("-m", folder, "-p", "x")
    failed(run(command, *arguments), part, "model")
    # Nothing half-written, anywhere.
    assert sorted(folder.iterdir()) == before
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.parent != folder] == []


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[100_000] ^= 1
    path.write_bytes(raw)


BUNDLE_DAMAGE: tuple[tuple[str, Callable[[Path], Any]], ...] = (
    ("truncated", cut),
    ("is corrupt (checksum", flip),
    ("not a jaxllm bundle", lambda path: path.write_bytes(b"GGML" + bytes(1000))),
    ("not a jaxllm bundle", lambda path: path.write_bytes(b"")),
    ("o such file", lambda path: path.unlink()),
)


@pytest.mark.parametrize(
    "command", ["generate -p x -m", "chat -m", "eval perplexity - -m", "info --verify --json"]
)
def test_a_bundle(run: Run, bundle: Path, tmp_path: Path, command: str) -> None:
    path = tmp_path / "m.jaxllm"
    for part, damage in BUNDLE_DAMAGE:
        path.write_bytes(bundle.read_bytes())
        damage(path)
        failed(run(*command.split(), path, stdin=b"some text"), part, str(path))


ANY = ("-p", "x")
BAD_REQUESTS: list[tuple[str, tuple[Any, ...]]] = [
    ("the prompt is empty", ()),
    (f"the prompt has {WINDOW + 1} tokens, the context holds {WINDOW}", ("-p", "x" * WINDOW)),
    ("the prompt has 33 tokens, the context holds 32", ("-p", "x" * 32, "--context", 32)),
    ("lone surrogate", ("-p", "a\udcff")),
    ("absent: cannot be read", ("--prompt-file", "/absent")),
    ("context_tokens 65 is more", (*ANY, "--context", 65)),
    ("holds f32 weights, not int4", (*ANY, "--weights", "int4")),
    ("temperature must be", (*ANY, "-t", -1)),
    ("max_tokens must be a whole number of at least 1, got 0", (*ANY, "-n", 0)),
    ("a stop string must have", (*ANY, "--stop", "")),
    ("--logit-bias takes ID=VALUE", (*ANY, "--logit-bias", "a=b")),
    ("logit_bias names token 999", (*ANY, "--logit-bias", "999=1")),
]


def test_a_request(run: Run, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (part, arguments) in enumerate(BAD_REQUESTS):
        failed(run("generate", "-m", bundle, *arguments, *["--json"] * (number % 2)), part)
    not_text = "standard input: not UTF-8 (byte 0xff at offset 3)"
    failed(run("generate", "-m", bundle, stdin=b"abc\xff"), not_text)
    monkeypatch.setattr(jaxllm.cli.console, "MAX_INPUT_BYTES", 3 << 20)
    failed(run("generate", "-m", bundle, stdin=b"x" * ((3 << 20) + 1)), "standard input: more than 3 MiB")


def test_a_text_to_score(run: Run, bundle: Path, tmp_path: Path) -> None:
    for part, stdin, arguments in (
        ("no token to predict", b" \n\n ", ()),
        ("no token to predict", b"xx x", ("--separator", "x")),
        ("not UTF-8", b"\x80", ()),
        (f"the window must be in [1, {WINDOW}] tokens, got 65", b"text", ("--window", 65)),
    ):
        failed(run("eval", "perplexity", "-", "-m", bundle, *arguments, stdin=stdin), part)
    failed(run("eval", "perplexity", tmp_path / "absent", "-m", bundle), "absent: cannot be read")


def test_a_cache_that_cannot_be_written(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXLLM_CACHE", str(tmp_path / "file" / "cache"))
    failed(run("generate", "-m", home / "folder", "-p", "x"), "cannot be created", "set JAXLLM_CACHE")


def test_places_that_cannot_take_a_bundle(run: Run, home: Path, tmp_path: Path) -> None:
    for place in ("absent/m.jaxllm", "."):
        failed(run("prepare", home / "folder", "-o", tmp_path / place), "folder")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_output_that_cannot_be_written_is_one_line(tiny_bundle):
    command = [sys.executable, "-m", "jaxllm.cli.main", "info", str(tiny_bundle)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["error: No space left on device"]
