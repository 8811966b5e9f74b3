"""A service with scripted figures, to look at the dashboard without a model.

`python -m tests.serving.server.fake_service 8090` runs it.
"""

import asyncio
import contextlib
import json
import random
import sys
import time

from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from serving.server.calls import Ended, Started
from serving.server.dispatches import Dispatch
from serving.server.facts import ModelFacts
from serving.server.feed import Feed
from serving.server.history import History
from serving.server.metrics import Metrics
from serving.server.watching import watch_routes

MB = 1 << 20
# App -> level it mostly gets, its TTFT in ms and what its objective allows.
APPS = {
    "keyboard": (30, 60, 90),
    "mail": (70, 240, 400),
    "assistant": (100, 420, 900),
    "notes": (50, 180, 260),
    "photo search": (50, 310, 350),
}
MODEL = ModelFacts(
    name="jaxllm-1b-int8", window_tokens=4096, vocab_size=32000, levels=(30, 50, 70, 100),
    has_chat_template=True, adapters=("mail-tone",), opened_s=time.time() - 3 * 3600 - 754,
)  # fmt: skip
STARTED = Started(
    prompt_tokens=120, kept_tokens=96, reused_tokens=64, level=70, source="proposed", queued_ms=12.0
)
ENDED = Ended(
    finish_reason="stop", stop_string=None, tokens=21, ttft_ms=200.0, tpot_ms=30.0, engine_ttft_ms=180.0,
    engine_tpot_ms=25.0, met=True, drafted=0.5, seed=1, ttft_limit_ms=400.0, tpot_limit_ms=50.0,
)  # fmt: skip


class FakeBackend:
    """The methods of a backend that are for watching it."""

    def __init__(self, figures=None):
        self.figures = FIGURES if figures is None else figures
        self.refusal = None

    def facts(self):
        if self.refusal is not None:
            raise self.refusal
        return MODEL

    def health(self):
        return {"ready": self.refusal is None, "alive": True, "why": str(self.refusal or "")}

    def snapshot(self):
        return self.figures


FIGURES = {
    "queue": {"waiting": 2, "limit": 64, "oldest_ms": 84.0},
    "running": [
        {"app": "assistant", "level": 100, "count": 1},
        {"app": "mail", "level": 70, "count": 2},
        {"app": "keyboard", "level": 30, "count": 1},
    ],
    "memory": {
        "process_bytes": 1710 * MB,
        "limit_bytes": 2048 * MB,
        "pressure": 0.004,
        "holdings": {
            "weights": {"size_bytes": 912 * MB},
            "kv": {"size_bytes": 118 * MB},
            "experts": {"size_bytes": 220 * MB, "limit_bytes": 256 * MB, "least_bytes": 48 * MB},
            "adapters": {"size_bytes": 6 * MB},
            "drafts": {"size_bytes": 64 * MB, "limit_bytes": 64 * MB, "least_bytes": 0},
            "contexts": {"size_bytes": 143 * MB, "limit_bytes": 256 * MB, "least_bytes": 16 * MB},
            "prefixes": {"size_bytes": 41 * MB, "limit_bytes": 96 * MB, "least_bytes": 0},
        },
    },
    "contexts": {
        "assistant": {"contexts": 6, "pinned": 1, "stored_bytes": 61 * MB,
                      "chunks": {"raw": 12, "8": 96, "4": 210, "2": 148}},
        "mail": {"contexts": 14, "pinned": 0, "stored_bytes": 88 * MB,
                 "chunks": {"raw": 0, "8": 60, "4": 122, "2": 301}},
        "notes": {"contexts": 3, "pinned": 0, "stored_bytes": 9 * MB,
                  "chunks": {"raw": 0, "8": 14, "4": 40, "2": 22}},
    },
    "adapters": {"mail-tone": 6 * MB},
    "experts": {"visits": 120_400, "hits": 109_322, "foreseen": 31_220},
    "read_bytes": {"weights": 0, "experts": 5_400 * MB, "contexts": 310 * MB},
}  # fmt: skip


