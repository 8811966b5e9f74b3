"""Elastic models (ELMS, arXiv 2409.09071) at run time: plans answers that meet objectives.

Each call gets the best level and prompt that meet its objective, at less than 1 % of its time to the first
token. Read first: `objectives`, `profile` (times on this device), `planner`, `tiny_lm` (predicts which
choices are right), `planned_service` (a call from plan to answer). Used by `jaxllm.serving.server.service`.
Measured by `jaxllm bench elastic`.
"""
