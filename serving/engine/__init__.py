"""The engine: the straight line of an answer, from request to text.

Promise: one order of stages (begin, prefill, decode or verify, finish) for every kind of model, and nothing
compiles on the way. Read: `request`, `run` (a request on its way), `step` (the order, and what callers
iterate), `decoding` (where tokens come from), `engine`. The five systems are plugged in by
`jaxllm.serving.opening`. Measured by `jaxllm bench engine`.
"""
