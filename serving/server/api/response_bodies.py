"""Defines the fields of OpenAI's responses, and the response object that tells them back."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from serving.server.api.asking import SamplingFields, format_grammar
from serving.server.api.bodies import Neutral, convert
from serving.server.api.chat import MAX_TOP_LOGPROBS
from serving.server.api.errors import ApiError
from serving.server.api.messages import ToolUse, tools_of
from serving.server.api.options import ApiOptions
from serving.server.calls import Grammar

LOGPROBS = "message.output_text.logprobs"
_Key = Annotated[str, msgspec.Meta(max_length=64)]
_Value = Annotated[str, msgspec.Meta(max_length=512)]


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the text must be: `text`, `json_object`, or a `json_schema` with a name and a schema."""

    type: str = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class Text(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's `text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class FunctionTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool as OpenAI's responses have it."""

    type: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseBody(SamplingFields, kw_only=True):
    """The fields of a response that are supported."""

    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: int | None = None
    text: Text = msgspec.field(default_factory=Text)
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)] | None = None
    safety_identifier: str | None = None

    @property
    def with_logprobs(self) -> bool:
        """Whether log-probabilities are asked for."""
        return LOGPROBS in (self.include or ())


NEUTRAL: Neutral = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning": ({"effort": "none"},),
    "stream_options": ({"include_obfuscation": False},),
    "truncation": ("disabled",),
}


def check(body: ResponseBody) -> None:
    """Raises ApiError where fields are out of their domain, or exclude each other."""
    if body.previous_response_id is not None and body.conversation is not None:
        raise ApiError(
            "previous_response_id and conversation exclude each other; send one",
            code="mutually_exclusive_parameters",
            param="previous_response_id",
        )
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise ApiError(
            f"max_output_tokens must be at least 1, got {body.max_output_tokens}", param="max_output_tokens"
        )
    if body.text.verbosity not in (None, "medium"):
        raise ApiError(
            f"text.verbosity is medium alone, got {body.text.verbosity!r:.40}", param="text.verbosity"
        )
    for each in body.include or ():
        if each != LOGPROBS:
            raise ApiError(f"include takes {LOGPROBS} alone, got {each!r:.80}", param="include")
    if body.top_logprobs and not body.with_logprobs:
        raise ApiError(f"top_logprobs needs include to have {LOGPROBS}", param="top_logprobs")
    if not 0 <= (body.top_logprobs or 0) <= MAX_TOP_LOGPROBS:
        raise ApiError(
            f"top_logprobs is 0 to {MAX_TOP_LOGPROBS}, got {body.top_logprobs}", param="top_logprobs"
        )


def use_of(body: ResponseBody, chat_template: str) -> tuple[ToolUse, Grammar | None]:
    """What tools and the text's format mean for the call: tools, and what the text must match.

    Raises:
      ApiError: one of them is malformed, or they exclude each other.
    """
    tools = [_chat_tool(each, f"tools[{index}]") for index, each in enumerate(body.tools or ())]
    choice = None if body.tool_choice == "auto" else body.tool_choice
    use = tools_of(tools, choice, body.parallel_tool_calls, chat_template)
    form = body.text.format or TextFormat()
    if form.type == "json_schema" and not form.name:
        raise ApiError("text.format of the type json_schema needs a name", param="text.format.name")
    grammar = format_grammar(form.type, form.schema, "text.format")
    if use.tools and (grammar or body.grammar):
        raise ApiError("tools cannot stand beside a text format or grammar", param="tools")
    if use.tools and body.with_logprobs:
        # Tokens of calls are no tokens of the text, and cannot be told apart.
        raise ApiError(f"tools cannot stand beside {LOGPROBS}", param="include")
    return use, use.grammar or grammar


def told_back(body: ResponseBody, model: str, options: ApiOptions) -> dict[str, Any]:
    """What a response object tells of its request."""
    form = body.text.format or TextFormat()
    schema = {
        "name": form.name,
        "schema": form.schema,
        "strict": form.strict,
        "description": form.description,
    }
    told = {
        "model": model,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "store": body.store,
        "background": False,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "temperature": options.temperature if body.temperature is None else body.temperature,
        "text": {"format": {"type": form.type} | (schema if form.type == "json_schema" else {})},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [msgspec.to_builtins(convert(each, FunctionTool)) for each in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
    return told | ({} if body.service_tier is None else {"service_tier": body.service_tier})


def _chat_tool(value: Any, at: str) -> Mapping[str, Any]:
    """A tool as OpenAI's chats have it."""
    kind = value.get("type") if isinstance(value, dict) else "function"
    if kind != "function":
        raise ApiError(f"{at} is of the type {kind!r:.40}; tools are functions", param=f"{at}.type")
    tool = convert(value, FunctionTool, at)
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
