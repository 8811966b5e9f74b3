"""Encodes a question with all of its options, to be scored together."""

import datetime
from collections.abc import Sequence

from jaxllm.steps.branching import Branching
from jaxllm.tasks.example import TaskExample
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
      tokenizer: tokenizer of the model.
      example: the question.
      end: `end_of_turn_id(tokenizer)`, computed once for many questions.
      now: time for templates that use it.

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
