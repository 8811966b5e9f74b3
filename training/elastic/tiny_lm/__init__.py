"""Trains the tiny LM that plans requests (ELMS, arXiv 2409.09071, section 3.3).

In this order: `recipe` describes a run, `rows` labels the words of texts by their shorter versions, and
samples batches; `labels` reads questions and labels decisions and words by an elastic model; `run` reads all
inputs, makes the tiny LM before training, trains and measures.
"""
