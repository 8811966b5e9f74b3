"""Answers of models of three sizes, and requests for them."""

import numpy as np

from benchmarks.elastic.decisions import Variants
from benchmarks.traces import TraceRequest
from jaxllm.tasks.example import TaskExample

# Two questions, three sizes; the whole model takes 10 and 20 ms to the first token, 2 ms per further one.
VARIANTS = Variants(
    ttft_ms=np.array([[2.0, 5.0, 10.0], [4.0, 10.0, 20.0]]),
    tpot_ms=np.array([[0.5, 1.0, 2.0]] * 2),
    right=np.array([[True, False, True], [False, True, True]]),
    change_ms=np.array([0.0, 0.0, 0.0]),
)
WHOLE = (np.array([10.0, 20.0]), np.array([2.0, 2.0]))


def request_of(slo):
    example = TaskExample(user="how?", answer="a", options=("a", "b"))
    return TraceRequest(time_s=0.0, app="app", slo=slo, task="mood", example=example)
