"""Subcommands of `jaxllm bench`, one module each."""
