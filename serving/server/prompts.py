"""Renders and encodes the prompts of calls, and derives time limits from objectives; imports no JAX."""

import math
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from jaxllm.elastic.slo import Slo
from jaxllm.errors import ConfigError
from jaxllm.serving.contexts.record import conversation_turn_ids, turn_ids
from jaxllm.serving.elastic.objectives import Cost, EndToEnd, Latency, Objective
from jaxllm.serving.ground.prompt_rows import PromptRows
from jaxllm.serving.images.prompt import EncodedImage, with_images
from jaxllm.serving.server.calls import Call, Conversation
from jaxllm.text.droppable import PromptTokens, conversation_tokens, prompt_tokens
from jaxllm.text.prompts import Prompt, prompt_ids, reads_sources, source_prompt
from jaxllm.text.tokenizer import Tokenizer


def time_limits(objective: Objective | None, whole: Cost) -> tuple[float, float]:
    """The limits of an answer's time to the first token and per further token, in milliseconds, by its
    objective and the whole model's cost; infinity for none. A limit of the total time is divided in
    proportion to the whole model's times."""
    match objective:
        case Slo():
            return objective.limits(whole.ttft_ms, whole.tpot_ms)
        case Latency():
            return objective.ttft_ms, objective.tpot_ms
        case EndToEnd():
            share = objective.total_ms / max(whole.total_ms, 1e-6)
            return share * whole.ttft_ms, share * whole.tpot_ms
    return math.inf, math.inf


Prompts = Conversation | str | tuple[int, ...]


def encoded_prompt(
    tokenizer: Tokenizer, prompt: Prompts, task: str = "", *, shorten: bool = False
) -> tuple[PromptTokens, PromptRows | None]:
    """A prompt, rendered and encoded, with the tokens and the embeddings of its images; None without images.

    Args:
      tokenizer: tokenizer of the model.
      prompt: a conversation, a text, or token ids.
      task: see `GenerationConfig`.
      shorten: whether words of a text, or of a conversation's last message, may be dropped.

    Raises:
      ConfigError: it is empty or malformed, or has tools that the template does not support.
      ContextOverflow: it is longer than the tokenizer's limit.
    """
    match prompt:
        case Conversation() if reads_sources(tokenizer):
            source = source_prompt(prompt.messages, prompt.tools, task=task)
            found = prompt_tokens(tokenizer, source) if shorten else prompt_ids(tokenizer, source)
        case Conversation():
            if task:
                # Raises: a decoder has no tasks.
                tokenizer.files.source_text("", task)
            if shorten:
                found = conversation_tokens(tokenizer, prompt.messages, **_chat(prompt))
            else:
                found = tokenizer.encode_chat(list(prompt.messages), **_chat(prompt))
        case "":
            raise ConfigError("the prompt is empty; give it at least one character")
        case str() if shorten:
            found = prompt_tokens(tokenizer, Prompt(user=prompt, form="text", task=task))
        case str():
            found = tokenizer.encode(tokenizer.files.source_text(prompt, task))
        case _:
            found = prompt
    encoded = found if isinstance(found, PromptTokens) else PromptTokens.of_ids(tuple(found))
    images = images_of(prompt)
    return with_images(tokenizer, encoded, images) if images else (encoded, None)


def images_of(prompt: Prompts) -> tuple[EncodedImage, ...]:
    """The images of a prompt."""
    return prompt.images if isinstance(prompt, Conversation) else ()


def content_tokens(tokenizer: Tokenizer, prompt: Prompts) -> int:
    """The approximate number of tokens of a turn, for threads that do not know its context."""
    if isinstance(prompt, tuple):
        return len(prompt)
    texts = [prompt] if isinstance(prompt, str) else [str(each.get("content")) for each in prompt.messages]
    count = sum(len(tokenizer.encode(text, add_special_tokens=False, special=False)) for text in texts)
    return count + sum(len(image.rows) for image in images_of(prompt))


def call_turn_ids(
    tokenizer: Tokenizer, call: Call, before: Sequence[int]
) -> tuple[Sequence[int], PromptRows | None]:
    """The tokens that a call adds to a context's tokens `before`, and prompt embeddings in place of some.

    Raises:
      ConfigError, ContextOverflow: the prompt is empty, or not a turn (see `conversation_turn_ids`).
    """
    prompt = call.prompt
    if isinstance(prompt, str):
        return turn_ids(tokenizer, before, prompt, now=datetime.now()), None
    if not isinstance(prompt, Conversation):
        if not prompt:
            raise ConfigError("the prompt is empty; give it at least one token")
        return prompt, None
    ids = conversation_turn_ids(tokenizer, before, prompt.messages, **_chat(prompt))
    if not prompt.images:
        return ids, None
    whole, rows = with_images(tokenizer, PromptTokens.of_ids(ids), prompt.images)
    return whole.ids.tolist(), rows


def rendered(tokenizer: Tokenizer, prompt: Conversation) -> str:
    """The text of a conversation by the chat template; raises ConfigError, TemplateError, ContextOverflow."""
    return tokenizer.render_chat(list(prompt.messages), **_chat(prompt))


def _chat(prompt: Conversation) -> dict[str, Any]:
    """Arguments of chat templates beside the messages."""
    return {"tools": prompt.tools, "continue_final": prompt.continue_final, "now": datetime.now()}
