"""Elastic models (ELMS, arXiv 2409.09071) at run time: plans answers that meet objectives.

Promise: each call gets the best level and prompt that meet its objective, at less than 1 % of its time to
the first token. Read first: `objectives`, `profile` (what this device takes), `planner`, `tiny_lm` (what is
likely right), `planned_service` (a call from plan to answer). Plugged in by `jaxllm.serving.server.service`.
Measured by `jaxllm bench elastic`.
"""
