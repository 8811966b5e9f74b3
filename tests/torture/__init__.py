"""Harms every kind of file, call and process on purpose: `python -m tests.torture` (`make torture`)."""
