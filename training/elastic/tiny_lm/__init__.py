"""Trains the tiny LM that plans requests (ELMS, arXiv 2409.09071, section 3.3).

In this order: `recipe` describes a run, `sources` reads what it learns from (`keep_labels` of shortened
texts, `questions` of tasks) and `start` the tiny LM before training; `self_labels` has an elastic model label
decisions, `word_labels` has it label words; `batches` draws rows, `job` defines what is trained, `scores`
measures it, and `run` does all of it.
"""
