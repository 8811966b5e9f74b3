"""Answers OpenAI's /v1/responses: makes, continues, tells and deletes responses."""

import dataclasses
import itertools
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from serving.server.api.answering import Answer, Delta, first_delta
from serving.server.api.asking import Asked, calls_of, config_of, context_of
from serving.server.api.errors import ApiError, api_error, openai_body
from serving.server.api.front import Front, Visit, new_id, now_s
from serving.server.api.logprobs import chat_logprobs
from serving.server.api.response_bodies import LOGPROBS, NEUTRAL, ResponseBody, check, told_back, use_of
from serving.server.api.response_events import Output, Told
from serving.server.api.response_items import conversation_of, items_of, require_calls
from serving.server.api.response_store import StoredResponse
from serving.server.api.streams import Streamed, event_frame, json_response
from serving.server.calls import Call

_MAX_LISTED, _LISTED = 100, 20


async def create(front: Front, visit: Visit) -> Response:
    """Makes a response, whole or as server-sent events."""
    body = front.body(visit, ResponseBody, NEUTRAL)
    facts, adapter = front.model(body.model)
    check(body)
    use, grammar = use_of(body, facts.chat_template)
    history = await _history(front, visit, body)
    asked = Asked(
        prompts=(await front.conversation(visit.app, history.messages, use.tools),),
        config=config_of(front, body, max_tokens=body.max_output_tokens),
        grammar=grammar,
        scanner=use.scanner,
        top_logprobs=(body.top_logprobs or 0) if body.with_logprobs else None,
    )
    (call,) = calls_of(front, visit, asked, body, adapter=adapter, tier=body.service_tier)
    call = dataclasses.replace(call, context=history.context, context_tokens=history.context_tokens)
    answer = Answer.open(front.backend, [call], use.scanner)
    written = _Written(front, call, answer, body, history.items, body.model or facts.name)
    if body.stream:
        frames = written.frames(await first_delta(answer))
        return Streamed(frames, answer.close, "text/event-stream", front.options.write_s)
    return json_response(await written.whole())


async def get(front: Front, visit: Visit) -> Response:
    """A response that was stored."""
    _query(visit, {"stream": ("false",), **_INCLUDE})
    return Response(
        front.responses.get(visit.app, visit.path["name"]).response, media_type="application/json"
    )


async def delete(front: Front, visit: Visit) -> Response:
    """Forgets a response."""
    front.responses.delete(visit.app, visit.path["name"])
    return json_response({"id": visit.path["name"], "object": "response", "deleted": True})


async def cancel(front: Front, visit: Visit) -> Response:
    """Refuses: no response is made in the background."""
    front.responses.get(visit.app, visit.path["name"])
    raise ApiError("only responses made in the background can be cancelled; close the connection instead")


async def input_items(front: Front, visit: Visit) -> Response:
    """What was said before a response, a page at a time, the newest first where nothing else is asked for."""
    query = _query(visit, {"limit": None, "order": ("asc", "desc"), "after": None, **_INCLUDE})
    stored = front.responses.get(visit.app, visit.path["name"])
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
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else "",
            "last_id": page[-1]["id"] if page else "",
            "has_more": first + len(page) < len(items),
        }
    )


