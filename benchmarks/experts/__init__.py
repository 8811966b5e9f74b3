"""`jaxllm bench experts`: mixtures of experts larger than memory, beside other systems (EdgeMoE, section 5).

`systems` opens ours and the baselines, `run` times them and each technique, `replay` judges predictors and
eviction policies by the experts that a model visited.
"""

# That a run may be limited to.
PARTS = ("systems", "ablations", "buffers", "losses", "predictors")
