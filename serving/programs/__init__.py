"""Exported programs at run time: executors that run them, their drafts, and what screens foreign folders.

`serving.engine.Engine.open_program` opens one. None of it needs model code (but `live`, which traces).
"""
