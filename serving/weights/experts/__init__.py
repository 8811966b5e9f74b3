"""Runs mixtures of experts larger than memory: experts are read when they are visited, or prefetched; all
other weights are resident (EdgeMoE, arXiv 2308.14352)."""
