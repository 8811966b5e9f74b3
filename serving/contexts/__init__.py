"""App contexts that outlive calls: their chunks in memory and on storage (LLMS)."""
