"""Option types: what they read, and what they refuse because it may mean two things."""

import math

import click
import pytest

from jaxllm.option_types import Level, Levels, Share, Size


@pytest.mark.parametrize(
    ("text", "share"),
    [("5%", 0.05), ("0.05", 0.05), (".5", 0.5), ("100%", 1.0), ("0", 0.0), ("0%", 0.0), ("12.5 %", 0.125)],
)
def test_shares(text: str, share: float) -> None:
    assert Share()(text) == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("5", "may mean 5%"),
        ("1", "may mean 1%"),
        ("1.0", "may mean 1.0%"),
        ("101%", "out of range; a share from 0% to 100%"),
        ("-1%", "no share"),
        ("a lot", "no share"),
        ("nan", "no share"),
        ("inf", "no share"),
        ("", "no share"),
    ],
)
def test_what_is_no_share(text: str, part: str) -> None:
    with pytest.raises(click.BadParameter, match=part):
        Share()(text)


def test_growths_are_shares_without_a_bound() -> None:
    growth = Share(above_zero=True, most=math.inf, allow_inf=True)
    assert growth("250%") == 2.5
    assert growth("inf") == math.inf
    with pytest.raises(click.BadParameter, match="above 0% is needed"):
        growth("0%")


@pytest.mark.parametrize(("text", "level"), [("50", 50), ("50%", 50), ("1", 1), ("100 %", 100)])
def test_levels(text: str, level: int) -> None:
    assert Level()(text) == level


@pytest.mark.parametrize("text", ["0", "101", "0.5", "half", "", "-5", "5%%"])
def test_what_is_no_level(text: str) -> None:
    with pytest.raises(click.BadParameter, match="whole percentage"):
        Level()(text)


def test_lists_of_levels() -> None:
    assert Levels()("20,50%,100") == (20, 50, 100)
    with pytest.raises(click.BadParameter, match="'x' is no level"):
        Levels()("30,x")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4096", 4096), ("300MB", 300_000_000), ("1.5GiB", 3 << 29), ("2k", 2000), (" 1 kib ", 1024)],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert Size()(text) == size_bytes


@pytest.mark.parametrize("text", ["much", "-1MB", "1PB", ""])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match="no size"):
        Size()(text)
