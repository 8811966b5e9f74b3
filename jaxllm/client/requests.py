"""Makes the bodies of requests, and the connection's settings."""

import base64
import dataclasses
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from jaxllm.errors import ConfigError

MAX_TOKENS = 256
# What makes an answer that a client's `Answer` cannot show; OpenAI's client can.
_NOT_HERE = ("n", "stream", "stream_options", "tools", "tool_choice", "logprobs", "top_logprobs")
_OBJECTIVES = (("ttft_ms", "tpot_ms"), ("total_ms",), ("joules",))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; the same fields as `jaxllm.Sampling`, which may stand in its place. The service
    checks them. The default is greedy.

    Attributes:
      temperature: 0 is greedy; otherwise logits are divided by it.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the fewest most likely tokens whose probabilities reach it; 1 keeps all.
      min_p: drop tokens less likely than `min_p` times the most likely one.
      repetition_penalty: above 1 makes tokens of the prompt and the answer less likely.
      presence_penalty: subtracted from the logits of tokens that are in the answer already.
      frequency_penalty: subtracted once for each occurrence of the token in the answer.
      logit_bias: (token id, added value) pairs.
      seed: of the draw; None lets the service choose one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


def wire_slo(slo: Any) -> Any:
    """An objective as the service reads it: ratios as text such as "<40,70>", or an object of milliseconds or
    joules.

    Args:
      slo: such a text; a mapping; or an object with the attributes of `Slo`, `Latency`, `EndToEnd` or
        `EnergyBudget`; None for none.

    Raises:
      ConfigError: it is something else.
    """
    if slo is None or isinstance(slo, str):
        return slo
    if isinstance(slo, Mapping):
        return dict(slo)
    if hasattr(slo, "ttft") and hasattr(slo, "tpot"):
        return f"<{100 * slo.ttft:.10g},{100 * slo.tpot:.10g}>"
    for names in _OBJECTIVES:
        if all(hasattr(slo, name) for name in names):
            return {name: getattr(slo, name) for name in names}
    raise ConfigError(
        f'an objective is ratios such as "<40,70>", or milliseconds such as {{"ttft_ms": 200, "tpot_ms": 50}}'
        f", got {slo!r:.80}"
    )


def bind_body(slo: Any, strict: bool, shorten: bool = False) -> dict[str, Any]:
    """The body of a request that binds the app.

    Raises:
      ConfigError: there is no objective, or a malformed one.
    """
    if slo is None:
        raise ConfigError("bind takes an objective; `unbind` ends that of the app")
    return {"slo": wire_slo(slo), "strict": strict, "shorten": shorten}


def context_body(adapter: str, level: int | None, pinned: bool) -> dict[str, Any]:
    """The body of a request for a new context."""
    named = {"adapter": adapter} if adapter else {}
    return {"pinned": pinned, **named} if level is None else {"pinned": pinned, "level": level, **named}


def answer_body(
    adapter: str,
    *,
    slo: Any,
    strict: bool | None,
    max_tokens: int,
    stop: Sequence[str],
    sampling: Any,
    extra: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The fields of a request for an answer, but for its prompt; an empty `adapter` is for none.

    Raises:
      ConfigError: a value is malformed, or `extra` asks for what an `Answer` cannot show.
    """
    body: dict[str, Any] = {
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body |= {"adapter": adapter} if adapter else {}
    body |= {} if slo is None else {"slo": wire_slo(slo)}
    body |= {} if strict is None else {"strict": strict}
    if isinstance(stop, str):
        raise ConfigError(f"stop takes a sequence of strings, got the string {stop!r:.80}")
    body |= {"stop": list(stop)} if stop else {}
    sampling, plain = sampling or Sampling(), Sampling()
    # OpenAI's default is 1, ours is greedy.
    body["temperature"] = sampling.temperature
    for name in (field.name for field in dataclasses.fields(Sampling)):
        value = getattr(sampling, name)
        if value != getattr(plain, name):
            body[name] = {str(token): bias for token, bias in value} if name == "logit_bias" else value
    if refused := [name for name in extra or () if name in _NOT_HERE]:
        raise ConfigError(
            f"the field {refused[0]!r} needs another client, such as OpenAI's; leave it out here"
        )
    return body | dict(extra or {})


def conversation(prompt: str, instruction: str) -> list[dict[str, Any]]:
    """The messages of a prompt and an instruction before it.

    Raises:
      ConfigError: the prompt is empty.
    """
    before = [{"role": "system", "content": instruction}] if instruction else []
    return [*before, user_message(prompt)]


def user_message(prompt: str, *images: bytes) -> dict[str, Any]:
    """A user's message, for `Client.chat` and `Context.generate`.

    Args:
      prompt: the user's text.
      images: contents of images' files, such as `Path("photo.jpg").read_bytes()`, of a model that reads them.

    Raises:
      ConfigError: the prompt is empty, or an image is no bytes.
    """
    require_prompt(prompt)
    content = [*map(image_part, images), {"type": "text", "text": prompt}] if images else prompt
    return {"role": "user", "content": content}


def asked_in(prompt: str | Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of a request in a context: a prompt, or messages.

    Raises:
      ConfigError: the prompt is empty.
    """
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        require_prompt(prompt)
        return {"prompt": prompt}
    return {"messages": [dict(each) for each in prompt]}


def image_part(content: bytes) -> dict[str, Any]:
    """The part of a message that is an image, of its file's content: the service never opens other URLs.

    Raises:
      ConfigError: it is no bytes, or none.
    """
    if not isinstance(content, bytes) or not content:
        raise ConfigError(f"an image is the bytes of its file, got {content!r:.40}; read the file first")
    # The service looks at the bytes, not at the type.
    url = f"data:image/*;base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def require_prompt(prompt: object) -> None:
    """Raises ConfigError unless a prompt is a text of at least one word."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"the prompt is empty; give it at least one word, got {prompt!r:.80}")


def context_path(name: str, verb: str = "") -> str:
    """The path of a context, or of what is done with it."""
    return f"/v1/contexts/{urllib.parse.quote(name, safe='')}" + (f"/{verb}" if verb else "")


def connection(
    url: str, path: object, api_key: str | None, timeout_s: float
) -> tuple[dict[str, Any], str | None]:
    """The arguments of an httpx client, and the path of a Unix socket.

    Raises:
      ConfigError: the key, the time or the address is malformed.
    """
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not timeout_s > 0:
        raise ConfigError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r:.80}")
    headers = {}
    if api_key is not None:
        if not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key:
            raise ConfigError("the API key is malformed: keys are printable, without spaces")
        headers["authorization"] = f"Bearer {api_key}"
    if path is not None:
        url = "http://localhost"
    elif not url.startswith(("http://", "https://")):
        raise ConfigError(f"url must begin with http:// or https://, got {url!r:.80}")
    return {
        "base_url": url.rstrip("/"),
        "headers": headers,
        # Writes and connections are quick or fail; an answer may wait in a queue.
        "timeout": httpx.Timeout(timeout_s, connect=min(timeout_s, 10.0), pool=None),
        # A proxy of the environment cannot reach this device's loopback.
        "trust_env": False,
    }, None if path is None else str(path)


# Any number of answers may be streamed at once.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=16)
