"""`jaxllm bench experts`: mixtures of experts larger than memory, beside other systems (EdgeMoE, section 4).

`systems` opens ours and the baselines, `run` times them and each technique, `replay` judges predictors and
eviction policies by the experts that a model visited.
"""

# That a run may be limited to: name -> what is measured, for the help text.
PARTS = {
    "systems": "time per token and memory of every system",
    "ablations": "time per token without each of our techniques",
    "buffers": "time per token by room for experts",
    "losses": "time per token by the tolerable loss",
    "predictors": "hit rates of predictors and eviction policies",
}
