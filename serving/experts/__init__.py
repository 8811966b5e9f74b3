"""Mixtures of experts larger than memory (EdgeMoE, arXiv 2308.14352) at run time.

Promise: experts are read when they are visited, or prefetched; all other weights are resident. Read first:
`expert_layers` (a layer with its experts), `cache` (the expert buffer), `weights` (predictors), `store` (the
file). Plugged in by `jaxllm.serving.opening`. Measured by `jaxllm bench experts`.
"""
