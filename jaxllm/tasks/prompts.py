"""A task's question as a model reads it: through its chat template, or as a text to go on from."""

import datetime

from jaxllm.errors import ConfigError, TemplateError
from jaxllm.marked_text import MarkedText
from jaxllm.tasks.example import TaskExample
from jaxllm.tokenizer import Tokenizer


def prompt_text(
    tokenizer: Tokenizer, example: TaskExample, *, now: datetime.datetime | None = None
) -> tuple[MarkedText, bool]:
    """A question's text, and whether the tokenizer is to add its special tokens.

    A model without a chat template reads the instruction and the question as plain lines. A template that
    refuses a system's turn gets the instruction in the user's. Only a text to go on from may spell special
    tokens itself.

    Args:
      tokenizer: the model's.
      example: the question.
      now: told to templates that ask for the time.

    Raises:
      TemplateError: the model's template is broken.
    """
    if example.form == "text":
        return MarkedText.of_template(example.user), True
    plain = "\n".join(part for part in (example.system, example.user) if part)
    if not tokenizer.has_chat_template:
        return MarkedText.of_content(f"{plain}\n"), True
    messages = example.messages()
    try:
        return tokenizer.chat_text(messages, now=now), False
    except TemplateError:
        if len(messages) == 1:
            raise
        return tokenizer.chat_text([{"role": "user", "content": plain}], now=now), False


def prompt_ids(
    tokenizer: Tokenizer, example: TaskExample, *, now: datetime.datetime | None = None
) -> list[int]:
    """What the model reads before it answers.

    Raises:
      ConfigError: the question has no text that the tokenizer makes a token of.
    """
    return encode_prompt(tokenizer, *prompt_text(tokenizer, example, now=now))


def encode_prompt(tokenizer: Tokenizer, text: MarkedText, special: bool) -> list[int]:
    """The tokens of what `prompt_text` gave.

    Raises:
      ConfigError: the question has no text that the tokenizer makes a token of.
    """
    ids = tokenizer.encode(text, add_special_tokens=special)
    if not ids:
        raise ConfigError(f"a question without a token: {text.text!r:.200}")
    return ids


def end_of_turn_id(tokenizer: Tokenizer, *, now: datetime.datetime | None = None) -> int | None:
    """The token that ends an assistant's turn: of the model's end tokens the one that its chat template
    writes there, else the first; None where the model has none."""
    ends = tokenizer.eos_ids
    if len(ends) > 1 and tokenizer.has_chat_template:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            ids = tokenizer.encode_chat(turns, add_generation_prompt=False, now=now)
        except TemplateError:
            ids = []
        for each in reversed(ids):
            if each in ends:
                return each
    return ends[0] if ends else None
