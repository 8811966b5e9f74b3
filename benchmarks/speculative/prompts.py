"""Held-out prompts that ask for answers of some length."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from jaxllm.errors import ConfigError
from jaxllm.tasks.droppable import prompt_tokens
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.free_text import read_chats, read_compression, story_example
from jaxllm.tokenizer import Tokenizer

STORIES_FILE = "text/tinystories_valid.txt"
_SEPARATOR = "<|endoftext|>"
_BEGINNING_WORDS = 20


def _stories(data: Path) -> Iterator[str]:
    path = Path(data) / STORIES_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    return (story.strip() for story in text.split(_SEPARATOR) if story.strip())


def _continued(data: Path) -> Iterator[TaskExample]:
    for story in _stories(data):
        words = story.split(" ")
        if len(words) > 2 * _BEGINNING_WORDS:
            beginning, rest = words[:_BEGINNING_WORDS], words[_BEGINNING_WORDS:]
            yield TaskExample(user=" ".join(beginning), answer=" " + " ".join(rest), form="text")


def _told(data: Path) -> Iterator[TaskExample]:
    return (each for each in map(story_example, _stories(data)) if each is not None)


TASKS: dict[str, Callable[[Path], Iterator[TaskExample]]] = {
    "story": _continued,
    "told": _told,
    "shorten": lambda data: read_compression(data, "valid"),
    "chat summary": lambda data: read_chats(data, "valid"),
}


def read_prompts(
    data: Path, tokenizer: Tokenizer, *, count: int, most_tokens: int, seed: int
) -> dict[str, list[list[int]]]:
    """Token ids of `count` prompts of each task, none longer than `most_tokens`.

    Raises:
      ConfigError: a file is missing or malformed.
    """
    found = {}
    for number, (task, read) in enumerate(TASKS.items()):
        examples = list(read(Path(data)))
        order = np.random.default_rng((seed, number)).permutation(len(examples))
        prompts: list[list[int]] = []
        for place in order:
            ids = list(prompt_tokens(tokenizer, examples[place]).ids)
            if len(ids) <= most_tokens:
                prompts.append(ids)
            if len(prompts) == count:
                break
        found[task] = prompts
    return found
