"""Callers for locust that send completions of random tokens one after another: `test_load.py` runs it."""

import json
import os
import random

from locust import FastHttpUser, constant, task

BODY = json.loads(os.environ["JAXLLM_LOAD_BODY"])


class Caller(FastHttpUser):
    wait_time = constant(0)

    @task
    def answer(self) -> None:
        body = BODY | {"prompt": random.sample(BODY["prompt"], len(BODY["prompt"]))}
        with self.client.post("/v1/completions", json=body, catch_response=True) as reply:
            if f'"completion_tokens":{BODY["max_tokens"]}' not in (reply.text or ""):
                reply.failure("another answer than was asked for")
