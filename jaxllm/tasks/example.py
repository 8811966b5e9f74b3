"""One question of a task: what a model is asked, what it may answer, what is right."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal

from jaxllm.errors import ConfigError

Split = Literal["train", "valid"]
Form = Literal["chat", "text"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskExample:
    """A question with its right answer.

    Attributes:
      user: what is asked; for a question in the form of text, the text to go on from.
      answer: the right answer: one of `options` where there are any.
      system: the task's instruction; empty for none.
      options: the possible answers, of which the model's is the likeliest. Empty: the answer is written
        freely.
      references: further right answers of a free answer, for scores over several references.
      form: whether the question is put as messages of a chat or as a text to go on from.
    """

    user: str
    answer: str
    system: str = ""
    options: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    form: Form = "chat"

    def __post_init__(self) -> None:
        if self.form not in ("chat", "text"):
            raise ConfigError(f"a question is a chat or a text, not {self.form!r:.80}")
        if self.options and self.answer not in self.options:
            raise ConfigError(
                f"the answer {self.answer!r:.80} is not among the options {self.options!r:.200}"
            )

    def messages(self) -> list[dict[str, str]]:
        """The question as the messages of a chat."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.user}]


def held_out(key: str, share: float) -> bool:
    """Whether what is named `key` belongs to the held-out `share`: by its content alone, so that the order
    of a file's lines plays no role and copies never stand on both sides."""
    return pseudo_random(key) < share


def pseudo_random(key: str) -> float:
    """A number in [0, 1) that follows from `key` alone, on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big") / 2**56


def shuffled(values: Sequence[str], key: str) -> list[str]:
    """`values` in an order that follows from `key` and each value alone."""
    return sorted(values, key=lambda value: pseudo_random(f"{key}\0{value}"))


def text_field(record: Mapping[str, object], name: str) -> str:
    """The text under `name` of a record.

    Raises:
      ConfigError: there is none, or it is no valid Unicode.
    """
    value = record.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"a record needs text under {name!r}, got {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the text under {name!r} has a lone surrogate: {error}") from error
    return value
