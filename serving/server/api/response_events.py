"""Builds a response's output from what is new of an answer, and tells each change as an event."""

from collections.abc import Iterator, Sequence
from typing import Any

from serving.server.api.front import new_id
from serving.server.api.response_items import output_text
from serving.server.api.tools.scanner import ToolCall

# Type and fields of an event; those who send it number it.
Told = tuple[str, dict[str, Any]]


class Output:
    """The items of a response: messages and calls of functions, in the order of the answer.

    Attributes:
      items: those that are whole.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._message_id = ""
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def text(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Told]:
        """Adds text, and what is told of its tokens."""
        if not self._message_id:
            yield from self._open()
        self._texts.append(text)
        self._logprobs += logprobs
        yield self._part("output_text.delta", delta=text, logprobs=logprobs)

    def call(self, call: ToolCall) -> Iterator[Told]:
        """Adds a call of a function, which ends a message before it."""
        yield from self.close("completed")
        item = {"id": new_id("fc_"), "type": "function_call", "call_id": call.id, "name": call.name}
        at = {"item_id": item["id"], "output_index": len(self.items)}
        yield self._item("added", item | {"status": "in_progress", "arguments": ""})
        yield "function_call_arguments.delta", at | {"delta": call.arguments}
        yield "function_call_arguments.done", at | {"arguments": call.arguments}
        yield from self._whole(item | {"status": "completed", "arguments": call.arguments})

    def end(self, status: str) -> Iterator[Told]:
        """Ends the last item; an answer without any is an empty message."""
        if not self.items and not self._message_id:
            yield from self._open()
        yield from self.close(status)

    def close(self, status: str) -> Iterator[Told]:
        """Ends a message that has begun, if there is one."""
        if not self._message_id:
            return
        text = "".join(self._texts)
        part = output_text(text, self._logprobs)
        yield self._part("output_text.done", text=text, logprobs=self._logprobs)
        yield self._part("content_part.done", part=part)
        item = self._message(status) | {"content": [part]}
        self._message_id, self._texts, self._logprobs = "", [], []
        yield from self._whole(item)

    def _open(self) -> Iterator[Told]:
        self._message_id = new_id("msg_")
        yield self._item("added", self._message("in_progress"))
        yield self._part("content_part.added", part=output_text(""))

    def _message(self, status: str) -> dict[str, Any]:
        return {
            "id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": [],
        }  # fmt: skip

    def _part(self, kind: str, **fields: Any) -> Told:
        at = {"item_id": self._message_id, "output_index": len(self.items), "content_index": 0}
        return kind, at | fields

    def _item(self, kind: str, item: dict[str, Any]) -> Told:
        return f"output_item.{kind}", {"output_index": len(self.items), "item": item}

    def _whole(self, item: dict[str, Any]) -> Iterator[Told]:
        yield self._item("done", item)
        self.items.append(item)
