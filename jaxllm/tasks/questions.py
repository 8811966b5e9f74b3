"""Encodes a question with all of its options, to be scored together, with its prompt whole or shortened."""

import dataclasses
import datetime
from collections.abc import Sequence

import numpy as np

from jaxllm.elastic.compression import keep_tokens
from jaxllm.errors import ConfigError
from jaxllm.steps.branching import Branching
from jaxllm.tasks.example import TaskExample
from jaxllm.text.droppable import PromptTokens, prompt_tokens
from jaxllm.text.marked_text import MarkedText
from jaxllm.text.prompts import encode_prompt, end_of_turn_id, prompt_text
from jaxllm.text.tokenizer import Tokenizer


def branching(
    tokenizer: Tokenizer,
    example: TaskExample,
    end: int | None = None,
    *,
    now: datetime.datetime | None = None,
) -> Branching:
    """Encodes a question followed by each of its options.

    An option's tokens are those of its text after the question's text; a tokenizer may join the end of the
    question and the beginning of the option. All options are scored from the same position, before the first
    such join. The answer of a chat ends with the model's end token, which separates `art` from the beginning
    of `article`.

    Args:
      end: `end_of_turn_id(tokenizer)`, computed once for many questions.

    Raises:
      ConfigError: see `encode_prompt`.
    """
    text, special = prompt_text(tokenizer, example, now=now)
    prompt = encode_prompt(tokenizer, text, special)
    in_chat = example.form == "chat" and tokenizer.has_chat_template
    end = end_of_turn_id(tokenizer, now=now) if end is None else end
    ends = () if end is None or not in_chat else (end,)
    wholes = [
        tokenizer.encode(text + MarkedText.of_content(option), add_special_tokens=special)
        for option in example.options
    ]
    shared = min(min(_common(prompt, whole), len(whole) + len(ends) - 1) for whole in wholes)
    if not shared:
        # This tokenizer makes one token of question and option: encode the options separately.
        options = [
            tokenizer.encode(option, add_special_tokens=False, special=False) for option in example.options
        ]
        shared, wholes = len(prompt), [[*prompt, *option] for option in options]
    return Branching(tuple(prompt[:shared]), tuple((*whole[shared:], *ends) for whole in wholes))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """An encoded question with options.

    Attributes:
      per_byte: whether its options are compared by likelihood per byte.
    """

    example: TaskExample
    prompt: PromptTokens
    per_byte: bool = False

    @classmethod
    def read(cls, tokenizer: Tokenizer, example: TaskExample, *, per_byte: bool = False) -> "Question":
        """Renders and encodes a question.

        Raises:
          ConfigError: it has no options.
        """
        if not example.options:
            raise ConfigError(
                f"a question without options has no right answer to compare: {example.user!r:.80}"
            )
        return cls(example, prompt_tokens(tokenizer, example), per_byte)

    def is_right(self, likely: np.ndarray) -> bool:
        """Whether the most likely option, the first of equals, is the right one.

        Args:
          likely: `[options]`, log-probability of each option.
        """
        if self.per_byte:
            sizes = np.array([len(option.strip().encode()) for option in self.example.options])
            likely = likely / np.maximum(sizes, 1)
        return self.example.options[int(np.argmax(likely))] == self.example.answer


def shorten(
    tokenizer: Tokenizer, question: Question, scores: np.ndarray, prompt_ratios: Sequence[float]
) -> tuple[list[Branching], list[float]]:
    """Encodes a question at every prompt ratio, each with the share of its tokens that remains.

    Args:
      scores: `[T]`, scores of the prompt's tokens (see `keep_tokens`).
      prompt_ratios: shares of the prompt, in (0, 1].
    """
    prompt = question.prompt
    whole = branching(tokenizer, question.example)
    forced = prompt.forced.copy()
    # Retained: the token from which all options are scored, and those that the tokenizer may join with
    # options.
    forced[len(whole.trunk) - 1 :] = True
    prompts, shares = [], []
    for ratio in prompt_ratios:
        keep = keep_tokens(scores, prompt.words, forced, ratio)
        trunk = np.asarray(whole.trunk)[keep[: len(whole.trunk)]]
        prompts.append(Branching(tuple(trunk.tolist()), whole.branches))
        shares.append(float(keep.mean()))
    return prompts, shares
