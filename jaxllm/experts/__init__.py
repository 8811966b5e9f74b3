"""Mixtures of experts: routing, the mixture itself, bitwidths, prediction of experts, eviction policies."""
