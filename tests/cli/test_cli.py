"""The command itself: usage, help texts and what they cost, debugging, interrupts, pipes that close, and
completion."""

import importlib.util
import inspect
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from jaxllm.bundle import Bundle
from jaxllm.cli.main import COMMANDS, SECTIONS, cli, main
from jaxllm.errors import CheckpointError
from tests.cli.outcome import Run, succeeded

USAGE = (
    "", "generat", "generate --colour", "generate -p x --prompt-file y", "generate -n many", "prepare folder",
    "eval", "info a b", "generate --debug",
)  # fmt: skip


def test_usage_errors_exit_with_2(run: Run) -> None:
    for line in USAGE:
        got = run(*line.split())
        assert (got.code, got.out) == (2, ""), line
        assert "Usage: jaxllm" in got.err
        assert "Traceback" not in got.err
    assert succeeded(run("--version")).startswith("jaxllm, version ")


def test_tracebacks_of_debugging_and_of_bugs(monkeypatch: pytest.MonkeyPatch, bundle: Path) -> None:
    """Only what is raised on purpose becomes one line; a bug keeps its traceback."""
    with pytest.raises(CheckpointError, match="no such file or folder"):
        main(["--debug", "generate", "-p", "x", "-m", "absent"])

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Bundle, "open", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["info", str(bundle)])


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


def test_one_prompt_reads_a_small_part_of_the_package() -> None:
    found = imported("generate", "-p", "Once", "--max-tokens", "2")
    ours = [importlib.util.find_spec(name) for name in found if name.partition(".")[0] == "jaxllm"]
    files = [Path(spec.origin) for spec in ours if spec is not None and spec.origin is not None]
    assert "jaxllm.serving.engine.step" in found
    assert 50 < len(files) <= 150
    assert sum(len(file.read_bytes().splitlines()) for file in files if file.suffix == ".py") <= 20_200


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error(bundle: Path) -> None:
    command = (
        f"{sys.executable} -m jaxllm.cli.main generate -m {bundle} -p hello --ignore-eos -n 50 | head -c 5"
    )
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=False)
    assert len(done.stdout) == 5
    assert done.stderr.strip() == b""


# Help texts: their form, their examples, and that they name the values that modules define


