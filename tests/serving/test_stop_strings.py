"""Stop strings in streamed text, against a plain search."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.serving.ground.text_stream import StopMatcher


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """What `StopMatcher` shows of `text`, one character at a time: slow and plain."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 12)),
)
@settings(max_examples=50, deadline=None)
def test_stops_match_the_plain_search(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    expected, matched = first_stop(text, stops)
    shown, stopped = "", False
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(bounds):
        piece, stopped = matcher.push(text[start:end])
        shown += piece
        # Never more than what every continuation would show.
        assert expected.startswith(shown)
        if not stopped:
            # Nor less: what is withheld may still begin a stop string.
            withheld = text[len(shown) : end]
            assert withheld == "" or any(stop.startswith(withheld) and stop != withheld for stop in stops)
    shown += matcher.flush()
    assert (shown, matcher.matched) == (expected, matched)
    assert stopped == (matched is not None)


def test_every_cut_of_a_text() -> None:
    text, stops = "xababcabd", ["abc", "babd"]
    for mask in range(1 << (len(text) - 1)):
        pieces, matcher, shown = [text[0]], StopMatcher(stops), ""
        for index, character in enumerate(text[1:]):
            if mask >> index & 1:
                pieces.append(character)
            else:
                pieces[-1] += character
        for piece in pieces:
            shown += matcher.push(piece)[0]
        assert (shown + matcher.flush(), matcher.matched) == ("xab", "abc")


def test_a_found_stop_ends_the_text() -> None:
    matcher = StopMatcher(["\n\n", "User:"])
    assert matcher.push("Hi.\n") == ("Hi.", False)
    assert matcher.push("\nmore") == ("", True)
    assert matcher.matched == "\n\n"
    assert matcher.push("and more") == ("", True)
    assert matcher.flush() == ""


def test_a_beginning_that_fails_is_shown() -> None:
    matcher = StopMatcher(["User:"])
    assert matcher.push("Use") == ("", False)
    assert matcher.push("ful Us") == ("Useful ", False)
    assert matcher.flush() == "Us"
    assert matcher.matched is None


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ([""], "1 to 256 characters, got ''"),
        (["a" * 257], "1 to 256 characters"),
        ([5], "got 5"),
        (["a"] * 17, "at most 16 stop strings are allowed, got 17"),
        ("abc", "must be a list"),
    ],
)
def test_bad_stops_are_refused(stops: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StopMatcher(stops)
