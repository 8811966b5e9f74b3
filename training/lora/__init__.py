"""Trains low-rank adapters over frozen models."""
