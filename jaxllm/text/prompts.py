"""Renders and encodes a prompt: through the model's chat template, or as a text to continue."""

import dataclasses
import datetime
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jaxllm.errors import ConfigError, TemplateError

if TYPE_CHECKING:
    from jaxllm.text.marked_text import MarkedText
    from jaxllm.text.tokenizer import Tokenizer

Form = Literal["chat", "text"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One turn for a model to answer.

    Attributes:
      user: the user's message; with the form "text", the text to continue.
      system: the instruction, which is never shortened; empty for none.
      form: "chat" for messages of a chat, "text" for a text to continue.
      task: task of an encoder-decoder, one of `TokenizerFiles.tasks`; empty for the model's own, or none.
    """

    user: str
    system: str = ""
    form: Form = "chat"
    task: str = ""

    def __post_init__(self) -> None:
        if self.form not in ("chat", "text"):
            raise ConfigError(f"a prompt is a chat or a text, not {self.form!r:.80}")

    def messages(self) -> list[dict[str, str]]:
        """The prompt as the messages of a chat."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.user}]


def reads_sources(tokenizer: "Tokenizer") -> bool:
    """Whether a tokenizer is an encoder-decoder's: a prompt is its source."""
    return bool(tokenizer.files.start_ids)


def source_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, task: str = ""
) -> Prompt:
    """The source of a conversation for an encoder-decoder: a user's message, optionally after an instruction.

    Args:
      messages: JSON objects with a `role` and a `content`, oldest first.
      tools: must be empty.
      task: see `Prompt`.

    Raises:
      ConfigError: there are other messages, or tools.
    """
    roles, texts = [each.get("role") for each in messages], [each.get("content") for each in messages]
    if roles not in (["user"], ["system", "user"]) or not all(isinstance(each, str) for each in texts):
        raise ConfigError(
            "an encoder-decoder answers one message of a user, its source, perhaps after an instruction (the "
            "role system), and no later turns; got messages of "
            f"{', '.join(map(str, roles))[:80] or 'nobody'}"
        )
    if tools:
        raise ConfigError("tools are not for encoder-decoders; send a message without them")
    if not str(texts[-1]).strip():
        raise ConfigError("the source is empty; give it at least one word")
    return Prompt(user=str(texts[-1]), system=str(texts[0]) if len(texts) > 1 else "", task=task)


def prompt_text(
    tokenizer: "Tokenizer", prompt: Prompt, *, now: datetime.datetime | None = None
) -> "tuple[MarkedText, bool]":
    """The text of a prompt, and whether the tokenizer must add its special tokens.

    For an encoder-decoder, instruction and question are lines of its source, after the prefix of its task.
    For other models without a chat template, they are plain lines. If a template refuses a system turn, the
    instruction is put in the user's turn. Only a text to continue may spell special tokens.

    Raises:
      TemplateError: the model's template is broken.
      ConfigError: the model has no such task.
    """
    # Imported here, so that command lines can list tasks without importing NumPy.
    from jaxllm.text.marked_text import MarkedText

    source_text = functools.partial(tokenizer.files.source_text, task=prompt.task)
    if prompt.form == "text":
        return MarkedText.of_template(source_text(prompt.user)), True
    plain = "\n".join(part for part in (prompt.system, prompt.user) if part)
    if reads_sources(tokenizer):
        return MarkedText.of_content(source_text(plain)), True
    if prompt.task:
        # Raises: a decoder has no tasks.
        source_text(plain)
    if not tokenizer.has_chat_template:
        return MarkedText.of_content(f"{plain}\n"), True
    messages = prompt.messages()
    try:
        return tokenizer.chat_text(messages, now=now), False
    except TemplateError:
        if len(messages) == 1:
            raise
        return tokenizer.chat_text([{"role": "user", "content": plain}], now=now), False


def prompt_ids(tokenizer: "Tokenizer", prompt: Prompt, *, now: datetime.datetime | None = None) -> list[int]:
    """The token ids of a prompt.

    Raises:
      ConfigError: the prompt has no token.
    """
    return encode_prompt(tokenizer, *prompt_text(tokenizer, prompt, now=now))


def encode_prompt(tokenizer: "Tokenizer", text: "MarkedText", special: bool) -> list[int]:
    """The token ids of the result of `prompt_text`.

    Raises:
      ConfigError: the text has no token.
    """
    ids = tokenizer.encode(text, add_special_tokens=special)
    if not ids:
        raise ConfigError(f"a question without a token: {text.text!r:.200}")
    return ids


def end_of_turn_id(tokenizer: "Tokenizer", *, now: datetime.datetime | None = None) -> int | None:
    """The token that ends an assistant's turn: the end token that the chat template writes there, else the
    model's first; None if the model has none."""
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
