"""`jaxllm bench contexts`: switching between the contexts of apps in a tight memory budget.

All systems are one manager, one store and the same kernels under other options, so that they differ in their
idea alone. The baselines, by their names in LLMS (arXiv 2403.11805, section 4):

- LMK: raw chunks; when memory is short a whole context is dropped, and computed again from its text at its
  next call.
- Swapping: a whole context is written when it leaves memory, and read when it is called.
- VLLM-S: pages of 16 tokens, evicted least recently used first, written then unless they are on storage, and
  read when their context is called.
- VLLM-SQ: the same with all pages at 8 bits.
- jaxllm-no-compression, -no-pipeline, -no-lifecycle: ours without one of its three techniques: all chunks at
  8 bits; missing chunks only read; least recently used chunks first, written when they leave.
- jaxllm-no-overlap: ours, whose prompts are computed when all chunks have been read, as those of baselines.
- jaxllm-attend-coded: ours with `EngineOptions.attend_coded`; the others decode chunks into a cache.

The part `resident` has `attend_coded` on as `jaxllm`, and off as `jaxllm-decoded`.

A switch is timed from the call until its first token: chunks of others are evicted, and written if they were
not written ahead, missing chunks are restored into the cache, and the new prompt is computed, with the
context's tokens that are in no whole chunk. The part until the context can be fed the prompt is reported,
too; of ours until all chunks have been read, where the prompt is computed meanwhile. A call to the context
that was called last is no switch. Contexts are computed once, and stored and kept by each system.
"""

# That a run may be limited to: name -> what is measured, for the help text.
PARTS = {
    "switching": "time to switch contexts, on every system",
    "ablations": "the same without each of our techniques, and with chunks attended to where they lie",
    "chunk-sizes": "the same with chunks of other lengths",
    "budgets": "most contexts within a limit of switches, by memory",
    "lengths": "the same by the longest context",
    "intervals": "time to switch by the time between calls",
    "resident": "contexts whose chunks are all in memory: attended to where they lie, or decoded first",
    "answering": "speed of answers in a context and without one",
    "traffic": "bytes that switches read and write, and their least time; counted, no model runs",
    "quality": "perplexity, accuracy and recall of compressed contexts",
    "density": "the same for widths by density, and flat and shuffled ones in equal bytes",
}
