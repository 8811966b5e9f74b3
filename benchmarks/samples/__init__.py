"""Texts and questions that benchmarks ask: the packaged samples, or the files of a data folder (`--data`).

`stories.txt` and `questions.json` were written for this project and come from no data set. They suffice to
time systems and to see that answers agree; accuracies on so few questions have wide intervals.

LLMCad and EdgeMoE measure translation, summary and question answering. Which of our tasks an encoder-decoder
has, its folder says (`TokenizerFiles.tasks`); a shortened sentence stands in for a summary, and the emotion
of a text for the answer to a question.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxllm.cli.console import read_text
from jaxllm.errors import ConfigError
from jaxllm.serving.evaluation.tasks import read_questions
from jaxllm.tasks import TASKS, readers
from jaxllm.tasks.example import TaskExample, held_out, paired_lines
from jaxllm.tasks.readers import SHORTEN, SUM_UP, read_chats, read_compression
from jaxllm.text.tokenizer import Tokenizer

SEPARATOR = "<|endoftext|>"


def stories_file(data: Path | None) -> Path:
    """The UTF-8 file of stories, split by `SEPARATOR`: in a data folder, or for None the packaged one."""
    if data is None:
        return Path(__file__).with_name("stories.txt")
    return Path(data) / "text" / "tinystories_valid.txt"


def read_stories(data: Path | None) -> list[str]:
    """All stories of a data folder, or for None the packaged ones."""
    stories = (each.strip() for each in read_text(stories_file(data)).split(SEPARATOR))
    return [each for each in stories if each]


def story_tokens(tokenizer: Tokenizer, data: Path | None) -> list[int]:
    """Token ids of all stories, one behind the other."""
    return [token for each in read_stories(data) for token in tokenizer.encode(each)]


def text_windows(tokens: Sequence[int], length: int, count: int) -> Iterator[list[int]]:
    """Pieces of a length, spread evenly over the text."""
    if len(tokens) < length:
        raise ConfigError(f"a text of {len(tokens)} tokens is too short for windows of {length}")
    step = (len(tokens) - length) // max(1, count - 1)
    for number in range(count):
        yield list(tokens[number * step : number * step + length])


_LABELS = {"sentiment": readers.SENTIMENT, "news": readers.NEWS, "emotion": readers.EMOTION}
_FREE = {"shorten": SHORTEN, "chat summary": SUM_UP}


def read_examples(tasks: Sequence[str], data: Path | None, limit: int = 0) -> dict[str, list[TaskExample]]:
    """The validation questions of tasks, by task.

    Args:
      tasks: names of `jaxllm.tasks`.
      data: the folder of the tasks' files; None takes the packaged samples.
      limit: most questions of a task; 0 takes all.
    """
    if data is not None:
        return read_questions(tasks, data, limit).examples
    return {task: packaged_examples(task)[: limit or None] for task in tasks}


def packaged_examples(task: str) -> list[TaskExample]:
    """The packaged questions of a task."""
    samples = json.loads(Path(__file__).with_name("questions.json").read_text(encoding="utf-8"))
    if task not in samples:
        raise ConfigError(f"task {task} has no packaged sample, only {', '.join(samples)}; give --data DIR")
    return [_example(task, sample, number) for number, sample in enumerate(samples[task])]


def _example(task: str, sample: Any, number: int) -> TaskExample:
    if task in _LABELS:
        return _LABELS[task].example(dict(zip(("text", "label"), sample, strict=True)))
    if task in _FREE:
        text, answer = sample
        return TaskExample(system=_FREE[task], user=text, answer=answer, references=(answer,))
    if task == "ui-step":
        history, state = "\n".join(f"- {each}" for each in sample["done"]), "\n".join(sample["screen"])
        step = {"label": [sample["chosen"], "null"], "history": history, "state": state}
        return readers.ui_step(sample["app"], sample["goal"], step)
    functions = [{"name": name, "description": text} for name, text in sample["functions"].items()]
    record = {
        "id": f"sample {number}",
        "question": [[{"role": "user", "content": sample["request"]}]],
        "function": functions,
    }
    return readers.api_choice(record, sample["answer"], readers.function_lines([record]), 0)


def _translated(source: str, target: str) -> Callable[[Path], Iterator[TaskExample]]:
    def read(data: Path) -> Iterator[TaskExample]:
        folder = data / "tasks" / "multi30k"
        pairs = paired_lines(folder / f"val.{source}", folder / f"val.{target}", read_lines)
        for text, right in pairs:
            yield TaskExample(user=text, answer=right)

    return read


@dataclasses.dataclass(frozen=True)
class SourceTask:
    """One task.

    Attributes:
      called: in rows; first what the papers call it.
      read: its held-out examples, from the folder of all data.
      labels: whether answers are labels, which are right or wrong.
    """

    called: str
    read: Callable[[Path], Iterator[TaskExample]]
    labels: bool = False


# By the names of tasks in a model's folder.
SOURCE_TASKS = {
    "translation_de_to_en": SourceTask("translation de-en", _translated("de", "en")),
    "translation_en_to_de": SourceTask("translation en-de", _translated("en", "de")),
    "summarization": SourceTask("summary", lambda data: read_chats(data, "valid")),
    "shortening": SourceTask(
        "summary (shortening)",
        # So many are held out by the packaged recipes.
        lambda data: (each for each in read_compression(data, "valid") if held_out(each.user.strip(), 0.03)),
    ),
    "emotion": SourceTask(
        "question (emotion)", lambda data: TASKS["emotion"].read(data, "valid"), labels=True
    ),
}


def read_lines(file: Path) -> list[str]:
    """The lines of a UTF-8 file, stripped."""
    return [line.strip() for line in read_text(file).split("\n")]


def chosen_tasks(tokenizer: Tokenizer, names: Sequence[str] = ()) -> list[str]:
    """The tasks to measure a model by: those that are named, or all that it has."""
    has = [name for name in SOURCE_TASKS if name in tokenizer.files.tasks]
    for name in names:
        if name not in has:
            raise ConfigError(
                f"the model has no task {name!r:.80}; it has {', '.join(has) or 'none of them'}"
            )
    if not has:
        raise ConfigError(
            f"the model's folder names none of the tasks {', '.join(SOURCE_TASKS)}; give sources of your own"
        )
    return list(names) or has


def source_examples(name: str, data: Path | None) -> list[TaskExample]:
    """The held-out examples of a task, without an instruction: the model's prefix says what to do."""
    if data is None:
        raise ConfigError(f"{SOURCE_TASKS[name].called} has no packaged sample; give --data DIR")
    examples = SOURCE_TASKS[name].read(Path(data))
    # An instruction is for models that answer any; options would bind the answer.
    return [dataclasses.replace(each, system="", options=(), task=name) for each in examples]
