"""Weights: where they lie, how many bytes they take, and what is read before it is needed.

Promise: a model larger than memory streams its layers within the budget. Read: `footprint` (bytes),
`streamed`, `pieces` and `prefetch` (reading ahead), `adapters`. Chosen by `jaxllm.serving.opening`. Measured
by `jaxllm bench speculative`.
"""
