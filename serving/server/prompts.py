"""Renders and encodes the prompts of calls, and derives time limits from objectives; imports no JAX."""

import dataclasses
import math
from collections.abc import Sequence
from datetime import datetime

from jaxllm.elastic.slo import Slo
from jaxllm.errors import ConfigError
from jaxllm.serving.contexts.turn_ids import conversation_turn_ids, turn_ids
from jaxllm.serving.elastic.objectives import Cost, EndToEnd, Latency, Objective
from jaxllm.serving.ground.prompt_rows import PromptRows
from jaxllm.serving.images.prompt import EncodedImage, with_images
from jaxllm.serving.server.calls import Call, Conversation
from jaxllm.text.droppable import PromptTokens, conversation_tokens, prompt_tokens
from jaxllm.text.prompts import Prompt, prompt_ids, reads_sources, source_prompt
from jaxllm.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class TimeLimits:
    """Time limits of an objective.

    Attributes:
      ttft_ms, tpot_ms: limits of the time to the first token and per further token; infinity for none.
    """

    ttft_ms: float = math.inf
    tpot_ms: float = math.inf


def time_limits(objective: Objective | None, whole: Cost) -> TimeLimits:
    """The time limits of an answer by its objective and the whole model's cost; a limit of the total time is
    divided in proportion to the whole model's times."""
    match objective:
        case Slo():
            return TimeLimits(*objective.limits(whole.ttft_ms, whole.tpot_ms))
        case Latency():
            return TimeLimits(objective.ttft_ms, objective.tpot_ms)
        case EndToEnd():
            share = objective.total_ms / max(whole.total_ms, 1e-6)
            return TimeLimits(share * whole.ttft_ms, share * whole.tpot_ms)
    return TimeLimits()


def prompt_with_rows(tokenizer: Tokenizer, call: Call) -> tuple[PromptTokens, PromptRows | None]:
    """A call's prompt with the tokens and embeddings of its images; None without images. Image tokens cannot
    be dropped.

    Raises:
      ConfigError, ContextOverflow: see `prompt_of` and `with_images`.
    """
    prompt, images = prompt_of(tokenizer, call), images_of(call.prompt)
    return with_images(tokenizer, prompt, images) if images else (prompt, None)


def images_of(prompt: Conversation | str | tuple[int, ...]) -> tuple[EncodedImage, ...]:
    """The images of a prompt."""
    return prompt.images if isinstance(prompt, Conversation) else ()


def whole_prompt_ids(
    tokenizer: Tokenizer, prompt: Conversation | str | tuple[int, ...], task: str = ""
) -> tuple[int, ...]:
    """`prompt_ids_of`, with the tokens of images."""
    ids, images = prompt_ids_of(tokenizer, prompt, task), images_of(prompt)
    if not images:
        return ids
    return tuple(with_images(tokenizer, PromptTokens.of_ids(ids), images)[0].ids.tolist())


def prompt_of(tokenizer: Tokenizer, call: Call) -> PromptTokens:
    """A call's prompt, rendered and encoded, with one token per image. Words may be dropped if the call
    allows it.

    Raises:
      ConfigError: it is empty or malformed, or has tools that the template does not support.
      ContextOverflow: it is longer than the tokenizer's limit.
    """
    if call.shorten and isinstance(call.prompt, Conversation):
        if reads_sources(tokenizer):
            source = source_prompt(call.prompt.messages, call.prompt.tools, task=call.config.task)
            return prompt_tokens(tokenizer, source)
        return conversation_tokens(
            tokenizer,
            call.prompt.messages,
            tools=call.prompt.tools,
            continue_final=call.prompt.continue_final,
            now=datetime.now(),
        )
    if call.shorten and isinstance(call.prompt, str) and call.prompt:
        return prompt_tokens(tokenizer, Prompt(user=call.prompt, form="text", task=call.config.task))
    return PromptTokens.of_ids(prompt_ids_of(tokenizer, call.prompt, call.config.task))


def content_tokens(tokenizer: Tokenizer, prompt: Conversation | str | tuple[int, ...]) -> int:
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
    prompt, now = call.prompt, datetime.now()
    if isinstance(prompt, str):
        return turn_ids(tokenizer, before, prompt, now=now), None
    if not isinstance(prompt, Conversation):
        if not prompt:
            raise ConfigError("the prompt is empty; give it at least one token")
        return prompt, None
    ids = conversation_turn_ids(
        tokenizer,
        before,
        prompt.messages,
        tools=prompt.tools,
        continue_final=prompt.continue_final,
        now=now,
    )
    if not prompt.images:
        return ids, None
    whole, rows = with_images(tokenizer, PromptTokens.of_ids(ids), prompt.images)
    return whole.ids.tolist(), rows


def rendered(tokenizer: Tokenizer, prompt: Conversation) -> str:
    """The text of a conversation by the chat template; raises ConfigError, TemplateError, ContextOverflow."""
    return tokenizer.render_chat(
        list(prompt.messages), tools=prompt.tools, continue_final=prompt.continue_final, now=datetime.now()
    )


def prompt_ids_of(
    tokenizer: Tokenizer, prompt: Conversation | str | tuple[int, ...], task: str = ""
) -> tuple[int, ...]:
    """The token ids of a prompt; `task`: see `GenerationConfig`.

    Raises:
      ConfigError, ContextOverflow: see `prompt_of`.
    """
    if isinstance(prompt, tuple):
        return prompt
    if isinstance(prompt, str):
        if not prompt:
            raise ConfigError("the prompt is empty; give it at least one character")
        return tuple(tokenizer.encode(tokenizer.files.source_text(prompt, task)))
    if reads_sources(tokenizer):
        return tuple(prompt_ids(tokenizer, source_prompt(prompt.messages, prompt.tools, task=task)))
    if task:
        # Raises: a decoder has no tasks.
        tokenizer.files.source_text("", task)
    return tuple(
        tokenizer.encode_chat(
            list(prompt.messages),
            tools=prompt.tools,
            continue_final=prompt.continue_final,
            now=datetime.now(),
        )
    )


def guided(call: Call) -> Call:
    """The call with its grammar and log-probabilities moved into its config, as the engine requires."""
    config = call.config
    if call.grammar is not None:
        config = dataclasses.replace(config, grammar=call.grammar)
    if call.top_logprobs is not None:
        config = dataclasses.replace(config, top_logprobs=call.top_logprobs)
    return dataclasses.replace(call, config=config)
