"""Exports programs of a model for devices that run no model code: StableHLO, TFLite, LiteRT-LM, IREE.

All formats come from one source, the steps of `jaxllm.steps.exported` with their weights as arguments.
"""
