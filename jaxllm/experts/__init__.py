"""Mixtures of experts (EdgeMoE, arXiv 2308.14352), the pure part.

Promise: one mixture for any number of experts, each with its own bit width, and predictions of the next ones.
Read first: `routing`, `mixture` (the products), `bitwidth` (widths by importance), `prediction` (activation
paths and eviction). Plugged in by `jaxllm.serving.experts`. Measured by `jaxllm bench experts`.
"""
