"""Elastic models (ELMS): units in the order of their importance, and sub-models that are prefixes of them."""
