"""Trains the tiny LM that plans requests (ELMS, arXiv 2409.09071, section 3.3).

In this order: `recipe` describes a run, `start` reads its inputs (`keep_labels` of shortened texts, questions
of tasks), makes the tiny LM before training and defines its jobs; `self_labels` labels decisions by an
elastic model, `word_labels` labels words by it; `batches` samples rows, and `run` trains and measures.
"""
