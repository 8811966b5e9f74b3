"""Stored KV cache chunks (LLMS, arXiv 2403.11805), the pure part: how chunks become bytes.

A chunk at 8, 4 or 2 bits, chosen by attention density, retains what later tokens attend to. Read first:
`codecs` (chunks to bytes and back), `coded` (attention over stored chunks), `tolerance` (choice of bits),
`recompute` (read or compute), `eviction` (order of eviction). Used by `jaxllm.serving.contexts`. Measured
by `jaxllm bench contexts`.
"""

# Default tokens of a chunk (LLMS, section 4).
CHUNK_TOKENS = 16
# Bytes of a row of a head beside its numbers, in caches at 8 bits (see `jaxllm.kv.byte_rows`).
ROW_BYTES = 4
