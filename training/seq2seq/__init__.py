"""Trains encoder-decoders on pairs of a source and its target, such as sentences and their translations."""
