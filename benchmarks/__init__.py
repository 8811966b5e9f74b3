"""Measurements: one room per claim, each against its baselines in the same run."""
