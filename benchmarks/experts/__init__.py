"""Mixtures of experts larger than memory, beside other ways to run them (EdgeMoE, section 5)."""
