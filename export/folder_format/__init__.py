"""Reads and writes folders of exported programs: manifest, shapes and weights, without any model code."""
