"""A task's question as token ids: through the model's chat template, or as a text to go on from."""

import datetime
from collections.abc import Sequence

from jaxllm.errors import ConfigError, TemplateError
from jaxllm.tasks.example import TaskExample
from jaxllm.tokenizer import Tokenizer
from serving.packing import Branching


def prompt_ids(tokenizer: Tokenizer, example: TaskExample) -> list[int]:
    """What the model reads before it answers.

    Raises:
      ConfigError: the question has no text that the tokenizer makes a token of.
    """
    text, special = _prompt(tokenizer, example)
    ids = tokenizer.encode(text, add_special_tokens=special)
    if not ids:
        raise ConfigError(f"a question without a token: {example!r:.200}")
    return ids


def branching(tokenizer: Tokenizer, example: TaskExample) -> Branching:
    """A question with each of its options behind it.

    An option's tokens are those that its text gives behind the question's: a tokenizer may join the end of
    one and the beginning of the other. All options are scored from the same place, before the first such
    join. A chat's answer ends with the model's end token, which tells `art` from the beginning of `article`.

    Raises:
      ConfigError: see `prompt_ids`.
    """
    text, special = _prompt(tokenizer, example)
    prompt = prompt_ids(tokenizer, example)
    ends = tokenizer.eos_ids[:1] if example.form == "chat" and tokenizer.has_chat_template else ()
    wholes = [tokenizer.encode(text + option, add_special_tokens=special) for option in example.options]
    shared = min(min(_common(prompt, whole), len(whole) + len(ends) - 1) for whole in wholes)
    if not shared:
        # All is one token to this tokenizer: options can only be told apart as tokens of their own.
        options = [tokenizer.encode(option, add_special_tokens=False) for option in example.options]
        shared, wholes = len(prompt), [[*prompt, *option] for option in options]
    return Branching(tuple(prompt[:shared]), tuple((*whole[shared:], *ends) for whole in wholes))


def _prompt(tokenizer: Tokenizer, example: TaskExample) -> tuple[str, bool]:
    """A question's text, and whether the tokenizer is to add its special tokens."""
    if example.form == "text":
        return example.user, True
    plain = "\n".join(part for part in (example.system, example.user) if part)
    if not tokenizer.has_chat_template:
        return f"{plain}\n", True
    messages = example.messages()
    now = datetime.datetime.now()
    try:
        return tokenizer.render_chat(messages, now=now), False
    except TemplateError:
        # Some templates know no system's turn.
        if len(messages) == 1:
            raise
        return tokenizer.render_chat([{"role": "user", "content": plain}], now=now), False


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
