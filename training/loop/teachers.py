"""Reads the model that a run learns from."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError


class _Teacher(Protocol):
    @property
    def cfg(self) -> ModelConfig: ...


TeacherT = TypeVar("TeacherT", bound=_Teacher)


def read_teacher(
    folder: Path | None, read: Callable[[Path], TeacherT], *, share: float, vocab_size: int
) -> TeacherT | None:
    """The teacher in a folder; None for a recipe without one.

    Args:
      folder: a Hugging Face folder, if one was given.
      read: reads it.
      share: the recipe's `teacher_share`.
      vocab_size: of the recipe's model.

    Raises:
      ConfigError: a folder and no share, a share and no folder, or another number of tokens.
    """
    if (folder is not None) != (share > 0):
        raise ConfigError(
            f"the recipe's teacher_share is {share}: "
            + ("say with --teacher whom to learn from" if folder is None else "it takes no --teacher")
        )
    if folder is None:
        return None
    teacher = read(folder)
    if teacher.cfg.vocab_size != vocab_size:
        raise ConfigError(
            f"the teacher has {teacher.cfg.vocab_size} tokens, the recipe's model {vocab_size}; "
            "train both with one tokenizer"
        )
    return teacher
