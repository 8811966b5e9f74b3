"""Help texts: their form, their examples, that they name the values that modules define, and their cost."""

import inspect
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from jaxllm.cli.main import COMMANDS, SECTIONS, cli, main
from tests.cli.outcome import Run, succeeded


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


# In processes of their own.

_HEAVY = {"jax", "numpy", "rich", "optax", "orbax", "flax", "torch", "transformers", "safetensors"}


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
        print(" ".join(words), last, *({_HEAVY!r} & set(sys.modules)), sep=",")
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


# Completion


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
    widths = {"int8", "int8-nested", "int4", "int4-all", "int4-min"}
    assert completed(monkeypatch, run, "prepare", "folder", "--weights", "int") == widths
    monkeypatch.delenv("_JAXLLM_COMPLETE")
    for shell in ("bash", "zsh", "fish"):
        script = succeeded(run("completion", shell))
        assert "_JAXLLM_COMPLETE" in script
        assert f"{shell}_complete" in script
    assert run("completion", "tcsh").code == 2


def test_main_is_the_command_that_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    """click takes the variable's name from the program's."""
    monkeypatch.setenv("_JAXLLM_COMPLETE", "zsh_source")
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 0