@dataclasses.dataclass
class _Written:
    """A response as it is written, whole or in events, and then stored."""

    front: Front
    call: Call
    answer: Answer
    body: ResponseBody
    items: Sequence[dict[str, Any]]
    model: str

    def __post_init__(self) -> None:
        self.output = Output()
        self.id, self.created_s = new_id("resp_"), now_s()

    async def whole(self) -> dict[str, Any]:
        async for delta in self.answer.deltas():
            await self.take(delta)
        return self.ended()

    async def frames(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[bytes, None]:
        numbers = itertools.count()

        def event(kind: str, **fields: Any) -> bytes:
            return event_frame({"type": kind, "sequence_number": next(numbers), **fields}, kind)

        try:
            for kind in ("response.created", "response.in_progress"):
                yield event(kind, response=self.response("in_progress"))
            async for delta in deltas:
                for kind, fields in await self.take(delta):
                    yield event(f"response.{kind}", **fields)
            response = self.ended()
            yield event(f"response.{response['status']}", response=response)
        except Exception as error:  # The status is sent already, so that events must tell of it.
            told = openai_body(api_error(error))["error"]
            yield event("error", message=told["message"], code=told["code"], param=told["param"])
            # Of OpenAI's codes here, none other is true of every failure.
            failed = {"error": {"code": "server_error", "message": told["message"]}}
            yield event("response.failed", response=self.response("failed") | failed)
        finally:
            await deltas.aclose()

    async def take(self, delta: Delta) -> list[Told]:
        told: list[Told] = []
        logprobs = []
        if delta.logprobs and self.body.with_logprobs:
            logprobs = [
                _listed(each) for each in (await chat_logprobs(self.front, delta.logprobs))["content"]
            ]
        if delta.text or logprobs:
            told += self.output.text(delta.text, logprobs)
        for call in delta.tool_calls:
            told += self.output.call(call)
        if delta.ended is not None:
            told += self.output.end(_status(delta.ended.finish_reason))
        return told

    def ended(self) -> dict[str, Any]:
        """The whole response, stored where that was asked for."""
        end = self.answer.choices[0].ended
        assert end is not None
        response = self.response(_status(end.finish_reason))
        if self.body.store:
            stored = StoredResponse(
                id=self.id,
                response=msgspec.json.encode(response),
                items=msgspec.json.encode(self.items),
                context=end.context,
                context_tokens=end.context_tokens,
            )
            response["store"] = self.front.responses.keep(self.call.app, stored)
        return response

    def response(self, status: str) -> dict[str, Any]:
        """The response object as far as it has come."""
        choice = self.answer.choices[0]
        context = choice.ended.context if choice.ended else self.call.context
        prompt, cached, written = self.answer.usage()
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + written,
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_s,
            "completed_at": now_s() if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **told_back(self.body, self.model, self.front.options),
            "conversation": {"id": context} if context else None,
            "output": list(self.output.items),
            "usage": usage if choice.ended else None,
            "jaxllm": self.answer.facts(),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class _History:
    """The conversation that a response answers.

    Attributes:
      items: all of it that is known here, oldest first.
      messages: for the call; where there is a context, those that it lacks.
      context, context_tokens: see `Call`.
    """

    items: Sequence[dict[str, Any]]
    messages: tuple[dict[str, Any], ...]
    context: str = ""
    context_tokens: int | None = None


async def _history(front: Front, visit: Visit, body: ResponseBody) -> _History:
    new, instructions = items_of(body.input), body.instructions or ""
    previous = None
    if body.previous_response_id is not None:
        previous = front.responses.get(visit.app, body.previous_response_id, param="previous_response_id")
    items = [*(previous.said() if previous else ()), *new]
    context = previous.context if previous else context_of(body.conversation)
    if not context:
        require_calls(items)
        return _History(items=items, messages=conversation_of(items, instructions))
    # The backend looks between two dispatches, so that turns that need not know do not wait.
    if instructions and (previous or await _tokens_of(front, visit.app, context)):
        raise ApiError(
            "the conversation has begun, and its first instructions stay; leave instructions out",
            param="instructions",
        )
    return _History(
        items=items,
        messages=conversation_of(new, instructions),
        context=context,
        # Where nothing came after the previous response its context goes on, else a fork: the engine decides,
        # because others may continue it at the same time.
        context_tokens=previous.context_tokens if previous else None,
    )


async def _tokens_of(front: Front, app: str, context: str) -> int:
    """The number of tokens of a context; 0 where there is none, which the backend refuses."""
    return next((each.tokens for each in await front.backend.contexts(app) if each.name == context), 0)


def _status(finish_reason: str) -> str:
    return "incomplete" if finish_reason == "length" else "completed"


def _listed(logprob: dict[str, Any]) -> dict[str, Any]:
    """A token's log-probability, whose bytes are a list always; of part of a character they are not known."""
    top = [each | {"bytes": each["bytes"] or []} for each in logprob["top_logprobs"]]
    return logprob | {"bytes": logprob["bytes"] or [], "top_logprobs": top}


_INCLUDE = {"include": (LOGPROBS,), "include[]": (LOGPROBS,)}


def _query(visit: Visit, known: dict[str, Collection[str] | None]) -> dict[str, str]:
    """The query of a path, whose parameters have these values, or any where there are none.

    Raises:
      ApiError: a parameter is not known, or has another value.
    """
    for name, value in visit.query:
        if name not in known:
            raise ApiError(f"the query has {name!r:.80}, which is not supported", param=name[:80])
        values = known[name]
        if values is not None and value not in values:
            raise ApiError(f"{name} is {' or '.join(values)}, got {value!r:.80}", param=name)
    return dict(visit.query)
