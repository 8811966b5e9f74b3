"""Mixtures of experts larger than memory: what every token needs stays, experts are read when they are
visited, or before (EdgeMoE, arXiv 2308.14352)."""
