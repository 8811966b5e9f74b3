"""Defines the functions that are compiled: of a whole model, of single layers, of token trees, and
exported."""
