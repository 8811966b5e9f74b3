"""Holds the packaged recipes, TOML files by kind of run, and `files`, which reads them."""
