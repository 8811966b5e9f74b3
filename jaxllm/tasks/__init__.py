"""Tasks to train and evaluate models on: questions with their right answers, read from files.

`TASKS` names them all; to add one, write how its files become `TaskExample`s (`readers.py`) and add a line
here, or an entry point of the group `jaxllm.tasks`.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from jaxllm.errors import ConfigError
from jaxllm.registry import Registry
from jaxllm.tasks import readers
from jaxllm.tasks.readers import Reader, multiple_choice, split_files

Score = Literal["accuracy", "continuation", "exact_match", "rouge"]
SUFFIX = ".jsonl"


@dataclasses.dataclass(frozen=True)
class Task:
    """A task by name.

    Attributes:
      read: function from (folder of all data, split) to its examples.
      score: scoring of answers: by the most likely option, by whether the right answer is the greedy
        continuation, by equality of a free answer with the right one, or by ROUGE.
      per_byte: whether options are compared by likelihood per byte, for options of very different lengths.
      answer_tokens: maximum number of tokens of a free answer.
    """

    name: str
    title: str
    read: Reader
    score: Score = "accuracy"
    per_byte: bool = False
    answer_tokens: int = 64


def _labels(folder: str, labels: readers.Labels) -> Reader:
    return split_files(f"tasks/{folder}", labels.example)


_OWN = (
    Task("sentiment", "is a review positive or negative (SST-2)", _labels("sst2", readers.SENTIMENT)),
    Task("news", "the topic of a piece of news (AG News)", _labels("agnews", readers.NEWS)),
    Task("emotion", "the emotion in a message (emotion)", _labels("emotion", readers.EMOTION)),
    Task("mood", "the same messages under coarser labels", _labels("emotion", readers.MOOD)),
    Task("ui-step", "the next step on a phone's screen (DroidTask)", readers.read_ui_steps),
    Task("api-choice", "the function that answers a request (BFCL)", readers.read_api_choices),
    Task("shorten", "a shorter version of a sentence", readers.read_compression, "rouge"),
    Task("chat-summary", "the summary of a chat (SAMSum)", readers.read_chats, "rouge"),
    Task(
        "arc-easy",
        "grade-school science questions",
        split_files("tasks/arc_easy", multiple_choice),
        per_byte=True,
    ),
    Task(
        "openbookqa",
        "science with common knowledge",
        split_files("tasks/openbookqa", multiple_choice),
        per_byte=True,
    ),
    Task("lambada", "a passage's last word", readers.read_last_words, "continuation"),
)
TASKS: Registry[Task] = Registry("jaxllm.tasks", {task.name: task for task in _OWN})


def find_task(name: str) -> Task:
    """Returns the task of a name, or of the questions in a `.jsonl` file of this path (see
    `readers.own_questions`).

    Raises:
      ConfigError: there is no task of this name.
    """
    if name in TASKS:
        return TASKS[name]
    if not name.endswith(SUFFIX):
        raise ConfigError(
            f"there is no task {name!r}; the tasks are {', '.join(TASKS)}, and files of questions (*{SUFFIX})"
        )
    return Task(name, "the user's own questions", readers.own_questions(Path(name)))
