"""`jaxllm bench contexts`: what it takes to switch between the contexts of apps in a tight memory budget.

All systems are one manager, one store and the same kernels under other options, so that what differs is the
idea. The systems beside ours, under the names that LLMS (arXiv 2403.11805, section 5.1) has for them:

- LMK: chunks as the cache holds them; when memory is short a whole context is dropped, and computed again
  from its text at its next call.
- Swapping: a whole context is written when it leaves memory, and read when it is called.
- VLLM-S: pages of 16 tokens, written when they leave (those that are not on storage yet), least recently used
  first, and read when their context is called.
- VLLM-SQ: the same with all pages at 8 bits.
- jaxllm-no-compression, -no-pipeline, -no-lifecycle: ours without one of its three techniques: all chunks at
  8 bits; missing chunks only read; least recently used chunks first, written when they leave.

A switch is timed from the call to when the context is ready to be fed the new prompt: room is made, which
includes the writing of what was not written ahead, and what is missing comes back, decoded into the cache.
A call to the context that was called last is no switch. Contexts are computed once; each system stores and
keeps them its own way.
"""
