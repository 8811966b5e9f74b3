"""The core of the service: pure functions over arrays, and the files that hold prepared models."""

__version__ = "0.1.0"
