"""Scores given texts: log-probabilities of prompts in OpenAI's and vLLM's formats, and `/v1/score`.

A text is computed in the background, chunk by chunk (see `Backend.score`); answers continue meanwhile.
"""

import codecs
import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from jaxllm.serving.engine.decoding import TokenLogprob
from jaxllm.serving.server.api.errors import ApiError
from jaxllm.serving.server.api.fields import TopLogprobs
from jaxllm.serving.server.api.logprobs import LoggedToken, completion_logprobs, finite, text_of
from jaxllm.serving.server.api.requests import ApiRequest, ApiState
from jaxllm.serving.server.calls import CallPrompt, TextToScore, images_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredPrompt:
    """A prompt with the log-probabilities of its tokens.

    Attributes:
      ids: ids of its tokens.
      text: its text, as the client sent it, or decoded.
      tokens: all tokens but the first, which follows nothing; empty if they were not asked for.
      first: bytes of the first token's text.
    """

    ids: tuple[int, ...]
    text: str
    tokens: Sequence[LoggedToken] = ()
    first: bytes = b""

    def completion_logprobs(self, top: int) -> dict[str, Any]:
        """`logprobs` of an echoed prompt with `top` likeliest tokens next to each, in OpenAI's format of
        completions: null for the first token."""
        rest = completion_logprobs([_first(each, top) for each in self.tokens])
        own = {"tokens": [text_of(self.first)], "token_logprobs": [None], "top_logprobs": [None]}
        return {name: [*value, *rest[name]] for name, value in {**own, "text_offset": [0]}.items()}

    def prompt_logprobs(self, top: int) -> list[dict[str, Any] | None]:
        """`prompt_logprobs` in vLLM's format: null for the first token; for each other its own entry and
        those of the `top` likeliest, by id."""
        found: list[dict[str, Any] | None] = [None]
        for each in (_first(each, top) for each in self.tokens):
            own = (each.token.token, each.data, each.token.logprob, each.token.rank)
            likely = zip(each.token.top, each.top, range(1, top + 1), strict=False)
            entries = [own, *((id_, data, value, rank) for (id_, value), data, rank in likely)]
            # Its own entry comes first, as vLLM's.
            found.append({
                str(id_): {
                    "logprob": finite(value), "rank": rank, "decoded_token": data.decode(errors="replace")
                }
                for id_, data, value, rank in entries
            })  # fmt: skip
        return found


def _first(each: LoggedToken, top: int) -> LoggedToken:
    """A token with fewer of the likeliest next to it."""
    token = dataclasses.replace(each.token, top=each.token.top[:top])
    return dataclasses.replace(each, token=token, top=each.top[:top])


async def scored_prompts(
    state: ApiState,
    request: ApiRequest,
    prompts: Sequence[CallPrompt],
    text: TextToScore,
    *,
    scored: bool = True,
) -> list[ScoredPrompt]:
    """Encodes prompts, and scores them with the options of `text`, whose `top` may be 0.

    Raises:
      ApiError: a prompt is empty or has ids outside the vocabulary, or the level is not served.
      JaxllmError: see `Backend.score`.
    """
    backend, found = state.backend, list[ScoredPrompt]()
    for prompt in prompts:
        if images_of(prompt):
            raise ApiError("tokens of images have no log-probabilities", param="prompt_logprobs")
        ids = prompt if isinstance(prompt, tuple) else tuple(await backend.tokenize(prompt))
        own = dataclasses.replace(text, tokens=ids, top=max(1, text.top))
        _require_scorable(state, own)
        shown = prompt if isinstance(prompt, str) else await backend.detokenize(ids)
        found.append(ScoredPrompt(ids=ids, text=shown))
        if scored:
            (scores,) = await backend.score(request.app, own)
            found[-1] = await _logged(state, found[-1], scores, text.top)
    return found


