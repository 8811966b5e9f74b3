"""Holds the packaged recipes: TOML files by kind of run, read by `jaxllm.training.settings`."""
