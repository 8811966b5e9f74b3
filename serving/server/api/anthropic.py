"""Answers Anthropic's /v1/messages as a thin layer over the same calls."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any, Literal

import msgspec
from starlette.responses import Response

from jaxllm.serving.server.api.answers import AnswerParams, answer_of, reasoning_in
from jaxllm.serving.server.api.choices import AnswerPart, Choice
from jaxllm.serving.server.api.context_edits import edited
from jaxllm.serving.server.api.dialect import convert, ignore
from jaxllm.serving.server.api.errors import ApiError, anthropic_body
from jaxllm.serving.server.api.fields import COUNT, MESSAGES, Choosing, CountBody, OutputConfig
from jaxllm.serving.server.api.grammars import format_grammar
from jaxllm.serving.server.api.messages import messages_of, text_of
from jaxllm.serving.server.api.reasoning import Switch
from jaxllm.serving.server.api.requests import ApiRequest, ApiState, event_frame, new_id
from jaxllm.serving.server.api.tool_use import ToolChoice, require_function, tools_of
from jaxllm.serving.server.calls import Conversation
from jaxllm.text.answer_parts import CallArguments, CallBegins, CallEnds, Part, Text, Thinking


class Tool(msgspec.Struct, kw_only=True):
    """A tool in Anthropic's format, other than those of its servers."""

    name: Any = None
    description: Any = None
    input_schema: Any = None
    type: Literal["custom"] | None = None
    strict: Any = None


async def create(state: ApiState, request: ApiRequest) -> Response | dict[str, Any]:
    """Answers messages, as a whole or as events."""
    body = state.body(request, MESSAGES)
    if (
        body.thinking is not None
        and (most := body.thinking.budget_tokens) is not None
        and most >= body.max_tokens
    ):
        message = f"thinking.budget_tokens is less than max_tokens ({body.max_tokens}), which counts both"
        raise ApiError(message, param="thinking.budget_tokens")
    said = _Said(state, request, body)
    form = body.output_config and body.output_config.format
    params = AnswerParams(
        max_tokens=body.max_tokens, stop=body.stop_sequences, use=said.use,
        reasoning=said.reasoning,
        grammar=form and format_grammar(form.type, form.schema, "output_config.format"),
        notes={"thoughts_dropped": said.dropped} if said.dropped else {},
    )  # fmt: skip
    prompt, edits = await said.conversation()
    answer = await answer_of(state, request, body, (prompt,), params)
    blocks = _Blocks(state, request.app, body.model, edits)
    if body.stream:
        return await answer.streamed(blocks.frames, lambda error: event_frame(anthropic_body(error), "error"))
    (choice,) = await answer.whole()
    content = [block for each in choice.parts if (block := blocks.whole(each)) is not None]
    message = blocks.message(choice) | {"content": content, **blocks.stop(choice), "jaxllm": choice.facts()}
    return message | blocks.edits


async def count_tokens(state: ApiState, request: ApiRequest) -> dict[str, Any]:
    """Counts the tokens of messages."""
    body = state.body(request, COUNT)
    state.model(body.model)
    said = _Said(state, request, body)
    prompt, edits = await said.conversation()
    count = len(await state.backend.tokenize(prompt))
    cleared = sum(each["cleared_input_tokens"] for each in edits or ())
    original = {} if edits is None else {"context_management": {"original_input_tokens": count + cleared}}
    return {"input_tokens": count, **original}


