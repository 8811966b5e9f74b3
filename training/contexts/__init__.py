"""Calibrates how contexts are stored (LLMS): measures codecs' errors, and writes the bundle with the choice.

Read `contexts`; the choice itself is `jaxllm.contexts.tolerance`. Run by `jaxllm calibrate contexts`.
Measured by `jaxllm bench contexts --only quality`.
"""
