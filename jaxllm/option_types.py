"""Types of command-line options: shares, levels and numbers of bytes, in one format everywhere."""

import math
import re
from typing import Any

import click

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"


class _Type(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]: generic in stubs alone
    """A type whose placeholder in help texts is fixed."""

    metavar: str

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """The placeholder in help texts."""
        return self.metavar


class Share(_Type):
    """A share of a whole: "5%" and "0.05" are the same.

    A number of 1 and more without a percent sign is refused, since it might mean either.
    """

    name, metavar = "share", "SHARE"

    def __init__(self, *, above_zero: bool = False, most: float = 1.0, allow_inf: bool = False) -> None:
        """Accepts shares from 0 to `most`.

        Args:
          above_zero: whether 0 is refused.
          most: the maximum; infinity for unbounded growth.
          allow_inf: whether to accept "inf", for no limit.
        """
        self._above_zero, self._most, self._allow_inf = above_zero, most, allow_inf

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The share, 0.05 for "5%"; fails the command for invalid values."""
        if isinstance(value, int | float):
            return float(value)
        text = str(value).strip()
        if self._allow_inf and text == "inf":
            return math.inf
        found = re.fullmatch(_NUMBER + r"\s*(%?)", text)
        if found is None:
            self.fail(f"{text!r} is no share; write one such as 5% or 0.05", param, ctx)
        number, percent = float(found[1]), found[2] == "%"
        if number >= 1 and not percent:
            self.fail(f"{text!r} may mean {text}% or a share; write {text}%, or a number below 1", param, ctx)
        share = number / 100 if percent else number
        if share > self._most or (self._above_zero and share == 0):
            least = "above 0%" if self._above_zero else "from 0%"
            most = "" if math.isinf(self._most) else f" to {self._most:.0%}"
            self.fail(f"{text!r} is out of range; a share {least}{most} is needed", param, ctx)
        return share


class Level(_Type):
    """A level of an elastic model, by its percentage: "50" and "50%" are the same."""

    name, metavar = "level", "PERCENT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The percentage; fails the command for invalid values."""
        if isinstance(value, int):
            return value
        text = str(value).strip().removesuffix("%").rstrip()
        if not text.isdecimal() or not 1 <= int(text) <= 100:
            self.fail(f"{value!r} is no level; write a whole percentage such as 50 or 50%", param, ctx)
        return int(text)


class Levels(_Type):
    """Several levels, with commas between them: "20,50,80"."""

    name, metavar = "levels", "PERCENT,..."
    _level = Level()

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """The percentages; fails the command for invalid values."""
        if isinstance(value, tuple):
            return value
        return tuple(self._level.convert(each, param, ctx) for each in str(value).split(","))


class Size(_Type):
    """A number of bytes, such as 300MB, 1.5GiB or 4096."""

    name, metavar = "size", "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; fails the command for invalid values."""
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"\s*" + _NUMBER + r"\s*([kmgt]?)(i?)b?\s*", str(value), re.IGNORECASE)
        if found is None:
            self.fail(f"{value!r} is no size; write one such as 300MB, 1.5GiB or 4096", param, ctx)
        number, prefix, binary = found.groups()
        power = "kmgt".find(prefix.lower()) + 1 if prefix else 0
        return int(float(number) * (1024 if binary else 1000) ** power)
