"""Times systems fairly on a shared machine, and reports what was measured.

`report` has the rows of the contract, their units, ratios and intervals, and prints them; `figures` draws
them; `plan` has the sizes of quick and whole runs; `children` measures in processes of their own, and in
turns; `machine` waits for quiet, measures bandwidth and energy and describes storage; `memory` measures a
process; `options` declares the options that benches share. Engines answer in turns by
`benchmarks.peers.process`.
"""
