"""`jaxllm bench experts`: mixtures of experts larger than memory, beside other systems (EdgeMoE, section 4).

`systems` opens ours and the baselines, `run` times them and each technique, `replay` judges predictors and
eviction policies by the experts that a model visited. `nested` measures nested experts, of a trained mixture
with wider experts (`widened`), and what a loss costs (`quality`).
"""

# That a run may be limited to: name -> what is measured, for the help text.
PARTS = {
    "systems": "time per token and memory of every system",
    "ablations": "time per token without each of our techniques",
    "buffers": "time per token by room for experts",
    "losses": "time per token by the tolerable loss",
    "nested": "time per token of nested experts beside IO-QEXP, and what a loss costs",
    "predictors": "hit rates of predictors and eviction policies",
}
