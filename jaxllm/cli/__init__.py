"""Subcommands of `jaxllm`, one module each."""
