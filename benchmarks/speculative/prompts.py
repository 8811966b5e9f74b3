"""Reads held-out prompts that ask for answers of some length."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.samples.questions import packaged_examples
from benchmarks.samples.stories import read_stories
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.free_text import read_chats, read_compression, story_example
from jaxllm.text.droppable import prompt_tokens
from jaxllm.text.tokenizer import Tokenizer

_BEGINNING_WORDS = 20


def _continued(data: Path | None) -> Iterator[TaskExample]:
    for story in read_stories(data):
        words = story.split(" ")
        if len(words) > 2 * _BEGINNING_WORDS:
            beginning, rest = words[:_BEGINNING_WORDS], words[_BEGINNING_WORDS:]
            yield TaskExample(user=" ".join(beginning), answer=" " + " ".join(rest), form="text")


def _told(data: Path | None) -> Iterator[TaskExample]:
    return (each for each in map(story_example, read_stories(data)) if each is not None)


def _shortened(data: Path | None) -> Iterable[TaskExample]:
    return packaged_examples("shorten") if data is None else read_compression(data, "valid")


def _summed_up(data: Path | None) -> Iterable[TaskExample]:
    return packaged_examples("chat summary") if data is None else read_chats(data, "valid")


TASKS: dict[str, Callable[[Path | None], Iterable[TaskExample]]] = {
    "story": _continued,
    "told": _told,
    "shorten": _shortened,
    "chat summary": _summed_up,
}


def read_prompts(
    data: Path | None, tokenizer: Tokenizer, *, count: int, most_tokens: int, seed: int
) -> dict[str, list[list[int]]]:
    """Token ids of at most `count` prompts of each task, none longer than `most_tokens`.

    Args:
      data: the folder of the tasks' files; None takes the packaged samples.
      tokenizer: of the model that is asked.
      count: of each task; a sample that has fewer gives all of them.
      most_tokens: of a prompt.
      seed: of the choice.

    Raises:
      ConfigError: a file is missing or malformed.
    """
    found = {}
    for number, (task, read) in enumerate(TASKS.items()):
        examples = list(read(data))
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
