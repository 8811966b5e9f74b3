"""Callers that each send completions one after another, for locust: `test_load.py` runs it."""

import json
import os

from locust import FastHttpUser, constant, task

BODY = json.loads(os.environ["JAXLLM_LOAD_BODY"])


class Caller(FastHttpUser):
    wait_time = constant(0)

    @task
    def answer(self) -> None:
        with self.client.post("/v1/completions", json=BODY, catch_response=True) as reply:
            if reply.status_code != 200 or reply.json()["usage"]["completion_tokens"] != BODY["max_tokens"]:
                reply.failure("another answer than was asked for")
