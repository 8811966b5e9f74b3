"""Speculative decoding with a token tree (LLMCad): tree, branch pacer, fallback, acceptance."""
