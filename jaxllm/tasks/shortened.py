"""Shortens the prompts of questions with options, at every prompt ratio."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxllm.elastic.compression import keep_tokens
from jaxllm.errors import ConfigError
from jaxllm.steps.branching import Branching
from jaxllm.tasks.branching import branching
from jaxllm.tasks.example import TaskExample
from jaxllm.text.droppable import PromptTokens, prompt_tokens
from jaxllm.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """An encoded question with options.

    Attributes:
      example: the question.
      prompt: its tokens and droppable spans.
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
      tokenizer: tokenizer of the model.
      question: question with its whole prompt.
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
