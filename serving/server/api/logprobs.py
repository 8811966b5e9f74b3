"""Writes log-probabilities of answers' and texts' tokens in OpenAI's formats of chats and completions."""

import codecs
import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxllm.serving.engine.decoding import TokenLogprob
from jaxllm.serving.server.api.choices import Choice
from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.api.requests import ApiState

# JSON has no infinity; OpenAI's value for impossible tokens.
_LEAST = -9999.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggedToken:
    """A token of an answer's text.

    Attributes:
      token: its id and log-probability, and those of the most likely tokens.
      data: bytes of its text.
      top: bytes of the texts of the most likely tokens.
      offset: number of characters of the answer's text before it, or before the character that it is part of.
    """

    token: TokenLogprob
    data: bytes
    top: Sequence[bytes]
    offset: int


class LoggedText:
    """The tokens of one answer whose text is shown: possible beginnings of stop strings are withheld, and
    tokens from a stop string on are not part of the text."""

    def __init__(self, state: ApiState) -> None:
        self._backend = state.backend
        self._waiting: collections.deque[LoggedToken] = collections.deque()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begins, self._characters = True, 0

    async def take(self, choice: Choice, *, whole: bool = False) -> list[LoggedToken]:
        """Adds the news of an answer, or all of it, and returns the tokens whose text is shown now."""
        for each in choice.logprobs if whole else choice.new_logprobs:
            ids = [each.token, *(token for token, _ in each.top)]
            data, *top = await self._backend.token_bytes(ids, begins=self._begins)
            self._begins = False
            self._waiting.append(LoggedToken(token=each, data=data, top=top, offset=self._characters))
            self._characters += len(self._decoder.decode(data))
        end, shown = choice.ended, []
        all_shown = end is not None and end.stop_string is None
        while self._waiting and (all_shown or self._waiting[0].offset < choice.characters):
            shown.append(self._waiting.popleft())
        if end is not None:
            self._waiting.clear()
        return shown


def chat_logprobs(tokens: Sequence[LoggedToken]) -> list[dict[str, Any]]:
    """The entries of tokens in chats and responses: at most as many likely tokens as were requested."""
    return [
        _entry(each.data, each.token.logprob)
        | {"top_logprobs": [_entry(data, value) for _, data, value in _top(each)]}
        for each in tokens
    ]


def completion_logprobs(tokens: Sequence[LoggedToken]) -> dict[str, Any]:
    """`logprobs` of a completion's choice. The sampled token is always included; a token with the text of a
    likelier one is named by its id, because texts are the keys."""
    logprobs: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each in tokens:
        top, found = dict[str, float](), _top(each)
        if all(token != each.token.token for token, _, _ in found):
            found.append((each.token.token, each.data, each.token.logprob))
        for token, data, value in found:
            name = text_of(data)
            top[f"token_id:{token}" if name in top else name] = finite(value)
        logprobs["tokens"].append(text_of(each.data))
        logprobs["token_logprobs"].append(finite(each.token.logprob))
        logprobs["top_logprobs"].append(top)
        logprobs["text_offset"].append(each.offset)
    return logprobs


def _top(each: LoggedToken) -> list[tuple[int, bytes, float]]:
    """Ids, bytes and log-probabilities of the most likely tokens."""
    return [(id_, data, value) for (id_, value), data in zip(each.token.top, each.top, strict=True)]


def _entry(data: bytes, value: float) -> dict[str, Any]:
    return {"token": data.decode(errors="replace"), "logprob": finite(value), "bytes": list(data)}


def text_of(data: bytes) -> str:
    """The text of a token; for a part of a character its bytes, in OpenAI's format."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(rf"\x{byte:02x}" for byte in data)


def finite(value: float) -> float:
    """A log-probability in JSON."""
    return value if math.isfinite(value) else _LEAST


def requested_logprobs(top: int | None, requested: bool, needed: str) -> int | None:
    """The number of most likely tokens to return log-probabilities of; None for none. Raises ApiError if none
    are requested. `needed` says how they are requested, for the error."""
    if top and not requested:
        raise ApiError(f"top_logprobs requires {needed}", param="top_logprobs")
    return (top or 0) if requested else None
