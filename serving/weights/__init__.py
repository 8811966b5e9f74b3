"""Places weights in memory, computes their sizes, and reads them ahead of their use.

Promise: a model larger than memory streams its layers within the budget. Read: `memory_plan` (bytes),
`streamed`, `pieces` and `prefetch` (reading ahead), `model_level`. Chosen by `jaxllm.serving.opening`.
Measured by `jaxllm bench speculative`.
"""
