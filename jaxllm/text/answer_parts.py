"""Parts of a model's answer, piece by piece as they come: its reasoning, text, and calls of tools."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Thinking:
    """A piece of the model's reasoning, without its markers."""

    text: str


@dataclasses.dataclass(frozen=True)
class Text:
    """A piece of the text that users see."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallBegins:
    """The beginning of a call: its tool is known, and one of the request's.

    Attributes:
      index: index of the call in its answer, from 0.
      id: id, unique in its conversation.
    """

    index: int
    name: str
    id: str


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """A piece of a call's arguments; the pieces of a call together are a JSON object.

    Attributes:
      text: JSON, for every syntax of arguments.
    """

    index: int
    text: str


@dataclasses.dataclass(frozen=True)
class CallEnds:
    """The end of a complete call. Without it the answer was cut inside of the call."""

    index: int


Part = Thinking | Text | CallBegins | CallArguments | CallEnds


class AnswerScanner(Protocol):
    """Splits a growing answer into its parts."""

    def feed(self, text: str) -> Sequence[Part]:
        """Adds new text, with the texts of special tokens; returns the parts that are certain."""
        ...

    def finish(self, *, cut: bool) -> Sequence[Part]:
        """Returns the parts that were withheld.

        Args:
          cut: whether the length or a stop string ended the answer. What may be the beginning of a marker is
            then no text.
        """
        ...
