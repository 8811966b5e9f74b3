"""A question of a task: the prompt, the possible answers, the right answer."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal

from jaxllm.errors import ConfigError
from jaxllm.text.prompts import Prompt

Split = Literal["train", "valid"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskExample(Prompt):
    """A question with its right answer.

    Attributes:
      answer: the right answer: one of `options` if there are any.
      options: possible answers; the model's answer is the most likely. Empty for free text.
      references: further right answers of a free answer, for scores over several references.
    """

    answer: str
    options: tuple[str, ...] = ()
    references: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.options and self.answer not in self.options:
            raise ConfigError(
                f"the answer {self.answer!r:.80} is not among the options {self.options!r:.200}"
            )


def held_out(key: str, share: float) -> bool:
    """Whether the example named `key` belongs to the held-out `share`. It depends only on `key`, so that
    the order of a file's lines has no influence, and copies are never in both splits."""
    return pseudo_random(key) < share


def pseudo_random(key: str) -> float:
    """Returns a number in [0, 1) that depends only on `key`, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big") / 2**56


def shuffled(values: Sequence[str], key: str) -> list[str]:
    """Returns `values` in an order that depends only on `key` and each value."""
    return sorted(values, key=lambda value: pseudo_random(f"{key}\0{value}"))


def text_field(record: Mapping[str, object], name: str) -> str:
    """Returns the text under `name` of a record.

    Raises:
      ConfigError: there is no text, or it is no valid Unicode.
    """
    value = record.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"a record needs text under {name!r}, got {value!r:.80}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the text under {name!r} has a lone surrogate: {error}") from error
    return value
