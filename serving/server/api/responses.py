"""Serves OpenAI's /v1/responses: bodies, routes, and events of streamed answers."""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from jaxllm.errors import ContextOverflow, JaxllmError
from jaxllm.serving.guided.grammar import Grammar
from jaxllm.serving.server.api.answers import (
    Answer,
    AnswerParams,
    answer_of,
    context_of,
    prompt_ids_of,
    reasoning_in,
    sampling_of,
)
from jaxllm.serving.server.api.choices import Choice
from jaxllm.serving.server.api.dialect import convert, ignore
from jaxllm.serving.server.api.errors import ApiError, openai_body
from jaxllm.serving.server.api.fields import RESPONSE, ResponseBody, TextFormat
from jaxllm.serving.server.api.grammars import format_grammar
from jaxllm.serving.server.api.logprobs import LoggedText, chat_logprobs, requested_logprobs
from jaxllm.serving.server.api.messages import conversation_of, items_of, output_text, require_calls
from jaxllm.serving.server.api.reasoning import Switch
from jaxllm.serving.server.api.requests import ApiRequest, ApiState, event_frame, new_id, now_s
from jaxllm.serving.server.api.stored_responses import StoredResponse
from jaxllm.serving.server.api.tool_use import (
    ToolFunction,
    ToolUse,
    openai_choice,
    require_function,
    tools_of,
)
from jaxllm.serving.server.calls import Conversation
from jaxllm.text.answer_parts import CallArguments, CallBegins, CallEnds, Part, Text, Thinking

_log = logging.getLogger(__name__)
LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"


class FunctionTool(ToolFunction, kw_only=True):
    """A tool in OpenAI's responses format."""

    type: str


def _with_logprobs(body: ResponseBody) -> bool:
    return LOGPROBS in (body.include or ())


# Tools that OpenAI's service runs itself.
_HOSTED = {
    "code_interpreter", "file_search", "image_generation", "tool_search", "web_search",
    "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
}  # fmt: skip


def _function(value: Any, at: str, namespace: str = "") -> dict[str, Any]:
    """A tool in OpenAI's chat format; a namespace is a part of its name."""
    require_function(value, at)
    function = msgspec.structs.asdict(convert(value, FunctionTool, at))
    return {"type": function.pop("type"), "function": function | {"name": namespace + function["name"]}}


def use_of(body: ResponseBody) -> tuple[ToolUse, Grammar | None]:
    """The effect of tools and the text's format on the call: tools, and the grammar of the text. Raises
    ApiError if a field is malformed or not supported, or fields exclude each other."""
    if body.previous_response_id is not None and body.conversation is not None:
        raise ApiError(
            "previous_response_id and conversation exclude each other; send one",
            code="mutually_exclusive_parameters",
            param="previous_response_id",
        )
    for each in body.include or ():
        if each not in (LOGPROBS, SEALED):
            # More of tools that this service does not run.
            ignore(f"include.{each}")
    tools: list[Any] = []
    for index, value in enumerate(body.tools or ()):
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind in _HOSTED:
            # A tool that only OpenAI's service runs: the model is not told of it.
            ignore(f"tools[{index}].{kind}")
        elif kind == "namespace":
            inner = value.get("tools")
            for place, each in enumerate(inner if isinstance(inner, list) else ()):
                tools.append(_function(each, f"tools[{index}].tools[{place}]", f"{value.get('name')}."))
        else:
            tools.append(_function(value, f"tools[{index}]"))
    use = tools_of(tools, openai_choice(body.tool_choice, body.parallel_tool_calls))
    form = body.text.format or TextFormat()
    if form.type == "json_schema" and not form.name:
        raise ApiError("text.format of the type json_schema needs a name", param="text.format.name")
    grammar = format_grammar(form.type, form.schema, "text.format")
    if use.tools and _with_logprobs(body):
        # Tokens of calls are not part of the text, and cannot be told apart.
        raise ApiError(f"tools cannot be combined with {LOGPROBS}", param="include")
    return use, grammar


# Settings that a response object has as they were sent.
_SETTINGS = (
    "instructions", "previous_response_id", "store", "max_output_tokens", "prompt_cache_key",
    "safety_identifier", "user",
)  # fmt: skip


