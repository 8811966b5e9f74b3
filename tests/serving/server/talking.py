"""Talks to a service's contexts over HTTP."""

import contextlib
import time
from collections.abc import Callable

from jaxllm.serving.server import executor as executors
from tests.serving.server.context_service import WHOLE

FOX = "the quick brown fox"


def made(http, **options):
    answer = http.post("/v1/contexts", json=options)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def said(http, name, prompt, tokens=8, **more):
    """The answer to a text, token ids or messages in a context."""
    field = "messages" if isinstance(prompt, list) and isinstance(prompt[0], dict) else "prompt"
    body = {field: prompt, "max_tokens": tokens, **WHOLE, **more}
    return http.post(f"/v1/contexts/{name}/generate", json=body)


def facts(http, name, prompt, tokens=8, **more):
    answer = said(http, name, prompt, tokens, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["jaxllm"]


def user(text):
    return {"role": "user", "content": text}


@contextlib.contextmanager
def slowly(monkeypatch):
    """Steps take a while, so that answers run while others come."""
    real = executors.step

    def step(run):
        time.sleep(0.05)
        return real(run)

    with monkeypatch.context() as patch:
        patch.setattr(executors, "step", step)
        yield


def until(there: Callable[[], object]) -> None:
    """Waits for what comes in a moment."""
    late_s = time.monotonic() + 60
    while not there():
        assert time.monotonic() < late_s, "it did not come about"
        time.sleep(0.01)


def idle(served):
    """Waits until the engine has noticed that a client has left."""
    until(lambda: not served.executor.queue().work)


@contextlib.contextmanager
def streamed(http, name, tokens=40):
    body = {"prompt": FOX, "max_tokens": tokens, "stream": True, **WHOLE}
    with http.stream("POST", f"/v1/contexts/{name}/generate", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        yield answer.iter_lines()
