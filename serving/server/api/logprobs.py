"""Writes log-probabilities of tokens as OpenAI's formats have them."""

import math
from collections.abc import Sequence
from typing import Any

from serving.server.api.front import Front
from serving.server.calls import TokenLogprob

# JSON has no infinity; OpenAI writes this for tokens that cannot come.
_LEAST = -9999.0


async def chat_logprobs(front: Front, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`logprobs` of a chat's choice."""
    content = []
    for each in tokens:
        ids = [each.token, *(token for token, _ in each.top)]
        told = [
            {
                "token": text,
                "logprob": _finite(value),
                "bytes": None if "\ufffd" in text else list(text.encode()),
            }
            for text, value in zip(
                await front.token_texts(ids), [each.logprob, *(value for _, value in each.top)], strict=True
            )
        ]
        content.append(told[0] | {"top_logprobs": told[1:]})
    return {"content": content, "refusal": None}


async def completion_logprobs(
    front: Front, tokens: Sequence[TokenLogprob], offset: int = 0
) -> dict[str, Any]:
    """`logprobs` of a completion's choice; `offset` is the number of characters before these tokens."""
    told: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for each in tokens:
        texts = await front.token_texts([each.token, *(token for token, _ in each.top)])
        told["tokens"].append(texts[0])
        told["token_logprobs"].append(_finite(each.logprob))
        top = zip(texts[1:], (value for _, value in each.top), strict=True)
        told["top_logprobs"].append({text: _finite(value) for text, value in top})
        told["text_offset"].append(offset)
        offset += len(texts[0])
    return told


def _finite(value: float) -> float:
    return value if math.isfinite(value) else _LEAST
