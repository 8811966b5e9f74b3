"""Trains any job: one compiled step over a mesh of devices, with checkpoints that resume bit for bit.

In this order: `fitting` trains in a run's folder by `trainer`, the loop itself, with `optimizer`, `losses`,
`checkpoints` and `parallel`; `run_files` keeps a folder to one run, and shows progress.
"""
