"""Options declared once and their types: checks, keys of files, command lines and tables come from the
declaration.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from jaxllm.errors import ConfigError
from jaxllm.option_types import Level, Levels, Share, Size
from jaxllm.options import check_keys, check_options, click_option, option, required_options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    steps: int = option(help="Optimizer steps.", low=1)
    share: float = option(0.5, "Share of steps.", above=0, below=1)
    levels: tuple[int, ...] = option((50, 100), "Levels.", low=1, high=100, entries=1, ascending=True)
    order: Literal["fast", "slow"] | None = option(None, "Order of steps.")
    limit: int | None = option(None, "Most bytes.", low=0)
    flag: bool = False
    name: str = ""
    path: Path | None = None
    anything: object = None

    def __post_init__(self) -> None:
        check_options(self)


def test_values_of_other_kinds_become_those_of_the_field() -> None:
    made = Settings(steps=3, levels=[20, 100], path="a/b", share=0.25)  # pyright: ignore[reportArgumentType]
    assert (made.levels, made.path, made.limit) == ((20, 100), Path("a/b"), None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1, got 0"),
        ({"share": 0}, "share must be a number above 0 and below 1, got 0"),
        ({"share": float("nan")}, "share must be a number"),
        ({"levels": ()}, "levels must have 1 or more entries"),
        ({"levels": 50}, "levels must be a list, got 50"),
        ({"levels": (0, 50)}, r"each of levels must be a whole number in \[1, 100\], got 0"),
        ({"levels": (100, 50)}, "levels must be ascending"),
        ({"order": "fastest"}, "order must be one of fast, slow, got 'fastest'"),
        ({"limit": -1}, "limit must be a whole number of at least 0"),
        ({"flag": 1}, "flag must be true or false, got 1"),
        ({"name": 3}, "name must be text, got 3"),
        ({"path": ""}, "path must be a path, got ''"),
    ],
)
def test_wrong_values_name_the_field_and_the_bounds(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**{"steps": 1, **change})


def test_keys() -> None:
    assert required_options(Settings) == {"steps"}
    check_keys(Settings, {"steps": 1}, "run")
    with pytest.raises(ConfigError, match=r"unknown run key stepz; the keys are anything, flag, .*steps$"):
        check_keys(Settings, {"stepz": 1}, "run")
    with pytest.raises(ConfigError, match="the run lacks steps"):
        check_keys(Settings, {}, "run")


def test_command_lines() -> None:
    @click.command()
    @click_option(Settings, "share")
    @click_option(Settings, "levels", "--level")
    @click_option(Settings, "order", default="the recipe's")
    @click_option(Settings, "limit")
    def command(**values: object) -> None:
        click.echo(repr(dict(sorted(values.items()))))

    def said(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(command, words)
        return result.exit_code, result.output

    assert said() == (0, "{'levels': (), 'limit': None, 'order': None, 'share': None}\n")
    code, output = said("--level", "20", "--level", "50", "--share", "0.1", "--order", "slow")
    assert (code, output) == (0, "{'levels': (20, 50), 'limit': None, 'order': 'slow', 'share': 0.1}\n")
    for wrong in (("--share", "0"), ("--level", "101"), ("--order", "x"), ("--limit", "-1")):
        assert said(*wrong)[0] == 2, wrong
    text = " ".join(said("--help")[1].split())
    assert "Share of steps. [default: 0.5]" in text
    assert "Levels. [default: 50, 100]" in text
    assert "Order of steps. [default: the recipe's]" in text


GOOD = [
    *((Share(), text, share) for text, share in (
        ("5%", 0.05), ("0.05", 0.05), (".5", 0.5), ("100%", 1.0), ("0", 0.0), ("0%", 0.0), ("12.5 %", 0.125),
    )),
    # Growths are shares without a bound.
    *((Share(above_zero=True, most=math.inf, allow_inf=True), text, share) for text, share in (
        ("250%", 2.5), ("inf", math.inf),
    )),
    *((Level(), text, level) for text, level in (("50", 50), ("50%", 50), ("1", 1), ("100 %", 100))),
    (Levels(), "20,50%,100", (20, 50, 100)),
    *((Size(), text, size_bytes) for text, size_bytes in (
        ("4096", 4096), ("300MB", 300_000_000), ("1.5GiB", 3 << 29), ("2k", 2000), (" 1 kib ", 1024),
    )),
]  # fmt: skip
BAD = [
    (Share(), "5", "may mean 5%"),
    (Share(), "101%", "out of range; a share from 0% to 100%"),
    *((Share(), text, "no share") for text in ("-1%", "a lot", "nan", "inf", "")),
    (Share(above_zero=True, most=math.inf, allow_inf=True), "0%", "above 0% is needed"),
    *((Level(), text, "whole percentage") for text in ("0", "101", "0.5", "half", "", "-5", "5%%")),
    (Levels(), "30,x", "'x' is no level"),
    *((Size(), text, "no size") for text in ("much", "-1MB", "1PB", "")),
]


@pytest.mark.parametrize(("kind", "text", "value"), GOOD)
def test_what_is_read(kind: click.ParamType, text: str, value: Any) -> None:
    assert kind(text) == pytest.approx(value)


@pytest.mark.parametrize(("kind", "text", "part"), BAD)
def test_what_is_refused(kind: click.ParamType, text: str, part: str) -> None:
    with pytest.raises(click.BadParameter, match=part):
        kind(text)
