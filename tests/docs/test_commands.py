"""Every command that the documentation names exists with the options that it is given."""

import itertools
import re
from collections.abc import Iterator

import click
import pytest

from jaxllm.cli.main import cli
from tests.docs.pages import ROOT, named_commands, pages, text_of

_ROOMS = ("jaxllm", "serving", "training", "export", "benchmarks")
_VARIABLE = re.compile(r"(?<!\w)JAXLLM_[A-Z]+(?:_[A-Z]+)*(?!\w)")
# What stands for a name of the reader's choice, as in `jaxllm bench NAME`.
_PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_]*|\.\.\.|\[.*")


def faults_of(arguments: list[str]) -> Iterator[str]:
    """What the command line would refuse in a command, whatever files there are."""
    context = click.Context(cli, info_name="jaxllm")
    command: click.Command = cli
    rest = list(arguments)
    while isinstance(command, click.Group):
        if rest and rest[0] in ("--debug", "--version", "--help"):
            rest.pop(0)
            continue
        if not rest or _PLACEHOLDER.fullmatch(rest[0]):
            return
        name = rest.pop(0)
        found = command.get_command(context, name)
        if found is None:
            yield f"there is no command {name!r}"
            return
        command, context = found, click.Context(found, info_name=name, parent=context)
    for option in (word.split("=")[0] for word in rest if re.match(r"--?[a-zA-Z]", word)):
        known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        if option not in {*known, "--help", "-h"}:
            yield f"{command.name} has no option {option}"
    yield from wrong_choices(command, rest)


def wrong_choices(command: click.Command, words: list[str]) -> Iterator[str]:
    """Values that an option does not offer."""
    choices = {
        name: each.type
        for each in command.params
        if isinstance(each.type, click.Choice)
        for name in each.opts
    }
    for option, value in itertools.pairwise(words):
        if option in choices and not value.startswith("-") and not _PLACEHOLDER.fullmatch(value):
            offered = [str(each) for each in choices[option].choices]
            if value not in offered and not value.startswith("$"):
                yield f"{command.name} {option} takes {offered}, not {value!r}"


# The changelog also names commands that are gone.
@pytest.mark.parametrize("page", [page for page in pages() if page != "CHANGELOG.md"])
def test_commands_are_as_the_command_line_has_them(page: str) -> None:
    faults = [
        f"{place}: {fault}: jaxllm {' '.join(arguments)}"
        for place, arguments in named_commands(page)
        for fault in faults_of(arguments)
    ]
    assert not faults, "\n".join(faults)


def test_wrong_commands_are_seen_and_right_ones_pass() -> None:
    for command, part in {
        "generate --promt x": "no option --promt",
        "prepare x --weights int3": "takes",
        "bench trace play": "no command 'play'",
    }.items():
        (fault,) = faults_of(command.split())
        assert part in fault
    right = ("bench NAME", "generate -p x --seed 3", "prepare x -o y --weights int8", "bench trace ...")
    assert not [fault for command in right for fault in faults_of(command.split())]


def test_every_variable_of_the_environment_is_listed():
    files = [ROOT / "setup.py", *(path for room in _ROOMS for path in (ROOT / room).rglob("*.py"))]
    read = {name for path in files for name in _VARIABLE.findall(path.read_text(encoding="utf-8"))}
    listed = re.findall(r"^\| `(JAXLLM_\w+)` \|", text_of("docs/cli.md"), re.M)
    assert set(listed) == read
