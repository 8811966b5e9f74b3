"""Names where documents come from: texts, stories to be told, tasks."""

import dataclasses
from pathlib import Path
from typing import Any

from jaxllm.errors import ConfigError
from jaxllm.tasks import find_task
from training.settings import require_float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A source of documents: a text file, a file of stories to be told, or a task.

    Attributes:
      text: path of a text file; all of each document is learnt.
      stories: path of a text file; each document becomes a request to tell it, with its first sentence.
      task: a name in `jaxllm.tasks.TASKS`; its training split, as questions with answers.
      repeats: how often an epoch takes each document; below 1, that share is drawn anew every epoch.
      prompt_weight: weight of the loss on a prompt's tokens.
      answer_weight: weight of the loss on all other tokens.
    """

    text: str = ""
    stories: str = ""
    task: str = ""
    repeats: float = 1.0
    prompt_weight: float = 1.0
    answer_weight: float = 1.0

    def __post_init__(self) -> None:
        named = [value for value in (self.text, self.stories, self.task) if value]
        if len(named) != 1 or not isinstance(named[0], str):
            raise ConfigError(f"a source is one of text, stories and task, each a name; got {named}")
        if self.task:
            find_task(self.task)
        require_float("repeats", self.repeats, least=0, most=1000)
        require_float("prompt_weight", self.prompt_weight, least=0, most=1000)
        require_float("answer_weight", self.answer_weight, least=0, most=1000)

    @property
    def name(self) -> str:
        """The source's name in metrics."""
        if self.task:
            return self.task
        return Path(self.text).stem if self.text else f"{Path(self.stories).stem}-told"


def read_sources(parts: Any) -> tuple[Source, ...]:
    """Sources from dicts of their fields.

    Raises:
      ConfigError: a part is malformed.
    """
    try:
        return tuple(Source(**part) for part in parts)
    except TypeError as error:
        raise ConfigError(f"malformed sources: {error}") from error
