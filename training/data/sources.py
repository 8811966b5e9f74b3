"""Names sources of documents: texts, stories to be told, tasks, conversations."""

import dataclasses
from pathlib import Path

from jaxllm.errors import ConfigError
from jaxllm.options import check_options, option
from jaxllm.tasks import find_task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Source of documents: texts, a file of stories to be told, a task, or conversations; for an
    encoder-decoder pairs.

    Attributes:
      text: path of a text file, of a folder of `.txt` files, or a pattern; all of each document is learned.
      stories: path of a text file; each document becomes a request to tell it, with its first sentence.
      task: name in `jaxllm.tasks.TASKS`, or a file of questions; its training split, with answers.
      chat: path of a file of JSON lines or parquet, of a folder of such files, or a pattern: conversations,
        and prompts with completions (see `jaxllm.training.data.chats`).
      pairs: paths of two text files, whose lines of the same number are a source and its target; or of one
        file of JSON lines.
      fields: names of the source and of its target in such JSON lines; each of a list of targets is a pair.
      prefix: task prefix of each source of `pairs`; None for the model's own.
      skip_bad: whether malformed lines of `chat` are left out and counted, instead of an error.
    """

    text: str = ""
    stories: str = ""
    task: str = ""
    chat: str = ""
    pairs: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    prefix: str | None = None
    skip_bad: bool = False
    repeats: float = option(
        1.0,
        "How often an epoch reads each document; below 1, that share is sampled anew every epoch.",
        low=0,
        high=1000,
    )
    prompt_weight: float | None = option(
        None,
        "Weight of the loss on a prompt's tokens; without it 0 for `chat` and 1 for others.",
        low=0,
        high=1000,
    )
    answer_weight: float = option(1.0, "Weight of the loss on all other tokens.", low=0, high=1000)

    def __post_init__(self) -> None:
        if self.prompt_weight is None:
            object.__setattr__(self, "prompt_weight", 0.0 if self.chat else 1.0)
        for name in ("pairs", "fields"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        named = [value for value in (self.text, self.stories, self.task, self.chat, *self.pairs[:1]) if value]
        if len(named) != 1 or not isinstance(named[0], str):
            raise ConfigError(
                f"a source is one of text, stories, task, chat and pairs, each a name or names; got {named}"
            )
        if (len(self.pairs), len(self.fields)) not in ((0, 0), (2, 0), (1, 2)):
            raise ConfigError(
                f"pairs are two text files, or one of JSON lines with two fields; got {self.pairs} and "
                f"fields {self.fields}"
            )
        if self.task:
            find_task(self.task)
        check_options(self)

    @property
    def weights(self) -> tuple[float, float]:
        """Weights of the losses on a prompt's tokens and on others."""
        return self.prompt_weight or 0.0, self.answer_weight

    @property
    def name(self) -> str:
        """The source's name in metrics."""
        if self.task:
            return self.task
        if self.pairs:
            return Path(self.pairs[0]).name
        if self.text or self.chat:
            return Path(self.text or self.chat).stem
        return f"{Path(self.stories).stem}-told"