class _Said:
    """What a request says: its messages in OpenAI's format, tools and reasoning.

    Attributes:
      use: effect of the tools.
      reasoning: what is said about the model's reasoning.
      dropped: number of thoughts that this service has not signed, which are left out.
    """

    def __init__(self, state: ApiState, request: ApiRequest, body: CountBody) -> None:
        self._state, self._app, self.dropped = state, request.app, 0
        self._given: list[dict[str, Any]] = []
        self._management = body.context_management
        systems = [] if body.system is None else [text_of(body.system, "system")]
        for index, value in enumerate(body.messages):
            if value.get("role") == "system":
                # Few templates know system messages later on.
                systems.append(text_of(value.get("content"), f"messages[{index}].content"))
            else:
                self._given += self._messages(value, f"messages[{index}]")
        if systems:
            self._given.insert(0, {"role": "system", "content": "\n\n".join(systems)})
        choice = body.tool_choice or Choosing(type="auto")
        self.use = tools_of(
            [_tool(each, f"tools[{index}]") for index, each in enumerate(body.tools or ())],
            ToolChoice(
                mode={"any": "required", "tool": "required"}.get(choice.type, choice.type),
                names=(choice.name,) if choice.name is not None else None,
                named=choice.name is not None,
                several=not choice.disable_parallel_tool_use and choice.name is None,
            ),
        )
        thinking, config = body.thinking, body.output_config or OutputConfig()
        # With adaptive thinking the model decides, as the template has it.
        wanted = {"enabled": True, "disabled": False}.get(thinking.type) if thinking else None
        self.reasoning = reasoning_in(
            state, body,
            Switch("wanted", wanted, "thinking"),
            Switch("budget", thinking and thinking.budget_tokens, "thinking.budget_tokens"),
            Switch("level", config.effort, "output_config.effort"),
        )  # fmt: skip

    async def conversation(self) -> tuple[Conversation, list[dict[str, Any]] | None]:
        """The conversation, with its images encoded, and the edits that were applied to it; None if none were
        asked for."""
        prompt = await self._state.conversation(
            self._app, messages_of(self._given), self.use.tools, template_options=self.reasoning.options
        )
        if self._management is None:
            return prompt, None
        return await edited(self._state.backend, prompt, self._management)

    def _thought(self, block: Mapping[str, Any], at: str) -> str:
        """The thought of a block that this service has signed or encrypted; empty, and counted, for others,
        which come from other models or were changed."""
        seals, text = self._state.seals, block.get("thinking")
        if block.get("type") == "redacted_thinking":
            text = seals.opened(self._app, block.get("data"))
        elif not isinstance(text, str):
            raise ApiError(f"{at} has thinking, a text, and its signature", param=at)
        elif not seals.verifies(self._app, text, block.get("signature")):
            text = None
        self.dropped += text is None
        return text or ""

    def _messages(self, value: Mapping[str, Any], at: str) -> list[dict[str, Any]]:
        """A message in OpenAI's format; several if it has results of tools."""
        role, content = value.get("role"), value.get("content")
        for name in value.keys() - {"role", "content"}:
            ignore(f"{at}.{name}")
        if role not in ("user", "assistant"):
            raise ApiError(f"{at} has a role, user, assistant or system, and a content", param=at)
        if isinstance(content, str):
            return [{"role": role, "content": content}]
        if not isinstance(content, list) or not content:
            raise ApiError(f"{at}.content is a text or a list of blocks", param=at)
        results, texts, calls, thoughts = [], [], [], []
        for place, block in enumerate(content):
            kind = block.get("type") if isinstance(block, dict) else None
            if kind in ("thinking", "redacted_thinking") and role == "assistant":
                thoughts.append(self._thought(block, f"{at}.content[{place}]"))
            elif kind == "tool_use" and role == "assistant":
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            elif kind == "tool_result" and role == "user":
                inner = block.get("content")
                blocks = inner if isinstance(inner, list) else []
                if not isinstance(inner, str | list | None) or not all(
                    isinstance(each, dict) for each in blocks
                ):
                    raise ApiError(f"{at}.content[{place}] has no text", param=at)
                text = text_of(inner, f"{at}.content[{place}].content")
                results.append({"role": "tool", "content": text, "tool_call_id": block.get("tool_use_id")})
            elif kind == "image" and role == "user":
                source = block.get("source")
                source = source if isinstance(source, dict) else {}
                if (kind := source.get("type")) != "base64":
                    wrong = f"{at}.content[{place}].source is base64, got {kind!r:.40}: nothing is fetched"
                    raise ApiError(wrong, param=f"{at}.content[{place}]")
                url = f"data:{source.get('media_type')};base64,{source.get('data')}"
                texts.append({"type": "image_url", "image_url": {"url": url}})
            elif isinstance(block, dict):
                texts.append({"type": "text", "text": text_of([block], f"{at}.content")})
            else:
                raise ApiError(f"{at}.content[{place}] is no block", param=at)
        thought = "".join(thoughts)
        if not texts and not calls and not thought:
            return results
        message: dict[str, Any] = {"role": role, "content": texts}
        message |= {"reasoning_content": thought} if thought else {}
        return [*results, message | ({"tool_calls": calls} if calls else {})]


