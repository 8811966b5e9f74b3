"""The client of a service: its calls, and its contexts, as `LLMService` has them in one process."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import httpx

from jaxllm.client.answer import Answer
from jaxllm.client.requests import (
    LIMITS,
    MAX_TOKENS,
    answer_body,
    asked_in,
    bind_body,
    connection,
    context_body,
    context_path,
    conversation,
    require_prompt,
)
from jaxllm.client.responses import (
    ContextFacts,
    checked,
    context_facts,
    health_of,
    list_of,
    missed_of,
    reaching,
)
from jaxllm.errors import ContextGone


class Client:
    """A service, as one app calls it. Thread-safe."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        socket: object = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Makes a client; the first call connects.

        Args:
          url: of the service.
          socket: path of its Unix socket, in place of the URL.
          api_key: of the app; over a Unix socket none is needed.
          timeout_s: most seconds to wait for the next part of an answer.

        Raises:
          ConfigError: an argument is malformed.
        """
        settings, path = connection(url, socket, api_key, timeout_s)
        transport = httpx.HTTPTransport(uds=path, limits=LIMITS, trust_env=False)
        self._http = httpx.Client(transport=transport, **settings)
        self._adapter = ""

    def with_adapter(self, name: str) -> "Client":
        """This client, with a low-rank adapter that answers its calls and is that of its new contexts; ""
        for none. Both have the same connections."""
        other = copy.copy(self)
        other._adapter = name
        return other

    def bind(self, slo: Any, *, strict: bool = False, shorten: bool = False) -> tuple[int, ...]:
        """Binds the app, whatever client it uses, to an objective for its calls that name none, until it
        unbinds or the service ends (bindLLMService).

        Args:
          slo: ratios such as "<40,70>"; `{"ttft_ms": 200, "tpot_ms": 50}`; or an objective of `jaxllm`.
          strict: refuse calls that no sub-model can answer in time.
          shorten: plans may drop words of prompts. A single call allows it by `extra={"shorten": True}`.

        Returns:
          The prompt lengths at which no sub-model is in time on the service's device.

        Raises:
          ConfigError: the objective is malformed.
        """
        return missed_of(self._ask("POST", "/v1/objective", bind_body(slo, strict, shorten)))

    def unbind(self) -> None:
        """Ends what the app was bound to; what the service's options say of it counts again."""
        self._ask("DELETE", "/v1/objective")

    def objective(self) -> dict[str, Any]:
        """The app's objective, as the service tells it: `slo`, `strict`, `shorten` and whom it is `from`."""
        return self._ask("GET", "/v1/objective")

    def call(
        self,
        prompt: str,
        *,
        slo: Any = None,
        strict: bool | None = None,
        instruction: str = "",
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        sampling: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Answers a prompt in time (callLLM).

        Args:
          prompt: the user's text.
          slo: the objective; None for the app's.
          strict: refuse the call if no sub-model is fast enough; None for the app's choice.
          instruction: stands before the prompt.
          max_tokens: most tokens of the answer.
          stop: strings that end it.
          sampling: see `Sampling`; greedy by default.
          extra: further fields of the request's body.

        Returns:
          The answer, which the service has taken.

        Raises:
          ConfigError: the request is malformed.
          ObjectiveMissed: `strict`, and no sub-model is fast enough.
          ContextOverflow: the prompt is too long.
          Busy, Unauthorized, Unreachable, ServiceError: see these.
        """
        return self.chat(
            conversation(prompt, instruction), slo=slo, strict=strict, max_tokens=max_tokens, stop=stop,
            sampling=sampling, extra=extra,
        )  # fmt: skip

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        slo: Any = None,
        strict: bool | None = None,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        sampling: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Answers a conversation: messages with a `role` and a `content`, oldest first; with images as
        `user_message` has them. For the rest see `call`."""
        body = answer_body(
            self._adapter, slo=slo, strict=strict, max_tokens=max_tokens, stop=stop, sampling=sampling,
            extra=extra,
        )  # fmt: skip
        return self._answer("/v1/chat/completions", {"messages": [dict(each) for each in messages], **body})

    def complete(
        self,
        prompt: str,
        *,
        slo: Any = None,
        strict: bool | None = None,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        sampling: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Continues a text, without the model's chat template. For the rest see `call`."""
        require_prompt(prompt)
        body = answer_body(
            self._adapter, slo=slo, strict=strict, max_tokens=max_tokens, stop=stop, sampling=sampling,
            extra=extra,
        )  # fmt: skip
        return self._answer("/v1/completions", {"prompt": prompt, **body})

    def new_context(self, *, level: int | None = None, pinned: bool = False) -> "Context":
        """Creates a context of the app, which outlives calls and restarts (newLLMCtx).

        Args:
          level: the sub-model that answers in it, in percent; None for the whole model.
          pinned: whether its chunks are never evicted for another context.

        Raises:
          ConfigError: the service keeps no contexts, or the level is not served.
          BudgetExceeded: the app may own no more contexts, or there is no room.
        """
        body = context_body(self._adapter, level, pinned)
        return Context(self, context_facts(self._ask("POST", "/v1/contexts", body)))

    def context(self, name: str) -> "Context":
        """A context that the app created before.

        Raises:
          ContextGone: the app has no context of this name.
        """
        for each in self.contexts():
            if each.name == name:
                return each
        raise ContextGone(f"there is no context {name!r:.80}; it was deleted, or never made")

    def contexts(self) -> "list[Context]":
        """All contexts of the app."""
        return [Context(self, context_facts(each)) for each in list_of(self._ask("GET", "/v1/contexts"))]

    def adapters(self) -> list[dict[str, Any]]:
        """What the service tells of the low-rank adapters that calls may name; `id` is the name."""
        return list_of(self._ask("GET", "/v1/adapters"))

    def models(self) -> list[dict[str, Any]]:
        """What the service tells of its models."""
        return list_of(self._ask("GET", "/v1/models"))

    def health(self) -> dict[str, Any]:
        """Whether the service is well; one that is not ready tells so, too."""
        with reaching(self._http.base_url):
            response = self._http.get("/health")
        return health_of(response)

    def close(self) -> None:
        """Closes the connections; answers that are not complete end."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        with reaching(self._http.base_url):
            response = self._http.request(method, path, json=body)
        return {} if response.status_code == 204 else checked(response)

    def _answer(self, path: str, body: dict[str, Any]) -> Answer:
        with reaching(self._http.base_url):
            response = self._http.send(self._http.build_request("POST", path, json=body), stream=True)
            if not response.is_success:
                response.read()
        if not response.is_success:
            checked(response)
        return Answer(response)


class Context:
    """A context of the app.

    Attributes:
      facts: as the service told them last.
    """

    def __init__(self, client: Client, facts: ContextFacts) -> None:
        self._client, self.facts = client, facts

    @property
    def name(self) -> str:
        """Finds the context again after a restart."""
        return self.facts.name

    @property
    def level(self) -> int:
        """The sub-model that answers in it, in percent."""
        return self.facts.level

    def generate(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        slo: Any = None,
        strict: bool | None = None,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        sampling: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Answers a prompt, or messages such as `user_message` makes, that follow the context's tokens. For
        the other arguments see `Client.call`.

        Raises:
          ContextGone: it was deleted, or is of another model, level, codec or adapter.
          ContextOverflow: the context and the prompt are longer than the model's window.
          Busy: it is answering.
        """
        body = answer_body(
            self._client._adapter, slo=slo, strict=strict, max_tokens=max_tokens, stop=stop,
            sampling=sampling, extra=extra,
        )  # fmt: skip
        return self._client._answer(context_path(self.name, "generate"), {**asked_in(prompt), **body})

    def pin(self, pinned: bool = True) -> None:
        """Keeps its chunks in memory once they are there, or lets them be evicted again.

        Raises:
          BudgetExceeded: the app's pinned contexts would take more than they may.
        """
        self.facts = context_facts(
            self._client._ask("POST", context_path(self.name, "pin"), {"pinned": pinned})
        )

    def delete(self) -> None:
        """Removes it from memory and storage (delLLMCtx).

        Raises:
          ContextGone: it was deleted before.
          Busy: it is answering.
        """
        self._client._ask("DELETE", context_path(self.name))

    def __repr__(self) -> str:
        return f"Context(name={self.name!r})"
