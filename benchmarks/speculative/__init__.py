"""A model larger than memory, with and without drafts (LLMCad, section 4)."""
