"""Provides the models that benchmarks run on.

`checkpoint` makes the float weights of a bundle or folder available to peers, `shapes` draws random weights
of known sizes. Random models of one benchmark (elastic, calibrated) are made in its room.
"""