def _tool(value: Any, at: str) -> dict[str, Any]:
    """A tool in OpenAI's format; those of Anthropic's own types are refused by them."""
    if isinstance(value, Mapping) and (kind := value.get("type") or "custom") != "custom":
        require_function({"type": kind}, at)
    tool = convert(value, Tool, at)
    function = {name: getattr(tool, name) for name in ("name", "description", "strict")}
    return {"type": "function", "function": function | {"parameters": tool.input_schema}}


class _Blocks:
    """Writes an answer as Anthropic's message: as a whole, or block by block."""

    def __init__(
        self, state: ApiState, app: str, model: str | None, edits: list[dict[str, Any]] | None
    ) -> None:
        facts = state.backend.facts()
        self._seals, self._app, self._model = state.seals, app, model or facts.name
        self._window_tokens = facts.window_tokens
        self.edits = {} if edits is None else {"context_management": {"applied_edits": edits}}

    def message(self, choice: Choice) -> dict[str, Any]:
        """The message without its content."""
        return {
            "id": new_id("msg_"), "type": "message", "role": "assistant", "model": self._model, "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": _usage(choice),
        }  # fmt: skip

    def whole(self, part: AnswerPart) -> dict[str, Any] | None:
        """The block of a part; None for a call that was cut, whose input is no object."""
        if part.kind == "text":
            return {"type": "text", "text": part.text}
        if part.kind == "reasoning":
            return {"type": "thinking", "thinking": part.text, "signature": self._signature(part.text)}
        if not part.whole:
            return None
        given = msgspec.json.decode(part.text or "{}")
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": given}

    def stop(self, choice: Choice) -> dict[str, Any]:
        """Why the answer ended."""
        start, end = choice.started, choice.ended
        assert start is not None
        assert end is not None
        reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
        if start.prompt_tokens + end.tokens >= self._window_tokens:
            reasons["length"] = "model_context_window_exceeded"
        usual = "end_turn" if end.stop_string is None else "stop_sequence"
        return {"stop_reason": reasons.get(choice.finish_reason, usual), "stop_sequence": end.stop_string}

    def _signature(self, text: str) -> str:
        return self._seals.signature(self._app, text)

    async def frames(self, news: AsyncIterator[Choice]) -> AsyncGenerator[bytes, None]:
        """The events of an answer."""
        choice, block, opened, thought = None, 0, "", list[str]()

        def close() -> Iterator[bytes]:
            nonlocal opened, block
            if opened == "thinking":
                yield delta(type="signature_delta", signature=self._signature("".join(thought)))
                thought.clear()
            if opened:
                yield _event("content_block_stop", index=block)
                block += 1
            opened = ""

        def begin(kind: str, **fields: Any) -> Iterator[bytes]:
            nonlocal opened
            if opened != kind:
                yield from close()
                opened = kind
                yield _event("content_block_start", index=block, content_block={"type": kind, **fields})

        def delta(**fields: Any) -> bytes:
            return _event("content_block_delta", index=block, delta=fields)

        def written(part: Part) -> Iterator[bytes]:
            match part:
                case Text():
                    yield from begin("text", text="")
                    yield delta(type="text_delta", text=part.text)
                case Thinking():
                    yield from begin("thinking", thinking="", signature="")
                    thought.append(part.text)
                    yield delta(type="thinking_delta", thinking=part.text)
                case CallBegins():
                    yield from close()
                    yield from begin("tool_use", id=part.id, name=part.name, input={})
                case CallArguments():
                    yield delta(type="input_json_delta", partial_json=part.text)
                case CallEnds():
                    yield from close()

        async for each in news:
            if choice is None:
                choice = each
                yield _event("message_start", message=self.message(choice))
            for part in choice.new:
                for frame in written(part):
                    yield frame
        for frame in close():
            yield frame
        assert choice is not None
        more = {"usage": _usage(choice), "jaxllm": choice.facts(), **self.edits}
        yield _event("message_delta", delta=self.stop(choice), **more)
        yield _event("message_stop")


def _event(kind: str, **fields: Any) -> bytes:
    return event_frame({"type": kind, **fields}, kind)


def _usage(choice: Choice) -> dict[str, Any]:
    start = choice.started
    assert start is not None
    return {
        "input_tokens": start.prompt_tokens - start.reused_tokens,
        "cache_read_input_tokens": start.reused_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": 0 if choice.ended is None else choice.ended.tokens,
    }
