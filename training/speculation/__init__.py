"""Calibrates nested weights, so that their upper 4 bits draft well (LLMCad, self-drafting).

Read `nested`; the rounding itself is in `jaxllm.quant`. Run by `jaxllm calibrate nested`. Measured by
`jaxllm bench speculative --draft nested`.
"""
