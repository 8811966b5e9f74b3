"""`jaxllm bench speculative`: a model larger than memory, with and without drafts (LLMCad, section 4).

`systems` opens ours and the baselines, `run` times their answers, `memory` measures a process in a budget,
and `enlarged` makes a trained target as much larger than its draft as the papers' are.
"""

# That a run may be limited to.
PARTS = ("systems", "ablations", "unguessable", "same-answers")