async def _logged(
    state: ApiState, prompt: ScoredPrompt, scores: Sequence[TokenLogprob], top: int
) -> ScoredPrompt:
    """A prompt with its scores, `top` likeliest tokens next to each, and the texts of all of them."""
    decoder, tokens, shown = codecs.getincrementaldecoder("utf-8")("replace"), list[LoggedToken](), 0
    (first,) = await state.backend.token_bytes(prompt.ids[:1], begins=True)
    shown, begins = len(decoder.decode(first)), not first
    for each in scores:
        token = dataclasses.replace(each, top=each.top[:top])
        ids = [token.token, *(id_ for id_, _ in token.top)]
        data, *others = await state.backend.token_bytes(ids, begins=begins)
        begins = begins and not data
        tokens.append(LoggedToken(token=token, data=data, top=others, offset=shown))
        shown += len(decoder.decode(data))
    return dataclasses.replace(prompt, tokens=tokens, first=first)


def _require_scorable(state: ApiState, text: TextToScore) -> None:
    facts = state.backend.facts()
    ids = [*text.tokens, *(token for end in text.ends for token in end)]
    if not text.tokens or not 0 <= min(ids) <= max(ids) < facts.vocab_size:
        raise ApiError(
            f"a text to score must have at least one token; ids are 0 to {facts.vocab_size - 1}",
            param="prompt",
        )
    if text.level not in (None, *facts.levels):
        known = ", ".join(map(str, facts.levels))
        raise ApiError(f"level must be one of {known}, got {text.level}", param="level")


class ScoreBody(msgspec.Struct, kw_only=True):
    """A text and its possible continuations."""

    prompt: str | list[int]
    continuations: list[str | list[int]] | None = None
    model: str | None = None
    adapter: str | None = None
    level: int | None = None
    top_logprobs: TopLogprobs = 0


async def score(state: ApiState, request: ApiRequest) -> Any:
    """The log-probabilities of a text's continuations, or of the text after its first token."""
    body = state.body(request, ScoreBody)
    facts, adapter = state.model(body.model, adapter=body.adapter)
    prompt, ends = body.prompt, body.continuations
    most = state.embeddings_per_request
    if ends is not None and not 1 <= len(ends) <= most:
        raise ApiError(f"continuations must have 1 to {most} entries", param="continuations")
    if ends is not None and any(type(each) is not type(prompt) or not each for each in ends):
        message = "continuations have the type of the prompt, texts or token ids, and none is empty"
        raise ApiError(message, param="continuations")
    text = TextToScore(tokens=(), top=max(1, body.top_logprobs), level=body.level, adapter=adapter)
    if not isinstance(prompt, str):
        lists = tuple(tuple(each) for each in ends or () if isinstance(each, list))
        text = dataclasses.replace(text, tokens=tuple(prompt), ends=lists)
    elif ends is None:
        text = dataclasses.replace(text, tokens=tuple(await state.backend.tokenize(prompt)))
    else:
        tokens, found = await state.backend.tokenize_ends(prompt, [str(each) for each in ends])
        text = dataclasses.replace(text, tokens=tokens, ends=found)
    _require_scorable(state, text)
    own, *others = await state.backend.score(request.app, text)
    data = []
    for index, scores in enumerate([own] if ends is None else others):
        before = ScoredPrompt(ids=text.tokens[-1:], text="")
        logged = (await _logged(state, before, scores, body.top_logprobs)).tokens
        data.append({
            "object": "score",
            "index": index,
            "logprob": sum(finite(each.logprob) for each in scores),
            "greedy": all(each.rank == 1 for each in scores),
            "tokens": [_entry(each) for each in logged],
        })  # fmt: skip
    usage = {"prompt_tokens": text.count, "total_tokens": text.count}
    return {"object": "list", "data": data, "model": body.model or facts.name, "usage": usage}


def _entry(each: LoggedToken) -> dict[str, Any]:
    own = (each.token.token, each.token.logprob)
    found = [
        {"id": id_, "token": data.decode(errors="replace"), "logprob": finite(value)}
        for (id_, value), data in zip((own, *each.token.top), (each.data, *each.top), strict=True)
    ]
    return {**found[0], "rank": each.token.rank, **({"top_logprobs": found[1:]} if each.token.top else {})}
