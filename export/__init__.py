"""Exports programs of a model for devices that run no model code: StableHLO, TFLite, LiteRT-LM; or a
level as a plain model for other engines: a Hugging Face folder, a GGUF file.

All programs come from one source, the steps of `jaxllm.export.steps.exported` with their weights as
arguments.
"""
