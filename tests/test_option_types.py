"""Option types: what they read, and what they refuse because it may mean two things."""

import math
from typing import Any

import click
import pytest

from jaxllm.option_types import Level, Levels, Share, Size

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
    (Share(), "1", "may mean 1%"),
    (Share(), "1.0", "may mean 1.0%"),
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