def settings_of(body: ResponseBody, model: str, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The request's settings in a response object; `sampling`: see `sampling_of`."""
    form = body.text.format or TextFormat()
    schema = {name: getattr(form, name) for name in ("name", "schema", "strict", "description")}
    settings = {name: getattr(body, name) for name in _SETTINGS} | {
        "model": model, "background": body.background, "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {name: getattr(body.reasoning, name) for name in ("effort", "summary")},
        "temperature": sampling["temperature"],
        "text": {"format": {"type": form.type} | (schema if form.type == "json_schema" else {})},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice, "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0, "top_p": sampling.get("top_p", 1.0),
        "truncation": body.truncation,
    }  # fmt: skip
    return settings | ({} if body.service_tier is None else {"service_tier": body.service_tier})


# Type and fields of an event; the sender numbers it.
_Fields = tuple[str, dict[str, Any]]


_MAX_LISTED, _LISTED = 100, 20


async def create(state: ApiState, request: ApiRequest) -> Response | dict[str, Any]:
    """Makes a response, as a whole or as server-sent events."""
    body = state.body(request, RESPONSE)
    facts, _ = state.model(body.model)
    use, grammar = use_of(body)
    reasoning = reasoning_in(
        state, body,
        Switch("effort", body.reasoning.effort, "reasoning.effort"),
        Switch("budget", body.reasoning.max_tokens, "reasoning.max_tokens"),
    )  # fmt: skip
    items, messages, context, context_tokens = await _history(state, request, body)
    if body.background and (body.stream or not body.store):
        message = "background can only be used when `store` is true, and stream is not: it is polled"
        raise ApiError(message, param="background")
    prompt = await state.conversation(request.app, messages, use.tools, template_options=reasoning.options)
    if body.truncation == "auto":
        if context:
            raise ApiError("a context is not truncated; leave truncation out", param="truncation")
        prompt = await _fitting(state, prompt, body.max_output_tokens)
    params = AnswerParams(
        max_tokens=body.max_output_tokens,
        use=use,
        reasoning=reasoning,
        grammar=grammar,
        top_logprobs=requested_logprobs(
            body.top_logprobs, _with_logprobs(body), f"include to have {LOGPROBS}"
        ),
        context=context,
        context_tokens=context_tokens,
    )
    answer = await answer_of(state, request, body, (prompt,), params)
    writer = ResponseWriter(state, answer, body, items, body.model or facts.name)
    if body.background:
        return state.background.start(request.app, writer)
    return await (answer.streamed(writer.frames, writer.failed) if body.stream else writer.whole())


async def count_tokens(state: ApiState, request: ApiRequest) -> dict[str, Any]:
    """Counts the tokens of a response's prompt."""
    body = state.body(request, RESPONSE)
    state.model(body.model)
    use, _ = use_of(body)
    _, messages, context, _ = await _history(state, request, body)
    if context:
        raise ApiError("the tokens of a context are its own; leave it out", param="conversation")
    prompt = await state.conversation(request.app, messages, use.tools)
    return {"object": "response.input_tokens", "input_tokens": len(await prompt_ids_of(state, prompt))}


async def get(state: ApiState, request: ApiRequest) -> Response | dict[str, Any]:
    """Returns a stored response, or one that runs in the background."""
    _query(request, {"stream": ("false",), **_INCLUDE})
    running = state.background.response(request.app, request.path["name"])
    if running is not None:
        return running
    return Response(bytes((await _stored(state, request)).response), media_type="application/json")


async def delete(state: ApiState, request: ApiRequest) -> dict[str, Any]:
    """Deletes a stored response."""
    await state.background.cancel(request.app, request.path["name"])
    await asyncio.to_thread(state.responses.delete, request.app, request.path["name"])
    return {"id": request.path["name"], "object": "response", "deleted": True}


async def cancel(state: ApiState, request: ApiRequest) -> Response:
    """Cancels a response that runs in the background; one that has ended stays as it is."""
    await state.background.cancel(request.app, request.path["name"])
    stored = await _stored(state, request)
    if not msgspec.json.decode(stored.response)["background"]:
        raise ApiError("Cannot cancel a synchronous response: only those made in the background")
    return Response(bytes(stored.response), media_type="application/json")


async def _fitting(state: ApiState, prompt: Conversation, most: int | None) -> Conversation:
    """A conversation without its oldest turns, as many as must go so that it fits the window with its answer.
    Instructions stay, and the last turn."""
    window, messages = state.backend.facts().window_tokens, prompt.messages
    room = window - min(window // 2, state.max_tokens if most is None else most)
    first = next((index for index, each in enumerate(messages) if each["role"] != "system"), 0)
    # Turns begin with a user's message, so that no result of a tool loses its call.
    starts = [index for index in range(first, len(messages)) if messages[index]["role"] == "user"]
    if prompt.images or not starts:
        return prompt

    def without(start: int) -> Conversation:
        return dataclasses.replace(prompt, messages=(*messages[:first], *messages[start:]))

    async def fits(conversation: Conversation) -> bool:
        try:
            return len(await prompt_ids_of(state, conversation)) <= room
        except ContextOverflow:
            return False

    if await fits(prompt):
        return prompt
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(without(starts[middle])) else (middle + 1, high)
    return without(starts[low])


async def input_items(state: ApiState, request: ApiRequest) -> dict[str, Any]:
    """The conversation before a response, in pages, newest first by default."""
    query = _query(request, {"limit": None, "order": ("asc", "desc"), "after": None, **_INCLUDE})
    stored = await _stored(state, request)
    limit = query.get("limit", str(_LISTED))
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= _MAX_LISTED):
        raise ApiError(f"limit is 1 to {_MAX_LISTED}, got {limit!r:.40}", param="limit")
    items = msgspec.json.decode(stored.items)
    if query.get("order") != "asc":
        items.reverse()
    first = 0
    if "after" in query:
        places = {item["id"]: place for place, item in enumerate(items)}
        if query["after"] not in places:
            raise ApiError(f"no item has the id {query['after']!r:.80}", param="after")
        first = places[query["after"]] + 1
    page = items[first : first + int(limit)]
    return {
        "object": "list", "data": page, "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "", "has_more": first + len(page) < len(items),
    }  # fmt: skip


async def _stored(state: ApiState, request: ApiRequest) -> StoredResponse:
    return await asyncio.to_thread(state.responses.get, request.app, request.path["name"])


class ResponseWriter:
    """A response while it is generated, as a whole or as events, and then stored: messages and calls of
    functions, in the order of the answer."""

    def __init__(
        self, state: ApiState, answer: Answer, body: ResponseBody, items: Sequence[dict[str, Any]], model: str
    ) -> None:
        self._state, self._answer, self._body, self._items, self._model = state, answer, body, items, model
        self.id, self._created_s, self._numbers = new_id("resp_"), now_s(), itertools.count()
        self._sampling, self._logged = sampling_of(state, body), LoggedText(state)
        # Of reasoning: type of its part, and beginnings of its events.
        self._kind, self._word, self._place = (
            ("summary_text", "reasoning_summary_text", "reasoning_summary")
            if body.reasoning.summarized
            else ("reasoning_text", "reasoning_text", "content")
        )
        # Complete items, and the current one with the pieces of its text: a message, reasoning or a call.
        self._output: list[dict[str, Any]] = []
        self._item: dict[str, Any] = {}
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    async def whole(self) -> dict[str, Any]:
        """Waits for the end of the answer; returns the response."""
        async with contextlib.aclosing(self._answer.news()) as news:
            async for choice in news:
                await self._take(choice)
        return await self._ended()

    def so_far(self) -> dict[str, Any]:
        """The response while it is generated."""
        return self.response("in_progress" if self._answer.choices[0].started is not None else "queued")

    async def frames(self, news: AsyncIterator[Choice]) -> AsyncGenerator[bytes, None]:
        """The events of an answer."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self.response("in_progress"))
        async for choice in news:
            for kind, fields in await self._take(choice):
                yield self._event(f"response.{kind}", **fields)
        response = await self._ended()
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        """The events of an error."""
        body = openai_body(error)["error"]
        event = self._event("error", message=body["message"], code=body["code"], param=body["param"])
        return event + self._event("response.failed", response=self.failure(error))

    def failure(self, error: ApiError) -> dict[str, Any]:
        """The response after an error, with the only code of OpenAI's that fits every failure."""
        failed = {"error": {"code": "server_error", "message": str(error)}}
        return self.response("failed") | failed

    async def _take(self, choice: Choice) -> list[_Fields]:
        """Adds the news of the answer; returns their events."""
        events: list[_Fields] = []
        logprobs = chat_logprobs(await self._logged.take(choice)) if _with_logprobs(self._body) else []
        for part in choice.new:
            events += self._written(part)
        if logprobs:
            # With the last text of the event, or by themselves: their text may have come before.
            at = max((i for i, (kind, _) in enumerate(events) if kind == "output_text.delta"), default=None)
            if at is None:
                events += [*self._begin("message"), self._text_delta("")]
                at = len(events) - 1
            events[at][1]["logprobs"] = logprobs
            self._logprobs += logprobs
        if choice.ended is not None:
            # An answer without any item is an empty message.
            events += () if self._output or self._item else self._begin("message")
            cut = self._item.get("type") == "function_call"
            events += self._close("incomplete" if cut else _status(choice.finish_reason))
        return events

    def _written(self, part: Part) -> Iterator[_Fields]:
        match part:
            case Text():
                yield from self._begin("message")
                self._texts.append(part.text)
                yield self._text_delta(part.text)
            case Thinking():
                yield from self._begin("reasoning")
                self._texts.append(part.text)
                yield self._at(f"{self._word}.delta", delta=part.text)
            case CallBegins():
                yield from self._close("completed")
                yield from self._begin(
                    "function_call", call_id=part.id, arguments="", **self._named(part.name)
                )
            case CallArguments():
                self._texts.append(part.text)
                yield self._at("function_call_arguments.delta", delta=part.text)
            case CallEnds():
                yield from self._close("completed")

    def _named(self, name: str) -> dict[str, str]:
        """The fields of a function's name, with its namespace if it has one."""
        spaces = (each.get("name") for each in self._body.tools or () if each.get("type") == "namespace")
        space = next((each for each in spaces if name.startswith(f"{each}.")), None)
        return {"name": name} if space is None else {"name": name[len(space) + 1 :], "namespace": space}

    def _begin(self, kind: str, **fields: Any) -> Iterator[_Fields]:
        """Begins an item, unless it goes on."""
        if self._item.get("type") == kind:
            return
        yield from self._close("completed")
        prefix = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[kind]
        item = {"id": new_id(prefix), "type": kind, "status": "in_progress", **fields}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": []}
        self._item = item
        yield "output_item.added", {"output_index": len(self._output), "item": dict(item)}
        if kind == "message":
            yield self._at("content_part.added", part=output_text(""))
        elif kind == "reasoning":
            yield self._at(f"{self._place}_part.added", part={"type": self._kind, "text": ""})

    def _close(self, status: str) -> Iterator[_Fields]:
        """Ends the current item, if there is one."""
        item, text = self._item, "".join(self._texts)
        if not item:
            return
        item["status"] = status
        if item["type"] == "message":
            part = output_text(text, self._logprobs)
            yield self._at("output_text.done", text=text, logprobs=self._logprobs)
            yield self._at("content_part.done", part=part)
            item["content"] = [part]
        elif item["type"] == "reasoning":
            part = {"type": self._kind, "text": text}
            yield self._at(f"{self._word}.done", text=text)
            yield self._at(f"{self._place}_part.done", part=part)
            item["summary" if self._body.reasoning.summarized else "content"] = [part]
            if SEALED in (self._body.include or ()):
                app = self._answer.choices[0].job.call.app
                item["encrypted_content"] = self._state.seals.sealed(app, text)
        else:
            item["arguments"] = text
            if status == "completed":
                yield self._at("function_call_arguments.done", arguments=text, name=item["name"])
        yield "output_item.done", {"output_index": len(self._output), "item": item}
        self._output.append(item)
        self._item, self._texts, self._logprobs = {}, [], []

    def _text_delta(self, text: str) -> _Fields:
        return self._at("output_text.delta", delta=text, logprobs=[])

    def _at(self, kind: str, **fields: Any) -> _Fields:
        """An event of the current item."""
        at: dict[str, Any] = {"item_id": self._item["id"], "output_index": len(self._output)}
        if self._item["type"] == "reasoning" and self._body.reasoning.summarized:
            at["summary_index"] = 0
        elif self._item["type"] != "function_call":
            at["content_index"] = 0
        return kind, at | fields

    def _event(self, kind: str, **fields: Any) -> bytes:
        return event_frame({"type": kind, "sequence_number": next(self._numbers), **fields}, kind)

    async def _ended(self) -> dict[str, Any]:
        (choice,) = self._answer.choices
        return await self.stored(self.response(_status(choice.finish_reason)))

    async def stored(self, response: dict[str, Any]) -> dict[str, Any]:
        """A response, after it was stored if requested."""
        (choice,) = self._answer.choices
        if self._body.store:
            raw, items = (msgspec.Raw(msgspec.json.encode(each)) for each in (response, self._items))
            context, tokens = (choice.ended.context, choice.ended.context_tokens) if choice.ended else ("", 0)
            stored = StoredResponse(
                id=self.id, response=raw, items=items, context=context, context_tokens=tokens
            )
            keep = functools.partial(self._state.responses.keep, choice.job.call.app, stored)
            try:
                response["store"] = await asyncio.to_thread(keep)
            except (JaxllmError, OSError) as error:
                response["store"] = False
                _log.error("a response could not be stored: %s", error)
        return response

    def response(self, status: str) -> dict[str, Any]:
        """The response object so far."""
        (choice,) = self._answer.choices
        context = choice.ended.context if choice.ended else choice.job.call.context
        prompt, cached, written = self._answer.usage()
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": self._answer.reasoning_tokens},
            "total_tokens": prompt + written,
        }
        return {
            "id": self.id, "object": "response", "created_at": self._created_s,
            "completed_at": now_s() if status == "completed" else None, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **settings_of(self._body, self._model, self._sampling),
            "conversation": {"id": context} if context else None, "output": list(self._output),
            "usage": usage if choice.ended else None, "jaxllm": self._answer.facts(),
        }  # fmt: skip


