"""Speculation (LLMCad, arXiv 2309.04255) at run time: drafts tokens and verifies them.

Promise: the target's own answer, token for token, in fewer passes, also while its weights are read. Read
first: `speculation` (draft, verify, accept), `drafter` (the protocol, and lookup), `drafters` (models),
`costs` (when drafting stops). Plugged in by `jaxllm.serving.opening`. Measured by
`jaxllm bench speculative`.
"""
