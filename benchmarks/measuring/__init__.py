"""Times systems fairly on a shared machine, and reports what was measured.

`quiet` repeats what other processes disturbed, `memory`, `bandwidth` and `energy` measure, `intervals` are of
ratios, `storage` says where weights lie, `report` prints and draws rows. Systems answer in turns by
`benchmarks.peers.alternation`.
"""
