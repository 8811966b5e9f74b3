"""Exported programs at run time: executors that run them, their drafts, and bounds of their sizes.

`open_program` (`jaxllm.export.programs.model`) opens one. None of it needs model code (but `live`, which
traces).
"""
