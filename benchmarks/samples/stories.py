"""Reads a text of short stories: the packaged one, or the validation text of a data folder."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.text.tokenizer import Tokenizer
from serving.commands.console import read_text

SEPARATOR = "<|endoftext|>"
_PACKAGED = Path(__file__).with_name("stories.txt")
_IN_DATA = Path("text", "tinystories_valid.txt")


def stories_file(data: Path | None) -> Path:
    """The UTF-8 file of stories, split by `SEPARATOR`: in a data folder, or for None the packaged one."""
    return _PACKAGED if data is None else Path(data) / _IN_DATA


def read_stories(data: Path | None) -> list[str]:
    """All stories of a data folder, or for None the packaged ones.

    Raises:
      ConfigError: the file cannot be read.
    """
    stories = (each.strip() for each in read_text(stories_file(data)).split(SEPARATOR))
    return [each for each in stories if each]


def story_tokens(tokenizer: Tokenizer, data: Path | None) -> list[int]:
    """Token ids of all stories, one behind the other."""
    return [token for each in read_stories(data) for token in tokenizer.encode(each)]


def text_windows(tokens: Sequence[int], length: int, count: int) -> Iterator[list[int]]:
    """Pieces of a length, spread evenly over the text.

    Raises:
      ConfigError: there is too little text.
    """
    if len(tokens) < length:
        raise ConfigError(f"a text of {len(tokens)} tokens is too short for windows of {length}")
    step = (len(tokens) - length) // max(1, count - 1)
    for number in range(count):
        yield list(tokens[number * step : number * step + length])
