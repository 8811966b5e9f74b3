"""Turns files into the batch of a step.

In this order: `sources` names and opens files, also at URLs, `documents` reads them, `encoders` turns them
into tokens (by a tokenizer trained here, or by a model's own), `corpus` splits them and stores the tokens on
disk, `rows` samples batches of packed documents, or of windows.
"""
