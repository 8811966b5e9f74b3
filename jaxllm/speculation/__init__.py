"""Speculative decoding with a token tree (LLMCad, arXiv 2309.04255), the pure part.

Promise: the accepted tokens are those that the target would have given. Read first: `token_tree` (the tree on
the host), then `tree` (its arrays, growth, acceptance and verification in compiled steps). Plugged in by
`jaxllm.serving.speculation`. Measured by `jaxllm bench speculative`.
"""
