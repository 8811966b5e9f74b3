"""Buckets: compiled static shapes, and the one place that compiles.

Promise: after warm-up nothing compiles, and a second process reads what the first compiled. Read: `bucket`
(a shape), `bucket_table` (compiles), `store` (on disk), then one file per family of shapes. Requested by
`jaxllm.serving.runners`.
"""
