"""Elastic models (ELMS, arXiv 2409.09071), the pure part: one model holds nested sub-models.

Promise: units in the order of importance make a prefix of every weight a smaller model, so changing the level
moves nothing. Read first: `units` (what is ordered), `ladder` (levels and their sub-configs), `slo`
(objectives), `compression` (shorter prompts). Plugged in by `jaxllm.serving.elastic`; made by
`jaxllm.training.elastic`. Measured by `jaxllm bench elastic`.
"""
