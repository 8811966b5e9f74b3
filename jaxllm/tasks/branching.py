"""A question with all of its options as token ids, to be scored together."""

import datetime
from collections.abc import Sequence

from jaxllm.branching import Branching
from jaxllm.marked_text import MarkedText
from jaxllm.tasks.example import TaskExample
from jaxllm.tasks.prompts import encode_prompt, end_of_turn_id, prompt_text
from jaxllm.tokenizer import Tokenizer


def branching(
    tokenizer: Tokenizer,
    example: TaskExample,
    end: int | None = None,
    *,
    now: datetime.datetime | None = None,
) -> Branching:
    """A question with each of its options behind it.

    An option's tokens are those that its text gives behind the question's: a tokenizer may join the end of
    one and the beginning of the other. All options are scored from the same place, before the first such
    join. A chat's answer ends with the model's end token, which tells `art` from the beginning of `article`.

    Args:
      tokenizer: the model's.
      example: the question.
      end: `end_of_turn_id(tokenizer)`, for those who ask many questions.
      now: told to templates that ask for the time.

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
        # All is one token to this tokenizer: options can only be told apart as tokens of their own.
        options = [
            tokenizer.encode(option, add_special_tokens=False, special=False) for option in example.options
        ]
        shared, wholes = len(prompt), [[*prompt, *option] for option in options]
    return Branching(tuple(prompt[:shared]), tuple((*whole[shared:], *ends) for whole in wholes))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
