"""Times systems fairly on a shared machine, and reports what was measured.

`bench` declares a benchmark: sizes of quick and whole runs, options, the command; `report` has the rows of
the contract, their units, ratios and intervals, and prints and draws them; `children` measures in processes
of their own, and in turns; `machine` waits for quiet, measures memory and energy and describes
storage. Engines answer in turns by `benchmarks.peers.process`.
"""
