"""Reads held-out prompts that ask for answers of some length: of our tasks, or of Spec-Bench.

Spec-Bench (arXiv 2401.07851) is a file of JSON lines, each with a `category` and the `turns` of a
conversation, of which the first is asked. The project has no copy of it.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.samples.questions import packaged_examples
from benchmarks.samples.source_tasks import SOURCE_TASKS, chosen_tasks, source_examples
from benchmarks.samples.stories import read_stories
from jaxllm.errors import ConfigError
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.free_text import read_chats, read_compression, story_example
from jaxllm.text.droppable import prompt_tokens
from jaxllm.text.prompts import reads_sources
from jaxllm.text.tokenizer import Tokenizer
from serving.commands.console import read_text

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


# The categories of Spec-Bench, of which the others are MT-Bench's.
_SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag")
_CHAT = "multi-turn conversation"


def spec_bench(file: Path) -> dict[str, list[TaskExample]]:
    """The first turns of Spec-Bench by category; those of MT-Bench are one.

    Raises:
      ConfigError: the file cannot be read, or a line is malformed.
    """
    found: dict[str, list[TaskExample]] = {_CHAT: [], **{each: [] for each in _SPEC_BENCH}}
    for number, line in enumerate(read_text(file).splitlines()):
        try:
            record = json.loads(line)
            category, turn = record["category"], record["turns"][0]
            example = TaskExample(user=turn, answer="")
        except (ValueError, TypeError, LookupError, AttributeError, ConfigError) as error:
            raise ConfigError(
                f"{file}, line {number + 1}: is no prompt of Spec-Bench, which has a category and turns; "
                "give its question.jsonl"
            ) from error
        found[category if category in _SPEC_BENCH else _CHAT].append(example)
    return found


def source_lines(file: Path) -> dict[str, list[TaskExample]]:
    """The sources of an encoder-decoder's task: a line each, or what precedes the tab of a pair.

    Raises:
      ConfigError: the file cannot be read.
    """
    sources = (line.split("\t")[0].strip() for line in read_text(file).splitlines())
    return {"sources": [TaskExample(user=each, answer="") for each in sources if each]}


def _of_model(tokenizer: Tokenizer, data: Path | None) -> dict[str, list[TaskExample]]:
    """The sources of the tasks that an encoder-decoder's folder names."""
    names = chosen_tasks(tokenizer)
    return {SOURCE_TASKS[name].called: source_examples(name, data) for name in names}


def read_prompts(
    data: Path | None,
    tokenizer: Tokenizer,
    *,
    count: int,
    most_tokens: int,
    seed: int,
    file: Path | None = None,
) -> dict[str, list[list[int]]]:
    """Token ids of at most `count` prompts of each task, none longer than `most_tokens`.

    Args:
      data: the folder of the tasks' files; None takes the packaged samples.
      tokenizer: of the model that is asked.
      count: of each task; a sample that has fewer gives all of them. Tasks without any are left out.
      most_tokens: of a prompt.
      seed: of the choice.
      file: of Spec-Bench, whose categories are the tasks then; for an encoder-decoder of sources (see
        `source_lines`). None takes `TASKS`, or the tasks that an encoder-decoder's folder names.

    Raises:
      ConfigError: a file is missing or malformed, or no prompt is that short.
    """
    found = {}
    if reads_sources(tokenizer):
        by_task = source_lines(file) if file is not None else _of_model(tokenizer, data)
    elif file is not None:
        by_task = spec_bench(file)
    else:
        by_task = {task: list(read(data)) for task, read in TASKS.items()}
    for number, (task, examples) in enumerate(by_task.items()):
        order = np.random.default_rng((seed, number)).permutation(len(examples))
        prompts: list[list[int]] = []
        for place in order:
            ids = list(prompt_tokens(tokenizer, examples[place]).ids)
            if len(ids) <= most_tokens:
                prompts.append(ids)
            if len(prompts) == count:
                break
        if prompts:
            found[task] = prompts
    if not found:
        raise ConfigError(f"no prompt of {file or 'the tasks'} has at most {most_tokens} tokens")
    return found
