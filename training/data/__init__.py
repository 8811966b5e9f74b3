"""Turns files into the batch of a step.

In this order: `sources` names files and tasks, `documents` and `chats` read them, also from URLs
(`remote_files`; `shortened_prompts` drops words), `encoders` turns them into tokens (by a `tokenizer`
trained here, or by a model's own), `corpus` splits them and stores the tokens on disk, `packing` samples
batches, or `windows` of corpora that are too large to pack. `digests` names models by their contents.
"""