async def _history(
    state: ApiState, request: ApiRequest, body: ResponseBody
) -> tuple[Sequence[dict[str, Any]], tuple[dict[str, Any], ...], str, int | None]:
    """The conversation that a response answers: all known items, oldest first; the messages of the call, with
    a context those that it lacks; and the `context` and `context_tokens` of the call."""
    instructions, app = body.instructions or "", request.app
    new = items_of(body.input, functools.partial(state.seals.opened, app))
    previous = None
    if (name := body.previous_response_id) is not None:
        previous = await asyncio.to_thread(state.responses.get, app, name, param="previous_response_id")
    items = [*(previous.said() if previous else ()), *new]
    context = previous.context if previous else context_of(body.conversation)
    if not context:
        require_calls(items)
        return items, conversation_of(items, instructions), "", None
    # The backend answers between two dispatches: ask only if necessary.
    if instructions:
        found = None if previous else await state.backend.contexts(app, lambda each: each.found(app, context))
        if found is None or found.tokens:
            raise ApiError(
                "the conversation has begun, and its first instructions stay; leave instructions out",
                param="instructions",
            )
    # If nothing came after the previous response, its context continues, else a fork: the engine decides,
    # because others may continue it at the same time.
    tokens = previous.context_tokens if previous else None
    return items, conversation_of(new, instructions), context, tokens


def _status(finish_reason: str) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


_INCLUDE = {"include": (LOGPROBS,), "include[]": (LOGPROBS,)}


def _query(request: ApiRequest, known: dict[str, Collection[str] | None]) -> dict[str, str]:
    """Parses the query of a path, with the allowed values of each parameter, None for any."""
    for name, value in request.query:
        if name not in known:
            raise ApiError(f"the query has {name!r:.80}, which is not supported", param=name[:80])
        values = known[name]
        if values is not None and value not in values:
            raise ApiError(f"{name} is {' or '.join(values)}, got {value!r:.80}", param=name)
    return dict(request.query)
