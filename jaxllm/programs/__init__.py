"""Exported programs: what a step of them computes (`steps`), and what their folder holds (`manifest`,
`shapes` and `weights`, which need no model code)."""
