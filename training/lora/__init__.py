"""Trains low-rank adapters over frozen models: `recipe`, `job`, then `run`."""
