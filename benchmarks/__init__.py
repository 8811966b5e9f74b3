"""Measurements: one module per claim, each against its baselines in the same run."""
