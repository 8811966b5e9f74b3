"""Turns files into the batch of a step.

In this order: `sources` names and opens files, also at URLs, `documents` and `chats` read them, `encoders`
turns them into tokens (by a `tokenizer` trained here, or by a model's own), `corpus` splits them and stores
the tokens on disk, `packing` samples batches of packed documents into `rows`, or of windows.
"""
