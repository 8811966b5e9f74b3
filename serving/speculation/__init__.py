"""Answers of a target that a drafter speeds up without changing them (LLMCad)."""
