"""Defines the subcommands of `jaxllm` that train; their modules import no JAX until they run."""
