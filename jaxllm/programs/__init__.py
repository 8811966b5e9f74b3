"""Exported programs: what a step of them computes (`steps`), and what their folder holds (`manifest` and
`weights`, which need no model code)."""
