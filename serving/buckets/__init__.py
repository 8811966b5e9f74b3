"""Buckets: compiled static shapes, and the one place that compiles.

Promise: after warm-up nothing compiles, and a second process reads what the first compiled. Read: `bucket`
(a shape), `bucket_table` (compiles, and stores on disk), `model` (the model, its layers, stored contexts),
`tree`, `source`. Requested by `jaxllm.serving.runners`.
"""
