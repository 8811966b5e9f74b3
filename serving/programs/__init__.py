"""The engine's loop over exported programs: an `Executor` runs them, `ProgramTable` decodes with one, and
`ProgramEngine` is what callers open. None of it needs model code (but `live`, which traces)."""
