"""Elastic models (ELMS): units in the order of importance, levels, sub-models, SLOs, shorter prompts."""
