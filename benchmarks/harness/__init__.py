"""Times systems fairly on a shared machine, and reports what was measured.

`report` has the rows of the contract, their ratios and intervals, and prints and draws them; `machine` waits
for quiet, measures bandwidth and energy and describes storage; `memory` measures a process; `options`
declares the options that benches share. Systems answer in turns by `benchmarks.peers.process`.
"""
