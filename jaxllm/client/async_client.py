"""The client of a service for asyncio: what `Client` has, awaited."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import httpx

from jaxllm.client.answer import AsyncAnswer
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


class AsyncClient:
    """A service, as one app calls it, for one event loop. See `Client` for what is not said here."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        *,
        socket: object = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """See `Client`."""
        settings, path = connection(url, socket, api_key, timeout_s)
        transport = httpx.AsyncHTTPTransport(uds=path, limits=LIMITS, trust_env=False)
        self._http = httpx.AsyncClient(transport=transport, **settings)
        self._adapter = ""

    def with_adapter(self, name: str) -> "AsyncClient":
        """See `Client.with_adapter`."""
        other = copy.copy(self)
        other._adapter = name
        return other

    async def bind(self, slo: Any, *, strict: bool = False, shorten: bool = False) -> tuple[int, ...]:
        """See `Client.bind`."""
        return missed_of(await self._ask("POST", "/v1/objective", bind_body(slo, strict, shorten)))

    async def unbind(self) -> None:
        """See `Client.unbind`."""
        await self._ask("DELETE", "/v1/objective")

    async def objective(self) -> dict[str, Any]:
        """See `Client.objective`."""
        return await self._ask("GET", "/v1/objective")

    async def call(
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
    ) -> AsyncAnswer:
        """See `Client.call`."""
        return await self.chat(
            conversation(prompt, instruction), slo=slo, strict=strict, max_tokens=max_tokens, stop=stop,
            sampling=sampling, extra=extra,
        )  # fmt: skip

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        slo: Any = None,
        strict: bool | None = None,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        sampling: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> AsyncAnswer:
        """Answers a conversation: messages with a `role` and a `content`, oldest first; with images as
        `user_message` has them. For the rest see `call`."""
        body = answer_body(
            self._adapter, slo=slo, strict=strict, max_tokens=max_tokens, stop=stop, sampling=sampling,
            extra=extra,
        )  # fmt: skip
        return await self._answer(
            "/v1/chat/completions", {"messages": [dict(each) for each in messages], **body}
        )

    async def complete(
        self,
        prompt: str,
        *,
        slo: Any = None,
        strict: bool | None = None,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        sampling: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> AsyncAnswer:
        """Continues a text, without the model's chat template. For the rest see `call`."""
        require_prompt(prompt)
        body = answer_body(
            self._adapter, slo=slo, strict=strict, max_tokens=max_tokens, stop=stop, sampling=sampling,
            extra=extra,
        )  # fmt: skip
        return await self._answer("/v1/completions", {"prompt": prompt, **body})

    async def new_context(self, *, level: int | None = None, pinned: bool = False) -> "AsyncContext":
        """See `Client.new_context`."""
        body = context_body(self._adapter, level, pinned)
        return AsyncContext(self, context_facts(await self._ask("POST", "/v1/contexts", body)))

    async def context(self, name: str) -> "AsyncContext":
        """A context that the app created before.

        Raises:
          ContextGone: the app has no context of this name.
        """
        for each in await self.contexts():
            if each.name == name:
                return each
        raise ContextGone(f"there is no context {name!r:.80}; it was deleted, or never made")

    async def contexts(self) -> "list[AsyncContext]":
        """All contexts of the app."""
        return [
            AsyncContext(self, context_facts(each))
            for each in list_of(await self._ask("GET", "/v1/contexts"))
        ]

    async def adapters(self) -> list[dict[str, Any]]:
        """What the service tells of the low-rank adapters that calls may name; `id` is the name."""
        return list_of(await self._ask("GET", "/v1/adapters"))

    async def models(self) -> list[dict[str, Any]]:
        """What the service tells of its models."""
        return list_of(await self._ask("GET", "/v1/models"))

    async def health(self) -> dict[str, Any]:
        """Whether the service is well; one that is not ready tells so, too."""
        with reaching(self._http.base_url):
            response = await self._http.get("/health")
        return health_of(response)

    async def close(self) -> None:
        """Closes the connections; answers that are not complete end."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        with reaching(self._http.base_url):
            response = await self._http.request(method, path, json=body)
        return {} if response.status_code == 204 else checked(response)

    async def _answer(self, path: str, body: dict[str, Any]) -> AsyncAnswer:
        with reaching(self._http.base_url):
            response = await self._http.send(self._http.build_request("POST", path, json=body), stream=True)
            if not response.is_success:
                await response.aread()
        if not response.is_success:
            checked(response)
        return AsyncAnswer(response)


class AsyncContext:
    """A context of the app.

    Attributes:
      facts: as the service told them last.
    """

    def __init__(self, client: AsyncClient, facts: ContextFacts) -> None:
        self._client, self.facts = client, facts

    @property
    def name(self) -> str:
        """Finds the context again after a restart."""
        return self.facts.name

    @property
    def level(self) -> int:
        """The sub-model that answers in it, in percent."""
        return self.facts.level

    async def generate(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        slo: Any = None,
        strict: bool | None = None,
        max_tokens: int = MAX_TOKENS,
        stop: Sequence[str] = (),
        sampling: Any = None,
        extra: Mapping[str, Any] | None = None,
    ) -> AsyncAnswer:
        """See `Context.generate`."""
        body = answer_body(
            self._client._adapter, slo=slo, strict=strict, max_tokens=max_tokens, stop=stop,
            sampling=sampling, extra=extra,
        )  # fmt: skip
        return await self._client._answer(context_path(self.name, "generate"), {**asked_in(prompt), **body})

    async def pin(self, pinned: bool = True) -> None:
        """Keeps its chunks in memory once they are there, or lets them be evicted again.

        Raises:
          BudgetExceeded: the app's pinned contexts would take more than they may.
        """
        self.facts = context_facts(
            await self._client._ask("POST", context_path(self.name, "pin"), {"pinned": pinned})
        )

    async def delete(self) -> None:
        """Removes it from memory and storage (delLLMCtx).

        Raises:
          ContextGone: it was deleted before.
          Busy: it is answering.
        """
        await self._client._ask("DELETE", context_path(self.name))

    def __repr__(self) -> str:
        return f"AsyncContext(name={self.name!r})"
