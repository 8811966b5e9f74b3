"""Trains a decoder from nothing, or from a teacher: `recipe`, `job`, then `run`."""
