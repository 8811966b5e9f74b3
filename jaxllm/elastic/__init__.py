"""Elastic models (ELMS, arXiv 2409.09071), the pure part: one model contains nested sub-models.

With units in the order of importance, a prefix of every weight is a smaller model, so that changing the
level moves nothing. Read first: `units` (the ordered units), `ladder` (levels and their sub-configs), `slo`
(objectives), `compression` (shorter prompts). Used by `jaxllm.serving.elastic`; made by
`jaxllm.training.elastic`. Measured by `jaxllm bench elastic`.
"""