def play(metrics, draw, app=None):
    """One call of an app, as it might have been."""
    name = app or draw.choices(list(APPS), (5, 4, 2, 2, 1.5))[0]
    level, ttft, limit = APPS[name]
    if draw.random() < 0.25:
        level = draw.choice(MODEL.levels)
    metrics.taken(name)
    if draw.random() < 0.02:
        return metrics.refused(name, "full")
    source = "whole" if level == 100 else draw.choices(("proposed", "fallback", "nearest"), (5, 2, 0.4))[0]
    waited = ttft * draw.lognormvariate(0, 0.32)
    met = None if draw.random() < 0.04 else waited <= limit
    prompt = draw.randrange(40, 900)
    kept = prompt if source == "whole" else int(prompt * 0.8)
    reused = int(kept * draw.choice((0, 0, 0.5, 0.9)))
    started = Started(
        prompt_tokens=prompt, kept_tokens=kept, reused_tokens=reused, level=level, source=source,
        queued_ms=waited * 0.1,
    )  # fmt: skip
    metrics.started(name, started)
    tokens = draw.randrange(4, 120)
    ended = Ended(
        finish_reason="stop", stop_string=None, tokens=tokens, ttft_ms=waited, tpot_ms=18 + level / 4,
        engine_ttft_ms=waited * 0.9, engine_tpot_ms=16 + level / 4, met=met, drafted=0.4, seed=1,
        ttft_limit_ms=None if met is None else limit, tpot_limit_ms=60,
    )  # fmt: skip
    rows = draw.randrange(1, 6)
    for _ in range(2):
        took = draw.uniform(800, 1700) / 2
        metrics.dispatched(Dispatch(kind="decode", rows=rows, took_ms=took, tokens=tokens // 2))
    chunk = draw.choice((16, 64, 256))
    metrics.dispatched(Dispatch(kind="prefill", rows=1, took_ms=took, chunk_tokens=chunk, mode="int8"))
    return metrics.ended(name, ended, started)


def metrics_with_a_past(backend, seed=3):
    """Metrics whose history has ten minutes of calls."""
    now = [time.time() - 600]
    history = History(clock=lambda: now[0])
    metrics = Metrics(backend.snapshot, history=history)
    draw = random.Random(seed)
    while now[0] < time.time() - 1:
        play(metrics, draw)
        now[0] += draw.expovariate(1 / 2.5)
    history._clock = time.time
    return metrics


ANSWER = (
    "It is a reminder, not a complaint: the invoice of 12 March is open, and they ask you to pay by Friday. "
    "Nothing else needs an answer."
)


async def chat(request):
    """Answers any conversation with the same words."""
    await request.json()
    words = ANSWER.split()
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": MODEL.name}

    async def events():
        for at, word in enumerate(words):
            delta = {"content": word if not at else " " + word}
            choice = {"index": 0, "delta": delta, "finish_reason": None}
            yield f"data: {json.dumps({**base, 'choices': [choice]})}\n\n"
            await asyncio.sleep(0.02)
        choice = {"index": 0, "delta": {}, "finish_reason": "stop"}
        yield f"data: {json.dumps({**base, 'choices': [choice]})}\n\n"
        usage = {"prompt_tokens": 38, "completion_tokens": len(words), "total_tokens": 38 + len(words)}
        plan = {
            "source": "proposed", "level": 70, "prompt_tokens": 38, "kept_tokens": 31, "reused_tokens": 12,
            "ttft_ms": 182.4, "tpot_ms": 27.1, "met": True,
        }  # fmt: skip
        yield f"data: {json.dumps({**base, 'choices': [], 'usage': usage, 'jaxllm': plan})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def application(backend, metrics, *, live=False, **options):
    """The routes of watching, and a chat."""
    feed = Feed(backend, metrics, interval_s=0.5 if not live else 1.0)
    draw = random.Random(5)

    async def keep_playing():
        while True:
            await asyncio.sleep(draw.expovariate(0.8))
            play(metrics, draw)
            figures = json.loads(json.dumps(FIGURES))
            figures["queue"]["waiting"] = draw.randrange(0, 6)
            backend.figures = figures

    @contextlib.asynccontextmanager
    async def lifespan(app):
        task = asyncio.create_task(keep_playing()) if live else None
        yield
        feed.close()
        if task is not None:
            task.cancel()

    routes = [*watch_routes(metrics, feed, **options), Route("/v1/chat/completions", chat, methods=["POST"])]
    return Starlette(routes=routes, lifespan=lifespan)


if __name__ == "__main__":
    import uvicorn

    fake = FakeBackend()
    uvicorn.run(
        application(fake, metrics_with_a_past(fake), live=True), port=int(sys.argv[1]), log_level="info"
    )
