"""Encodes a turn in a context: a user's text, or messages of a conversation.

The first turn in a context of an encoder-decoder is its source, permanently; later turns are forced tokens
of its decoder.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError, TemplateError
from jaxllm.text.marked_text import PLACE
from jaxllm.text.prompts import Prompt, prompt_ids, reads_sources, source_prompt
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxllm.serving.contexts.record import Record


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
      tokenizer: tokenizer of the model; its chat template, if any, writes the text between turns.
      before: the context's tokens, which end with an answer; empty before the first turn.
      prompt: the user's text.
      instruction: text before everything.
      now: time for templates.

    Raises:
      ConfigError: the prompt is empty, or an instruction comes after the first turn.
      TemplateError: the template is broken, or changes answers.
    """
    sourced = reads_sources(tokenizer)
    if not prompt.strip() and not (sourced and before):
        raise ConfigError("the prompt is empty; give it at least one word")
    chat = tokenizer.has_chat_template and not sourced
    if not before:
        form = "chat" if chat or instruction else "text"
        return prompt_ids(tokenizer, Prompt(user=prompt, system=instruction, form=form), now=now)
    if instruction:
        raise ConfigError("an instruction comes with the first prompt of a context; make a new context")
    if not chat:
        return tokenizer.encode(prompt, add_special_tokens=False)
    return _following_ids(tokenizer, before, [{"role": "user", "content": prompt}], now=now)


def conversation_turn_ids(
    tokenizer: Tokenizer,
    before: Sequence[int],
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    continue_final: bool | None = None,
    now: datetime | None = None,
) -> list[int]:
    """The tokens that messages add to a context.

    Args:
      tokenizer: tokenizer of a model with a chat template.
      before: see `turn_ids`.
      messages: JSON objects with a `role` and a `content`. Before the first turn any conversation; later
        results of tools, a user's message, or both in this order.
      tools: tools that the model may call, in OpenAI's format. They come with the first turn, as far as the
        template writes them before it; later turns may repeat them.
      continue_final: option of the first turn; see `Tokenizer.chat_text`.
      now: see `turn_ids`.

    Raises:
      ConfigError: there is no chat template, the messages are not a turn, or a tool is not in the context.
      TemplateError: see `turn_ids`.
    """
    if reads_sources(tokenizer):
        return _sourced_ids(tokenizer, before, messages, tools)
    if not before:
        return tokenizer.encode_chat(messages, tools=tools, continue_final=continue_final, now=now)
    roles = [str(each.get("role")) for each in messages]
    results = roles[:-1] if roles[-1:] == ["user"] else roles
    if not roles or set(results) - {"tool"}:
        raise ConfigError(
            "a context has its instruction and earlier turns already: send a user's message, results of "
            f"tools, or these and then a user's message; got messages of {', '.join(roles)[:80] or 'nobody'}"
        )
    ids = _following_ids(tokenizer, before, messages, tools=tools, now=now)
    if tools:
        _require_named(tools, tokenizer.decode([*before, *ids], skip_special_tokens=False))
    return ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnTokens:
    """The tokens of a request in a context (see `Engine.request`).

    Attributes:
      prompt: the context's tokens and the turn's; for the first turn of an encoder-decoder its source.
      source: source of an encoder-decoder from the second turn on; else None.
      known: number of tokens of source and prompt that the context had before.
    """

    prompt: tuple[int, ...]
    source: tuple[int, ...] | None = None
    known: int = 0

    @classmethod
    def after(
        cls,
        record: "Record",
        before: Sequence[int],
        turn: Sequence[int],
        tokenizer: Tokenizer,
        cfg: ModelConfig,
    ) -> "TurnTokens":
        """The tokens of a turn after the first tokens `before` of a context, whose model is `cfg`."""
        if cfg.encoder is None:
            return cls(prompt=(*before, *turn), known=len(before))
        if not before:
            return cls(prompt=tuple(turn))
        # Nothing follows an end token, with which the last answer may have ended.
        before = before[:-1] if before[-1] in tokenizer.eos_ids else before
        known = len(record.source) + len(before)
        return cls(prompt=(*before, *turn), source=record.source, known=known)

    @property
    def told(self) -> tuple[int, ...]:
        """All tokens, source first."""
        return (*(self.source or ()), *self.prompt)


def _sourced_ids(
    tokenizer: Tokenizer,
    before: Sequence[int],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
) -> list[int]:
    """`conversation_turn_ids` of an encoder-decoder."""
    if not before:
        return prompt_ids(tokenizer, source_prompt(messages, tools))
    text = messages[0].get("content") if len(messages) == 1 else None
    if tools or not isinstance(text, str) or messages[0].get("role") != "assistant":
        raise ConfigError(
            "a context of an encoder-decoder has one source, its first turn's: send an assistant's message "
            "with what its answer goes on with, or make a new context for another source; got messages of "
            f"{', '.join(str(each.get('role')) for each in messages)[:80] or 'nobody'}"
            + (", and tools" if tools else "")
        )
    return tokenizer.encode(text, add_special_tokens=False)


def _following_ids(
    tokenizer: Tokenizer,
    before: Sequence[int],
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    now: datetime | None,
) -> list[int]:
    """The tokens of messages that follow an answer."""
    turns = [{"role": "user", "content": PLACE}, {"role": "assistant", "content": PLACE}, *messages]
    text = tokenizer.chat_text(turns, tools=tools, now=now)
    answer = text.text.find(PLACE, text.text.find(PLACE) + len(PLACE))
    if text.text.count(PLACE) < 2:
        raise TemplateError("the model's chat template does not repeat answers: give prompts as token ids")
    ids = tokenizer.encode(text.part(answer + len(PLACE)), add_special_tokens=False)
    # The template closes a turn with the token that ended the answer.
    return ids[1:] if ids[:1] == [before[-1]] and before[-1] in tokenizer.eos_ids else ids


def _require_named(tools: Sequence[Mapping[str, Any]], text: str) -> None:
    for tool in tools:
        name = str(tool.get("function", tool).get("name"))
        if name not in text:
            raise ConfigError(
                f"the context does not know the tool {name!r:.80}: tools come with its first turn; make a "
                "new context for others"
            )
