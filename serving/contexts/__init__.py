"""Contexts of apps (LLMS, arXiv 2403.11805): conversations whose KV cache outlives calls and processes.

A context is restored in milliseconds, from memory, storage or its tokens, whichever is fastest, and nothing
that a call stored is lost if the process is killed. Read first: `context` (the interface), `manager` (a
call from begin to finish), `memory`, `restore`, `saving`; then `store` (`catalog`, `segment`, `layout`) for
the files. Used by `jaxllm.serving.server.service` and, over exported programs, by
`jaxllm.export.device`. Measured by `jaxllm bench contexts`.
"""
