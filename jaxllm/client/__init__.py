"""A client of a running service, over HTTP or a Unix socket. Imports neither JAX nor NumPy.

    from jaxllm.client import Client
    client = Client(socket="/run/jaxllm/socket")     or Client("http://127.0.0.1:8080", api_key="...")
    client.bind("<40,70>")                           bindLLMService in the papers
    answer = client.call("Is this a complaint? ...") callLLM
    for piece in answer: ...
    answer.plan, answer.cost, answer.met
    context = client.new_context()                   newLLMCtx
    context.generate("Dear ...").result().text       callLLM
    context.delete()                                 delLLMCtx

`LLMService` and `Context` have the same verbs in one process. `AsyncClient` has them for asyncio.
"""

try:
    import httpx as _httpx  # noqa: F401
except ImportError as error:
    raise ImportError("jaxllm.client needs httpx: pip install 'jaxllm[client]'") from error

from jaxllm.client.answer import Answer, AsyncAnswer, Cost, Plan
from jaxllm.client.async_client import AsyncClient, AsyncContext
from jaxllm.client.client import Client, Context
from jaxllm.client.requests import Sampling, user_message
from jaxllm.client.responses import Busy, ContextFacts, ServiceError, Unauthorized, Unreachable

__all__ = [
    "Answer",
    "AsyncAnswer",
    "AsyncClient",
    "AsyncContext",
    "Busy",
    "Client",
    "Context",
    "ContextFacts",
    "Cost",
    "Plan",
    "Sampling",
    "ServiceError",
    "Unauthorized",
    "Unreachable",
    "user_message",
]
