"""Times systems fairly on a shared machine, and reports what was measured.

`alternation` lets systems answer in turns, `quiet` repeats what other processes disturbed, `memory`,
`bandwidth` and `perplexity` measure, `storage` says where weights lie, `report` prints and draws rows.
"""
