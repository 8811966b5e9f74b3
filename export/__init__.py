"""Portable programs of a model, for devices that trace nothing: StableHLO, TFLite, LiteRT-LM, IREE.

All come from one source, the steps of `jaxllm.programs.steps` with their weights as arguments; what runs them
is `serving/programs`.
"""
