"""Places weights in memory, computes their sizes, and reads them ahead of their use.

Promise: a model larger than memory streams its layers within the budget. Read: `footprint` (bytes),
`streamed`, `pieces` and `prefetch` (reading ahead), `adapters`. Chosen by `jaxllm.serving.opening`. Measured
by `jaxllm bench speculative`.
"""
