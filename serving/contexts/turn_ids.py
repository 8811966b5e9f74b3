"""Encodes a user's turn in a context."""

from collections.abc import Sequence
from datetime import datetime

from jaxllm.errors import ConfigError, TemplateError
from jaxllm.text.prompts import Prompt, prompt_ids
from jaxllm.text.tokenizer import Tokenizer

# Takes the place of a turn's text in a rendered template; no text contains it.
_PLACE = "\ue000\ue001\ue000"


def turn_ids(
    tokenizer: Tokenizer,
    before: Sequence[int],
    prompt: str,
    instruction: str = "",
    *,
    now: datetime | None = None,
) -> list[int]:
    """The tokens that a user's turn adds to a context.

    Args:
      tokenizer: of the model; its chat template, if it has one, writes the text between turns.
      before: the context's tokens, which end with an answer; empty before the first turn.
      prompt: the user's text.
      instruction: stands before everything.
      now: for templates that ask for the time.

    Raises:
      ConfigError: the prompt is empty, or an instruction comes late.
      TemplateError: the template is broken, or does not keep an answer as it was.
    """
    if not prompt.strip():
        raise ConfigError("the prompt is empty; give it at least one word")
    chat = tokenizer.has_chat_template
    if not before:
        form = "chat" if chat or instruction else "text"
        return prompt_ids(tokenizer, Prompt(user=prompt, system=instruction, form=form), now=now)
    if instruction:
        raise ConfigError("an instruction comes with the first prompt of a context; make a new context")
    if not chat:
        return tokenizer.encode(prompt, add_special_tokens=False)
    turns = [("user", _PLACE), ("assistant", _PLACE), ("user", prompt)]
    text = tokenizer.chat_text([{"role": role, "content": each} for role, each in turns], now=now)
    answer = text.text.find(_PLACE, text.text.find(_PLACE) + len(_PLACE))
    if text.text.count(_PLACE) < 2:
        raise TemplateError("the model's chat template does not repeat answers: give prompts as token ids")
    ids = tokenizer.encode(text.part(answer + len(_PLACE)), add_special_tokens=False)
    # The template closes a turn with the token that ended the answer.
    return ids[1:] if ids[:1] == [before[-1]] and before[-1] in tokenizer.eos_ids else ids
