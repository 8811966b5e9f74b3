"""Runners: one base, and a runner for each place of weights.

Promise: `start`, `prefill`, `sample`, `decode` and `verify` of any runner give the same tokens. Read:
`runner` (the base), `level_runner` (the shared part, and the plan of buckets), `resident` (and batches),
`layerwise`. Chosen by `jaxllm.serving.opening.make_runners`. Measured by `jaxllm bench engine`.
"""
