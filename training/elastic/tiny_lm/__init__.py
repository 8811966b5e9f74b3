"""Trains the tiny LM that plans requests (ELMS, arXiv 2409.09071, section 3.3).

In this order: `recipe` describes a run, `sources` reads its inputs (`keep_labels` of shortened texts,
`questions` of tasks) and `start` makes the tiny LM before training; `self_labels` labels decisions by an
elastic model, `word_labels` labels words by it; `batches` samples rows, `job` defines the training,
`scores` measures it, and `run` does all of it.
"""
