"""Layers as pure functions over arrays: matrix products (all through `linear`), norms, attention, packed
documents."""
