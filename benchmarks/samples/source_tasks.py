"""Reads the tasks of encoder-decoders from the folder of all data: translation, summaries, questions.

LLMCad and EdgeMoE measure translation, summary and question answering. Which of our tasks a model has, its
folder says (`TokenizerFiles.tasks`); a shortened sentence stands in for a summary, and the emotion of a text
for the answer to a question.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.tasks.example import TaskExample, held_out
from jaxllm.tasks.free_text import read_chats, read_compression
from jaxllm.tasks.labels import EMOTION
from jaxllm.tasks.pairs import paired_lines
from jaxllm.text.tokenizer import Tokenizer
from serving.commands.console import read_text

# Of the sentences that are shortened the packaged recipes hold out so many.
_SHORTENED_SHARE = 0.03


def _translated(source: str, target: str) -> Callable[[Path], Iterator[TaskExample]]:
    def read(data: Path) -> Iterator[TaskExample]:
        folder = data / "tasks" / "multi30k"
        pairs = paired_lines(folder / f"val.{source}", folder / f"val.{target}", read_lines)
        for text, right in pairs:
            yield TaskExample(user=text, answer=right)

    return read


def _shortened(data: Path) -> Iterator[TaskExample]:
    found = read_compression(data, "valid")
    return (each for each in found if held_out(each.user.strip(), _SHORTENED_SHARE))


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
    "shortening": SourceTask("summary (shortening)", _shortened),
    "emotion": SourceTask("question (emotion)", lambda data: EMOTION.read(data, "valid"), labels=True),
}


def read_lines(file: Path) -> list[str]:
    """The lines of a UTF-8 file, stripped.

    Raises:
      ConfigError: it cannot be read.
    """
    return [line.strip() for line in read_text(file).split("\n")]


def chosen_tasks(tokenizer: Tokenizer, names: Sequence[str] = ()) -> list[str]:
    """The tasks to measure a model by: those that are named, or all that it has.

    Raises:
      ConfigError: the model lacks one, or has none.
    """
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
    """The held-out examples of a task, without an instruction: the model's prefix says what to do.

    Raises:
      ConfigError: there is no folder of data, or a file is missing or malformed.
    """
    if data is None:
        raise ConfigError(f"{SOURCE_TASKS[name].called} has no packaged sample; give --data DIR")
    examples = SOURCE_TASKS[name].read(Path(data))
    # An instruction is for models that answer any; options would bind the answer.
    return [dataclasses.replace(each, system="", options=(), task=name) for each in examples]
