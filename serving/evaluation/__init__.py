"""Evaluates models: perplexity of texts, and right answers to the questions of `jaxllm.tasks`."""
