"""Chooses the bit width of each expert by measured losses (EdgeMoE), and writes the bundle.

Read `measures` (the losses), then `expert_widths` (on a text or on pairs). Run by
`jaxllm calibrate experts`. Measured by `jaxllm bench experts`.
"""
