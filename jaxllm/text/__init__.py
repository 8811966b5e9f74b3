"""Tokenizers, chat templates and prompts. Those of unknown cost run in a child process with bounds."""
