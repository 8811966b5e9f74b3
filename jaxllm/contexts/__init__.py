"""Stored KV cache chunks (LLMS, arXiv 2403.11805), the pure part: how chunks become bytes.

Promise: a chunk at 8, 4 or 2 bits by attention density keeps what later tokens read. Read first: `codecs`
(chunks to bytes and back), `coded` (attention over them as stored), `tolerance` (which bits), `recompute`
(read or compute), `eviction` (what leaves memory). Plugged in by `jaxllm.serving.contexts`. Measured by
`jaxllm bench contexts`.
"""
