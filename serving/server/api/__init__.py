"""Speaks HTTP for the service: OpenAI's, Anthropic's and Ollama's formats over one backend, without JAX."""
