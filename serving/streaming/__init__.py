"""Models larger than memory: their weights are read from storage while they run (LLMCad, section 2)."""
