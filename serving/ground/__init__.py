"""The ground of serving: options, plans, opening bundles, prompt embeddings, text as it comes.

Everything here is plain data and small functions that all rooms above share; nothing computes.
"""
