"""Makes models elastic (ELMS, arXiv 2409.09071): importance, order, recovery of all levels.

Read `job` (importance, levels, what is trained), then `run` (from sources to the bundle); `tiny_lm/` trains
the planner's model. Run by `jaxllm elasticize`. Measured by `jaxllm bench elastic`.
"""
