"""Tasks to train and evaluate models on: questions with their right answers, read from files.

`TASKS` names them all; to add one, write how its files become `TaskExample`s and add a line here, or an
entry point of the group `jaxllm.tasks`.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from jaxllm.errors import ConfigError
from jaxllm.registry import Registry
from jaxllm.tasks import api_choice, free_text, labels, multiple_choice, ui_steps
from jaxllm.tasks.example import Split, TaskExample
from jaxllm.tasks.own_questions import SUFFIX, OwnQuestions

Score = Literal["accuracy", "exact_match", "rouge"]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task by name.

    Attributes:
      name: name for users.
      title: one-line title.
      read: function from (folder of all data, split) to its examples.
      score: scoring of answers: by the most likely option, by equality of a free answer with the right one,
        or by ROUGE.
      per_byte: whether options are compared by likelihood per byte, for options of very different lengths.
      answer_tokens: maximum number of tokens of a free answer.
    """

    name: str
    title: str
    read: Callable[[Path, Split], Iterator[TaskExample]]
    score: Score = "accuracy"
    per_byte: bool = False
    answer_tokens: int = 64


_OWN = {
    task.name: task
    for task in (
        Task("sentiment", "is a review positive or negative (SST-2)", labels.SENTIMENT.read),
        Task("news", "the topic of a piece of news (AG News)", labels.NEWS.read),
        Task("emotion", "the emotion in a message (emotion)", labels.EMOTION.read),
        Task("mood", "the same messages under coarser labels", labels.MOOD.read),
        Task("ui-step", "the next step on a phone's screen (DroidTask)", ui_steps.read),
        Task("api-choice", "the function that answers a request (BFCL)", api_choice.read),
        Task("shorten", "a shorter version of a sentence", free_text.read_compression, "rouge"),
        Task("chat-summary", "the summary of a chat (SAMSum)", free_text.read_chats, "rouge"),
        Task("arc-easy", "grade-school science questions", multiple_choice.ARC_EASY.read, per_byte=True),
        Task("openbookqa", "science with common knowledge", multiple_choice.OPENBOOKQA.read, per_byte=True),
        Task(
            "lambada",
            "a passage's last word",
            free_text.read_last_words,
            "exact_match",
            answer_tokens=8,
        ),
    )
}
TASKS: Registry[Task] = Registry("jaxllm.tasks", _OWN)


def find_task(name: str) -> Task:
    """Returns the task of a name, or of the questions in a `.jsonl` file of this path (see `own_questions`).

    Raises:
      ConfigError: there is no task of this name.
    """
    if name in TASKS:
        return TASKS[name]
    if not name.endswith(SUFFIX):
        raise ConfigError(
            f"there is no task {name!r}; the tasks are {', '.join(TASKS)}, and files of questions (*{SUFFIX})"
        )
    return Task(name, "questions of the user's own", OwnQuestions(Path(name)).read)
