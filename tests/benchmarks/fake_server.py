"""A server of completions with scripted answers: `python -m ... --port 8080`, as `llama-server` is started.

The number of tokens asked for says what comes: 404 and 429 those statuses, 1 an error in the middle of the
stream, 2 nothing for a long time, 3 an answer that is cut off; else so many words.
"""

import argparse
import asyncio
import json
import sys

from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

LONG_S = 60.0


def frame(told):
    return f"data: {json.dumps(told)}\n\n"


async def completions(request):
    body = await request.json()
    count = body["max_tokens"]
    if count in (404, 429):
        return JSONResponse({"error": {"message": "no"}}, count)

    async def frames():
        if count == 2:
            await asyncio.sleep(LONG_S)
        for number in range(count):
            yield frame({"choices": [{"index": 0, "text": f" {len(body['prompt'])}"}]})
            if count == 3:
                return
            await asyncio.sleep(0.01 * (number < 3))
        if count == 1:
            yield frame({"error": {"message": "broken"}})
            return
        yield frame({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        usage = {"completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 1}}
        facts = {"level": 50, "reused_tokens": 1, "port": request.client.port}
        yield frame({"choices": [], "usage": usage, "jaxllm": facts})
        yield "data: [DONE]\n\n"

    return StreamingResponse(frames(), media_type="text/event-stream")


async def health(request):
    del request
    return JSONResponse({"status": "ok"})


if __name__ == "__main__":
    import uvicorn

    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    given, _ = parser.parse_known_args()
    if given.port == 0:
        sys.exit("no port")
    routes = [Route("/v1/completions", completions, methods=["POST"]), Route("/health", health)]
    uvicorn.run(Starlette(routes=routes), port=given.port, log_level="error", timeout_graceful_shutdown=1)
