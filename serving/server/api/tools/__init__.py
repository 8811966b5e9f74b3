"""Finds calls of tools in answers, and makes grammars that force them, for each family of models."""
