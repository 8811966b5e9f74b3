"""Speculative decoding with a tree of tokens (LLMCad): what is drafted, in which order, what is accepted."""
