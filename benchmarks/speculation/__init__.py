"""`jaxllm bench speculative`: a model larger than memory, with and without drafts (LLMCad, section 4).

`systems` opens ours and the baselines, `shards` narrows the target for STI, `run` times answers, `answers`
tunes systems and has the figures of answers, `memory` measures a process in a budget, `in_memory` times
answers without one, beside llama.cpp's, and makes a trained target as much larger than its draft as the
papers' are.
"""

# That a run may be limited to: name -> what is measured, for the help text.
PARTS = {
    "systems": "time per token of every system",
    "ablations": "time per token without each technique",
    "unguessable": "time per token of answers that no draft can guess",
    "same-answers": "share of answers that equal the target's own",
    "in-memory": "with --full or named: time per token with all weights in memory, drafted by their high "
    "planes or a small model, beside llama.cpp with drafts and without",
}

# Sets of options of the token tree: name -> what is measured of it, for the help text.
PRESETS = {
    "ours": "ours without each technique",
    "published": "LLMCad as its paper has it, and without each technique",
}
