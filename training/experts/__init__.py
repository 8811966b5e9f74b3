"""Chooses the bit width of each expert by measured losses (EdgeMoE), and writes the bundle.

Read `width_losses` (the search), then `expert_widths` (on a text) or `seq2seq_widths` (on pairs). Run by
`jaxllm calibrate experts`. Measured by `jaxllm bench experts`.
"""