def commands(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands beneath a group, by the words that call them."""
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield (*path, name), command
            if isinstance(command, click.Group):
                yield from commands(command, *path, name)


ALL = dict(commands(cli))
LEAVES = {path: command for path, command in ALL.items() if not isinstance(command, click.Group)}


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(run: Run, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of commands has the first sentence of their help."""
    for command in ALL.values():
        # click keeps the flags of a command's first use, and a test may have used it without its group.
        monkeypatch.setattr(command, "_help_option", None, raising=False)
    for arguments in (), *((name,) for name in COMMANDS):
        out = succeeded(run(*arguments, flag))
        assert out.startswith(f"Usage: {' '.join(['jaxllm', *arguments])} ")
        assert all(name in out for name in (COMMANDS if not arguments else ["--help"]))
    out = succeeded(run("--help"))
    with click.Context(cli) as context:
        for name, (_, summary) in COMMANDS.items():
            command = cli.get_command(context, name)
            assert command is not None
            assert command.get_short_help_str(limit=1000).rstrip(".") == summary.rstrip("."), name
    places = [out.index(f"{heading}:\n") for heading in SECTIONS]
    assert places == sorted(places)


@pytest.mark.parametrize(("path", "command"), ALL.items(), ids=[" ".join(path) for path in ALL])
def test_every_option_says_what_it_does_and_a_command_has_an_example(
    path: tuple[str, ...], command: click.Command
) -> None:
    assert command.help is not None
    assert re.match(r"[A-Z][a-z]+,? ", command.help)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
            assert parameter.help[0].isupper(), parameter.help
            assert parameter.help.rstrip("]").endswith((".", ")")) or "[default: " in parameter.help
            assert parameter.multiple == ("Repeatable" in parameter.help), parameter.name
    if isinstance(command, click.Group):
        return
    _, _, examples = inspect.cleandoc(command.help).partition("\b\nExample:\n")
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    assert lines
    for line in lines if path != ("completion",) else []:
        words = shlex.split(line)
        assert words[: len(path) + 1] == ["jaxllm", *path]
        # click keeps the option of help on the command, by the names that its first context has.
        with click.Context(cli, **cli.context_settings) as parent:
            command.make_context(path[-1], words[len(path) + 1 :], parent=parent)


def test_values_are_those_of_the_modules_that_define_them() -> None:
    """Command modules write them out, since they import none of these."""
    from benchmarks import trace_command as trace
    from benchmarks.traces import ANSWER_TOKENS
    from jaxllm.cli import export as export_options
    from jaxllm.cli import profile
    from jaxllm.cli import shared_options as options
    from jaxllm.contexts.codecs import CODECS
    from jaxllm.export.contents import CONTENTS
    from jaxllm.export.stablehlo import DTYPES, PLATFORMS
    from jaxllm.int8_prefill import fitting
    from jaxllm.serving.elastic.profiling import REPEATS
    from jaxllm.serving.engine.request import DEFAULT_MAX_TOKENS
    from jaxllm.serving.ground.options import CPU_CHUNK_TOKENS
    from jaxllm.training import calibration

    assert options.MAX_TOKENS == DEFAULT_MAX_TOKENS
    assert (profile.REPEATS, trace.ANSWER_TOKENS) == (REPEATS, ANSWER_TOKENS)
    assert export_options.PLATFORMS == PLATFORMS
    assert CONTENTS["stablehlo"].precisions == tuple(DTYPES)
    assert export_options.CHUNK_TOKENS == CPU_CHUNK_TOKENS
    assert tuple(CODECS) == export_options.CODECS
    assert fitting.LEAST_TOKENS == calibration.LEAST_TOKENS
    assert calibration.ExpertWidthsRecipe().tokens == calibration.PairWidthsRecipe().tokens


_NOT_FOR_HELP = {"jax", "numpy", "rich", "optax", "orbax", "flax", "torch", "transformers", "safetensors"}


def test_help_and_usage_errors_import_no_jax() -> None:
    """Of every command, in one process: nothing that any of them imported would be forgotten."""
    lines = [[], *([name] for name in COMMANDS)]
    lines += [list(path) for path in LEAVES if len(path) > 1]
    script = f"""
import contextlib, io, sys
from jaxllm.cli.main import main
for words in {lines!r}:
    for last in ("--help", "--no-such-option"):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                main([*words, last])
            except SystemExit as end:
                assert end.code == (0 if last == "--help" else 2), (words, end.code)
        print(" ".join(words), last, *({_NOT_FOR_HELP!r} & set(sys.modules)), sep=",")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert [line for line in done.stdout.splitlines() if line.count(",") > 1] == []
    assert len(done.stdout.splitlines()) == 2 * len(lines)


def test_help_takes_little_time() -> None:
    """Of the processor, which other work on the machine does not change much."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "jaxllm.cli.entry", "--help"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def completed(monkeypatch: pytest.MonkeyPatch, run: Run, *words: str) -> set[str]:
    """The words that a shell would be offered for the last one."""
    monkeypatch.setenv("_JAXLLM_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", shlex.join(["jaxllm", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    outcome = run()
    assert outcome.code == 0
    return {line.partition(",")[2] for line in outcome.out.splitlines()}


def test_completion(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed(monkeypatch, run, "c") == {"calibrate", "chat", "completion", "contexts"}
    assert "--max-tokens" in completed(monkeypatch, run, "generate", "--max")
    assert completed(monkeypatch, run, "eval", "p") == {"pairs", "perplexity"}
    # click takes the variable's name from the program's.
    monkeypatch.setenv("_JAXLLM_COMPLETE", "zsh_source")
    assert run().code == 0
    monkeypatch.delenv("_JAXLLM_COMPLETE")
    script = succeeded(run("completion", "bash"))
    assert "_JAXLLM_COMPLETE" in script
    assert "bash_complete" in script
