"""Checks and measures training and serving on one accelerator: attention, speed, memory, resuming, levels."""
